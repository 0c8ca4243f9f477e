"""Native models."""
