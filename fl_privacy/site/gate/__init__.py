"""A site's policy on incoming and outgoing messages: rules, noise, ledger and isolation of an app."""

READY = ("strict", "research", "dp")
"""Policies that come with the package."""
