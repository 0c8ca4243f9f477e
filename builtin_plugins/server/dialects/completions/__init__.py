"""Prompts in the shape of OpenAI's completions."""
