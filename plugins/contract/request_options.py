"""Keyword arguments of the calls that generate, stated once for every signature that takes them."""

from .requests.options import ChatOptions as ChatOptions
from .requests.options import ChatRequestOptions as ChatRequestOptions
from .requests.options import RequestOptions as RequestOptions

__all__: list[str] = []
