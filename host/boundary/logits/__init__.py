"""Logits processors: guarded calls, the rows that they get, and what they return."""
