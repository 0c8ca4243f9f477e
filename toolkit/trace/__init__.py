"""Traces of requests: what became of each token, as records, a table and a page."""

from .records import Candidate, Change, Draw, StepTrace, TokenChange, TokenTrace
from .trace import TRACE, CompletionTrace, Trace, asking_for_trace, completion_trace, trace_of

__all__ = [
    "TRACE",
    "Candidate",
    "Change",
    "CompletionTrace",
    "Draw",
    "StepTrace",
    "TokenChange",
    "TokenTrace",
    "Trace",
    "asking_for_trace",
    "completion_trace",
    "trace_of",
]
