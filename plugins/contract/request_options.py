"""Keyword arguments of the calls that generate, stated once for every signature that takes them."""

from .requests.options import (
    ChatOptions,
    ChatRequestOptions,
    RequestOptions,
)

__all__ = ["ChatOptions", "ChatRequestOptions", "RequestOptions"]
