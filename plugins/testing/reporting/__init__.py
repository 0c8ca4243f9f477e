"""Conformance suites for receivers of statistics and of KV cache events."""
