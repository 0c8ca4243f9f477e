"""Logits processors that were written for other engines, as components of this one."""
