"""The conformance suite of logits processors."""
