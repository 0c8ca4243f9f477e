"""Adapters that run logits processors written for other engines as components."""
