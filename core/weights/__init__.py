"""Weights of a model: planning, cutting, few bits, loading and the cache of packed tensors."""
