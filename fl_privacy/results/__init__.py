"""The folder of a run: what is recorded while it goes on, and how it is read back."""
