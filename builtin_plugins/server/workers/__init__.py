"""Several processes that serve one address, and what they share."""
