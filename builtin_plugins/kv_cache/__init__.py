"""Eviction policies and KV event publishers."""
