"""Traces of requests: how each token was chosen, as records, a table and a page."""

from .records import Candidate, Change, CompletionTrace, Draw, StepTrace, TokenChange, TokenTrace
from .trace import TRACE, Trace, asking_for_trace, completion_trace, trace_of

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
