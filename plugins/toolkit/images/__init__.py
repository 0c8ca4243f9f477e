"""Images as users send them, and how they become pixels: sources, limits, decoding."""

from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import ProcessedImage

from .decoder import ImageDecoder
from .fetch import Fetcher
from .header import FORMATS
from .sources import ImageReader

__all__ = ["FORMATS", "Fetcher", "ImageDecoder", "ImageReader", "ImagesConfig", "ProcessedImage"]
