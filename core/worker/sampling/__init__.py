"""From logits to tokens: the pipeline of logits processors, log-probabilities, the sampler."""
