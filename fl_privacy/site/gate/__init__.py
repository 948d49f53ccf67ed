"""Gate of a site: its policy on incoming and outgoing messages, noise, privacy ledger, and isolation of apps."""

READY = ("strict", "research", "dp")  # names of the policies that come with the package
