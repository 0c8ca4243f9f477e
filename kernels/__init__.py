"""Kernels for processors, each with a twin in plain torch that defines its results."""
