"""Transformers that read text."""
