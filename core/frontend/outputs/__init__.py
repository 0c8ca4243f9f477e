"""Text out: what the engine returns becomes what callers get.

Text is held back in the stages of `CompletionStream` alone, and no longer than its completion runs.
"""
