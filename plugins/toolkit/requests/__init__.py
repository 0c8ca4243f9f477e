"""Requests: graceful ends, states of plugins at another engine, and iterables that are slow."""
