"""Invariants that a scheduler must keep."""
