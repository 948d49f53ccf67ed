"""Flower mods and wrappers: defenses, guards, canaries and probes around clients that others wrote."""
