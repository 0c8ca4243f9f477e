"""JSON schemas, rewritten so that a grammar enforces exactly what they require, or refused."""
