"""A site's tools: its policy, the gate that enforces the policy, and the deployment of clients."""
