"""Prompts in: what callers give is checked, and becomes requests of the engine."""
