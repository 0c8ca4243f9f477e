"""Layers of a model, by what they keep of tokens: groups of the KV cache, and states."""
