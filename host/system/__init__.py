"""Processes and their messages, threads, memory, limits of the host; nothing here knows a model."""
