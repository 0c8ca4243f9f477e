"""Kernels for processors, each with a twin in plain torch that says what is right."""
