"""The engine in a process of its own: how it is started, watched and ended."""
