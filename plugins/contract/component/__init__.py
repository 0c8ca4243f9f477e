"""The base of every component: its interface, its identity, and declarations about its methods."""

from .adapter import AdaptedComponent, ComponentAdapter
from .base import MAX_STATE_BYTES as MAX_STATE_BYTES
from .base import Component as Component
from .base import Context as Context
from .base import NoOptions as NoOptions
from .base import Progress as Progress
from .base import Source
from .base import no_progress as no_progress
from .wrapper import Wrapper

__all__ = [
    "AdaptedComponent",
    "ComponentAdapter",
    "Source",
    "Wrapper",
]
