"""Schemes of weights of few bits."""
