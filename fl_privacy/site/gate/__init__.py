"""A site's own policy of what may come in and leave: rules, noise, the ledger, and what keeps an app apart."""

READY = ("strict", "research", "dp")
"""Policies that come with the package."""
