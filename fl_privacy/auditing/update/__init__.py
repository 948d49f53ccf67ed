"""Audit of the change between two files, of any framework."""
