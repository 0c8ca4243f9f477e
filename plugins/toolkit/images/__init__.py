"""Images as users send them, and how they become pixels: sources, limits, decoding."""

from .decoder import ImageDecoder
from .fetch import Fetcher
from .header import FORMATS
from .sources import ImageReader

__all__ = ["FORMATS", "Fetcher", "ImageDecoder", "ImageReader"]
