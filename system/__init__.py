"""Processes, threads, memory and limits of the host; nothing here knows a model."""
