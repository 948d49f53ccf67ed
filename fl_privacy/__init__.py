"""fl_privacy: how much of the clients' data can be read from what they upload, and which defense stops it."""
