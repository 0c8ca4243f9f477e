"""Weights of few bits from a third party."""
