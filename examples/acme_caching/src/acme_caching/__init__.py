"""Eviction policies for Hardpoint."""

from .arc import AdaptiveReplacement
from .lfu import LeastFrequentlyUsed
from .two_queues import TwoQueues

__all__ = ["AdaptiveReplacement", "LeastFrequentlyUsed", "TwoQueues"]
