"""Suites for what reads and changes hidden states: poolers and activation taps."""
