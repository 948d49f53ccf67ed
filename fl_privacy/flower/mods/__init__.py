"""Flower mods and wrappers for third-party clients: defenses, guards, canaries and probes."""
