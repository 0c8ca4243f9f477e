"""Parameters of requests."""

from .requests.params import (
    PoolingParams,
    RepetitionDetection,
    RequestOutputKind,
    SamplingParams,
)

__all__ = ["PoolingParams", "RepetitionDetection", "RequestOutputKind", "SamplingParams"]
