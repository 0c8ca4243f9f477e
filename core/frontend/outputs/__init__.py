"""Text out: what the engine returns becomes what callers get.

Text is held back in the stages of `OutputStream` alone, and not at all once a completion has ended.
"""
