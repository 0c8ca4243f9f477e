"""Text out: what the engine returns becomes what callers get."""
