"""An IO processor for Hardpoint: a document of any length as overlapping spans with vectors."""

from .processor import Document, Spans

__all__ = ["Document", "Spans"]
