"""Output processing: from the engine's outputs to users' outputs.

Text is held back in the stages of `CompletionStream` alone, and no longer than its completion runs.
"""
