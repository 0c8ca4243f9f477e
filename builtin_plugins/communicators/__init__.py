"""Communicators: how the ranks that share a model exchange tensors."""
