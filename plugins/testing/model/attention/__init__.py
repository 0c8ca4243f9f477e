"""The conformance suite for attention backends, and its rules."""
