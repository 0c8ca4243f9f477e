"""Several processes that serve one address, and their shared state."""
