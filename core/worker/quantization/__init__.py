"""Matrices of few bits in a worker: read or quantised, checked, and sized before they are read."""
