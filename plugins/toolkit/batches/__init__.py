"""Data structures of a batch that persists between steps."""
