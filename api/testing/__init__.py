"""Tools for tests of plugins and of the engine: the scripted model, and the conformance suites.

The scripted model needs nothing beside the engine. The suites need pytest and hypothesis
(`pip install hardpoint[testing]`) and are switched on where they are wanted, by a line in
`conftest.py`: `pytest_plugins = ["hardpoint.testing"]`.

PYTEST_DONT_REWRITE: there is no `assert` here that pytest would have to explain.
"""

from typing import TYPE_CHECKING, Any

from .pytest_hooks import pytest_report_header, pytest_terminal_summary
from .scripted import (
    EOS,
    HistoryAttention,
    ScriptedClock,
    ScriptedModel,
    history_hash,
    scripted_config,
    scripted_engine,
    write_scripted_model,
)

if TYPE_CHECKING:
    from .logits_suite import LogitsProcessorSuite

__all__ = [
    "EOS",
    "HistoryAttention",
    "LogitsProcessorSuite",
    "ScriptedClock",
    "ScriptedModel",
    "history_hash",
    "pytest_report_header",
    "pytest_terminal_summary",
    "scripted_config",
    "scripted_engine",
    "write_scripted_model",
]


def __getattr__(name: str) -> Any:
    # Who only wants the scripted model needs neither pytest nor hypothesis.
    if name == "LogitsProcessorSuite":
        from .logits_suite import LogitsProcessorSuite  # noqa: PLC0415

        return LogitsProcessorSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
