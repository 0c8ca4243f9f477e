"""Adapters of components: of logits processors for other engines, and of an earlier contract."""
