"""Rules that a logits processor must keep."""
