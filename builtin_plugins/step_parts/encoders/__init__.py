"""Images of prompts: placed in the frontend, encoded in workers, a batch of their own."""

from .part import Encoders

__all__ = ["Encoders"]
