"""Inputs whose gradient is the one observed."""
