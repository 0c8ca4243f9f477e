"""Hardpoint: a plugin-oriented LLM inference engine."""
