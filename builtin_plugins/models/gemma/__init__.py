"""Gemma 2 and 3, with images."""
