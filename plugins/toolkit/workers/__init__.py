"""Calls of workers as bytes, for executors that move them in a way of their own."""
