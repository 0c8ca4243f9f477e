"""Encoders, and models without a language model's head: their results are pooled."""
