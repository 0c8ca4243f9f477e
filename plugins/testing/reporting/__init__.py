"""Conformance suites for what receives statistics and KV cache events."""
