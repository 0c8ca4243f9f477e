"""The logits processors behind the fields of SamplingParams."""
