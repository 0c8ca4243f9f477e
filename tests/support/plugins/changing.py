"""Plugins for hot reconfiguration: forced tokens show the options of their construction."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Edits,
    Executor,
    LogitsContext,
    Op,
    Phase,
    SchedulingPolicy,
    SparseLogitsProcessor,
    Wrapper,
)
from support.samples import Sample

FIRST, NUM = 10, 40


def token_of(delta: int, step: int, position: int, factor: int = 1) -> int:
    """Return the token that is forced at a position of the output."""
    return FIRST + (delta + factor * step * position) % NUM


class Pick(Sample, SparseLogitsProcessor, contract=1):
    """Forces tokens that follow from an option, an argument and the position."""

    phase = Phase.FORCE
    factor: ClassVar[int] = 1

    class Arguments(plugins.Arguments):
        step: Annotated[int, Meta(ge=0)]

    class Options(plugins.Options):
        delta: int = 0

    def start(self, request: Any) -> int:
        """Return the number of tokens."""
        return len(request.output_token_ids)

    def advance(self, state: int, token: int) -> int:
        """Count the token, which has to be the forced one."""
        return state + 1 if token >= 0 else state

    def edits(self, rows: Any) -> Edits:
        """Force the token of each row."""
        pairs = zip(rows.arguments(), rows.states(), strict=True)
        delta, factor = self.options.delta, self.factor
        tokens = [token_of(delta, request.step, position, factor) for request, position in pairs]
        return Edits(list(range(len(tokens))), tokens, op=Op.KEEP_ONLY)

    def dump_state(self) -> dict[str, Any]:
        """Return the option."""
        return {"delta": self.options.delta}


class Twice(Pick):
    """The same with another formula."""

    factor = 2


class Rows(BatchLogitsProcessor):
    """The same at the level of the batch, which follows its rows."""

    contract = 1
    phase = Phase.FORCE

    class Arguments(plugins.Arguments):
        step: Annotated[int, Meta(ge=0)]

    class Options(plugins.Options):
        delta: int = 0

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._rows: dict[int, Any] = {}

    @classmethod
    def uses(cls, params: Any) -> bool:
        """Return that requests without arguments do not use it."""
        del params
        return False

    def update_state(self, update: Any) -> None:
        """Follow the rows."""
        if update is None:
            return
        for row in update.removed:
            self._rows.pop(row, None)
        for added in update.added:
            arguments = added.params.plugin_args.get(self.name)
            self._rows[added.row] = arguments and (arguments.step, added.output_token_ids)
        for moved in update.moved:
            here, there = self._rows.pop(moved.source, None), self._rows.get(moved.destination)
            self._rows[moved.destination] = here
            if moved.direction.name == "SWAP":
                self._rows[moved.source] = there

    def apply(self, logits: Any) -> Any:
        """Force the token of each row."""
        for row, state in self._rows.items():
            if state:
                token = token_of(self.options.delta, state[0], len(state[1]))
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return logits


class Breaks(Pick):
    """Cannot be built."""

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        raise RuntimeError("it breaks")


class Slow(Pick):
    """Takes the seconds to build that an environment variable has."""

    variable = "SECONDS_TO_BUILD"

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        time.sleep(float(os.environ.get(self.variable, "0")))


class Keeper(Sample, SchedulingPolicy, contract=1):
    """Has a state that it hands over."""

    state_format = "keeper/1"

    def key(self, request: Any) -> Any:
        """Order by arrival."""
        return request.arrival_time

    def export_state(self) -> Any:
        """Return nothing."""
        return {}

    def import_state(self, state: Any) -> None:
        """Take nothing."""


class Refusing(Keeper):
    """Cannot take the state over, which a commit shows."""

    state_format = "keeper/1"

    def import_state(self, state: Any) -> None:
        """Fail."""
        raise RuntimeError("it takes no state")


class FailingCalls(Wrapper[Executor], Executor):
    """An executor with workers that fail at one action of a reconfiguration."""

    contract = 1

    class Options(Wrapper.Options):
        wraps: str = "uniproc"
        action: str = "commit"

    def collective_rpc(self, method: str, args: Any = (), timeout: Any = None) -> list[Any]:
        """Fail, once the workers have done it."""
        answers = super().collective_rpc(method, args, timeout)
        if method == "live_change" and args[0] == self.options.action:
            raise RuntimeError(f"the workers fail to {args[0]}")
        return answers
