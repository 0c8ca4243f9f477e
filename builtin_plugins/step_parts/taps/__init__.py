"""Activation taps: plugins that read or change hidden states of the requests that ask."""

from .part import ActivationTaps

__all__ = ["ActivationTaps"]
