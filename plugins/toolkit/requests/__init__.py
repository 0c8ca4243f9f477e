"""Requests: graceful ends, and states of plugins at another engine."""
