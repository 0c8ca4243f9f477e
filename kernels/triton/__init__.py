"""Kernels in Triton for GPUs, each with a twin in plain torch that defines its results."""
