"""Conversations that stay open: their states and tokens, and their turns."""
