"""Requests as they arrive: bodies, their conversion, and options for the engine."""
