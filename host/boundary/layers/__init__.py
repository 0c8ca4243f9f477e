"""Layers of a model, by their memory per token or sequence: KV cache groups, and states."""
