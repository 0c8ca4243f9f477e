"""Conversations in the shape of OpenAI's chat completions."""
