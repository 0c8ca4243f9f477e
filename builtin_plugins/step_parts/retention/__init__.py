"""Retention: blocks of conversations that are worth more than others for a while."""

from .part import PrefixRetention as Retention

__all__ = ["Retention"]
