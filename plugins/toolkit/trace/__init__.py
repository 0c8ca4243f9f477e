"""Traces of requests: how each token was chosen, as records, a table and a page."""

from .records import (
    Candidate,
    Change,
    CompletionTrace,
    Draw,
    PhaseName,
    StepTrace,
    TokenChange,
    TokenTrace,
    TraceRecord,
    probability,
)
from .trace import TRACE, Trace, asking_for_trace, completion_trace, trace_of

__all__ = [
    "TRACE",
    "Candidate",
    "Change",
    "CompletionTrace",
    "Draw",
    "PhaseName",
    "StepTrace",
    "TokenChange",
    "TokenTrace",
    "Trace",
    "TraceRecord",
    "asking_for_trace",
    "completion_trace",
    "probability",
    "trace_of",
]
