"""Drafting heads: layers that draft tokens from hidden states of a model."""
