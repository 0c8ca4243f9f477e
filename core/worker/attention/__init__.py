"""Attention in the worker: the layers' groups and their caches."""
