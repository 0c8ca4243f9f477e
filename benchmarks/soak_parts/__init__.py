"""Clients that go away, a plugin that fails, and what a server holds; used by soak.py."""
