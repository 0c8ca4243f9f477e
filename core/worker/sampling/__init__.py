"""Sampling: the pipeline of logits processors, the sampler and log-probabilities."""
