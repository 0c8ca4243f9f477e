"""Conformance suites for poolers and activation taps."""
