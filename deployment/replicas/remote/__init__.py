"""Engines of other machines: they join over TCP, and run like local ones.

The program that has the requests is their head. It listens for them (`listener`); the
engine's side is `joining` and `engine_link`.
"""
