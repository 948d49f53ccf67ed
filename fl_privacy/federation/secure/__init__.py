"""Rounds in which the server adds up what it can't read; needs TenSEAL."""
