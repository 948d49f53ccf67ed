"""A site's own side: its policy, the gate that enforces it, and the start of its clients."""
