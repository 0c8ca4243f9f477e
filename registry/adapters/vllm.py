"""Adapter for classes written against vLLM V1's logits processor interface."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hardpoint.errors import PluginContractError
from hardpoint.plugins.arguments import PrepareContext
from hardpoint.plugins.logits import (
    BatchLogitsProcessor,
    BatchUpdate,
    LogitsContext,
    Move,
    Phase,
)
from hardpoint.plugins.params import SamplingParams

from .base import Adapter, AdapterArguments, ExternalParams, ExternalProcessor, signature_text

if TYPE_CHECKING:
    import torch


_METHODS = ("is_argmax_invariant", "update_state", "apply")


class MoveDirectionality(Enum):
    """Stand-in for vLLM's enum where vLLM is not installed; members equal vLLM's by name."""

    UNIDIRECTIONAL = 1
    SWAP = 2

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the member of this name of an enum of this name."""
        if not isinstance(other, Enum) or type(other).__name__ != "MoveDirectionality":
            return NotImplemented
        return self.name == other.name

    def __hash__(self) -> int:
        """Hash by name."""
        return hash(self.name)


@dataclass(frozen=True)
class ExternalBatchUpdate:
    """A batch update in vLLM's shape.

    Attributes:
        removed: rows.
        added: (row, params, prompt ids, live output ids).
        moved: (source, destination, direction).
    """

    batch_size: int
    removed: tuple[int, ...]
    added: tuple[tuple[int, ExternalParams, Any, Any], ...]
    moved: tuple[tuple[int, int, Enum], ...]


@dataclass(frozen=True)
class _SchedulerConfig:
    max_num_seqs: int


@dataclass(frozen=True)
class _ModelConfig:
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


class ExternalConfig:
    """Engine configuration for external classes: the fields that a logits processor can need."""

    def __init__(self, context: LogitsContext) -> None:
        """Copy the sizes of a processor's context."""
        self.scheduler_config = _SchedulerConfig(context.max_num_seqs)
        self.model_config = _ModelConfig(context.vocab_size)
        self.speculative_config = None

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the missing attribute and those that exist."""
        raise AttributeError(
            f"the engine configuration given to classes in vLLM's form has no {name!r}; it has "
            f"scheduler_config.max_num_seqs, model_config.get_vocab_size() and speculative_config"
        )


class VLLMClass(Adapter, BatchLogitsProcessor):
    """Runs a class in vLLM V1's form on the rows of the batch."""

    contract = 1
    phase = Phase.BIAS
    adapter = "vLLM V1 class"
    context: LogitsContext

    class Arguments(AdapterArguments):
        """Arguments that the class reads."""

    def __init__(self, context: LogitsContext) -> None:
        """Construct the external object.

        Raises:
            ValueError: `is_argmax_invariant` differs between class and object.
        """
        super().__init__(context)
        self._inner = self.external.target(ExternalConfig(context), context.device, False)
        if self.argmax_invariant and not self._inner.is_argmax_invariant():
            raise ValueError(
                "is_argmax_invariant() is True before its constructor ran and False after; it "
                "must be a constant"
            )
        self._directions = _directions()

    @classmethod
    def prepare(cls, arguments: AdapterArguments, context: PrepareContext) -> AdapterArguments:
        """Call the class's `validate_params`, if it has one."""
        validate = getattr(cls.external.target, "validate_params", None)
        if validate is not None:
            validate(ExternalParams(context.params, arguments.extra_args, context.stop_token_ids))
        return arguments

    def update_state(self, update: BatchUpdate | None) -> None:
        """Translate a batch update to vLLM's shape and pass it on."""
        self._inner.update_state(None if update is None else self._translated(update))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the external object returns."""
        result: torch.Tensor = self._inner.apply(logits)
        return result

    def _translated(self, update: BatchUpdate) -> ExternalBatchUpdate:
        return ExternalBatchUpdate(
            batch_size=update.batch_size,
            removed=update.removed,
            added=tuple(
                (a.row, self._params(a.params), a.prompt_token_ids, a.output_token_ids)
                for a in update.added
            ),
            moved=tuple(
                (m.source, m.destination, self._directions[m.direction]) for m in update.moved
            ),
        )

    def _params(self, params: SamplingParams) -> ExternalParams:
        """Return a request's parameters; default ones if it does not use the plugin."""
        given = params.plugin_args.get(self.name)
        if given is None:
            return ExternalParams(SamplingParams(), {})
        return ExternalParams(params, given.extra_args)


def adapt_class(external: ExternalProcessor) -> type[Adapter]:
    """Return the component for a class that has methods of vLLM's interface.

    Raises:
        PluginContractError: the class is not of vLLM V1's form; the message has the differences.
    """
    target = external.target
    missing = [name for name in _METHODS if not callable(getattr(target, name, None))]
    if missing:
        raise PluginContractError(
            f"{external.source}: it seems to be a logits processor of another generation of vLLM's "
            f"interface: it lacks {', '.join(missing)}; classes in vLLM V1's form have "
            f"{', '.join(_METHODS)}"
        )
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{external.source}: it lacks {', '.join(unfinished)}")
    if not _takes(target, 3):
        raise PluginContractError(
            f"{external.source}: it seems to be a logits processor of another generation of vLLM's "
            f"interface: the constructor of a class in vLLM V1's form takes (vllm_config, device, "
            f"is_pin_memory), this one is {signature_text(target)}"
        )
    validate = getattr(target, "validate_params", None)
    if validate is not None and not _takes(validate, 1):
        raise PluginContractError(
            f"{external.source}: its validate_params must be a classmethod or staticmethod that "
            f"takes (params), this one is {signature_text(validate)}"
        )
    invariant = _argmax_invariant(target)
    phase = Phase.TRUNCATE if invariant else Phase.BIAS
    return VLLMClass.of(external, argmax_invariant=invariant, phase=phase)


def _takes(call: Any, count: int) -> bool:
    """Return whether a callable accepts `count` positional arguments."""
    try:
        inspect.signature(call).bind(*range(count))
    except ValueError:
        return True  # no signature; a wrong one shows when it is called
    except TypeError:
        return False
    return True


def _argmax_invariant(target: Any) -> bool:
    """Return whether a class is argmax-invariant; False, which is always safe, if that fails.

    The phase must be known before any object is constructed, but the method belongs to instances.
    It is called on an uninitialised object, since it returns a constant by contract.
    """
    try:
        return object.__new__(target).is_argmax_invariant() is True
    except Exception:
        return False


def _directions() -> dict[Move, Enum]:
    """Return vLLM's own enum members where vLLM is installed, else the stand-ins."""
    directions: Any = MoveDirectionality
    try:
        module = importlib.import_module("vllm.v1.sample.logits_processor")
        directions = module.MoveDirectionality
    except ImportError:
        pass
    return {Move.UNIDIRECTIONAL: directions.UNIDIRECTIONAL, Move.SWAP: directions.SWAP}
