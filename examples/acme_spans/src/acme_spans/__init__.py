"""IO processors for Hardpoint: spans of a document with vectors, and summaries of a document."""

from .digest import Digest, Summary, Text
from .processor import Document, Spans

__all__ = ["Digest", "Document", "Spans", "Summary", "Text"]
