"""JSON schemas, rewritten so that a grammar enforces them exactly, or rejected."""
