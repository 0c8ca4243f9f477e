"""The rules for models whose prompts have images, and their checks."""
