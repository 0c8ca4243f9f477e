"""Samplers: choose one token per row from the processed logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from hardpoint.errors import shown
from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import Returned, UnusableError, returns
from hardpoint.plugins.component.type_variables import ArgumentsT_co
from hardpoint.plugins.model.logits_ops import LogitsOps
from hardpoint.plugins.text.arguments import ComponentWithArguments, argument_column

from .states import RequestStates

if TYPE_CHECKING:
    import torch

__all__ = ["Sampler", "SamplerContext"]


@dataclass(frozen=True, kw_only=True)
class SamplerContext(Context["Sampler"]):
    """Context of a sampler, in each worker.

    Attributes:
        device: device of the logits.
        vocab_size: width of a row.
        ops: operations on logits, quick ones on this device.
    """

    device: torch.device
    vocab_size: int
    ops: LogitsOps = field(default_factory=LogitsOps)


@dataclass(frozen=True)
class SamplingRows(Generic[ArgumentsT_co]):
    """The rows of one step, as tensors on the device.

    `SamplingRows[Arguments]` in an annotation states the type of a sampler's arguments.

    Attributes:
        greedy: bool [rows]; whether to choose the likeliest token, of equals the lowest id.
        all_greedy: whether all rows are greedy; known without a sync.
        any_greedy: whether any row is greedy; known without a sync.
        seeds: int64 [rows]; the request's seed, mixed with its completion index.
        positions: int64 [rows]; output position of the token to choose, 0 for the first.
        columns: the tensors that `tensor` has made, by name; kept while the rows stay the same.
    """

    greedy: torch.Tensor
    all_greedy: bool
    any_greedy: bool
    seeds: torch.Tensor
    positions: torch.Tensor
    _arguments: Sequence[ArgumentsT_co] = ()
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    _states: Sequence[Any] = ()

    def states(self) -> Sequence[Any]:
        """Return each row's state, of a sampler with `start`; read it only."""
        return self._states

    def arguments(self) -> Sequence[ArgumentsT_co]:
        """Return each row's arguments; the defaults for a request that gives none."""
        return self._arguments

    @property
    def given(self) -> Sequence[ArgumentsT_co]:
        """Former name of `arguments()`."""
        return self._arguments

    @property
    def request_states(self) -> Sequence[Any]:
        """Former name of `states()`."""
        return self._states

    def tensor(self, name: str) -> torch.Tensor:
        """Return the argument `name` of every row as [rows, 1] on the device.

        Whole numbers give int64, others float32. It is rebuilt only when the rows change.
        """
        if name not in self.columns:
            self.columns[name] = argument_column(self._arguments, name, self.seeds.device)
        return self.columns[name]


def _tokens(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> torch.Tensor:  # noqa: ARG001
    import torch  # noqa: PLC0415 - the contract itself loads without it

    logits = args[0]
    if not (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.int64
        and value.shape == logits.shape[:1]
        and value.device == logits.device
    ):
        raise UnusableError(
            f"expected token ids int64 [{len(logits)}] on {logits.device}, got {shown(value)}"
        )
    return value


TOKENS = Returned("int64 token ids, one for each row of logits, on their device", _tokens)


class Sampler(RequestStates, ComponentWithArguments):
    """Chooses the next token of every row.

    A request gives it arguments under `plugin_args[name]`; `rows.arguments()` has them. A sampler
    with state of requests has `start`, and `advance` or `observe`; `rows.states()` has the states,
    and `start` finds the arguments as `request.sampler_arguments`.

    Attributes:
        draws: whether rows that are not greedy get the result of `LogitsOps.draw`, so that traces
            can show the noise.
    """

    context: SamplerContext
    draws: ClassVar[bool] = False

    @returns(TOKENS)
    @abstractmethod
    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return the chosen token ids.

        The token of a row must depend only on the row's logits, seed, position, arguments and
        state, so that a request gets the same tokens alone and in any batch. A token at -inf must
        not be chosen. Where a plugin has damaged a row, NaN and +inf win, as in `argmax`, and a row
        of nothing but -inf gets any token: the engine finds the plugin by the chosen logit.

        Args:
            logits: float32 [rows, vocab], after every processor; must not be changed.
            rows: sampling settings of each row.

        Returns:
            int64 [rows].
        """
