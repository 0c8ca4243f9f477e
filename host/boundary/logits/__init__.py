"""Logits processors: guarded calls, their rows, and their results."""
