"""What a site runs of its own: its policy, the gate that keeps it, and what starts its clients."""
