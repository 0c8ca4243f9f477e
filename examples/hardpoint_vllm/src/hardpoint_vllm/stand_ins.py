"""Modules that stand in for vLLM's where it is not installed: names that plugins import.

Many processors for vLLM import its base class, its configuration for annotations, or a helper. So
that they load without vLLM, a component whose import fails for want of vLLM is imported again while
these modules are there. Whatever else it imports from vLLM is an error that names it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .batch_classes import ExternalBatchUpdate, MoveDirectionality
from .connectors import MODULES as CONNECTOR_MODULES
from .io_processors import MODULES as IO_PROCESSOR_MODULES
from .objects import ExternalParams, VllmConfigFields
from .other_classes import ADAPTED, why_not_in
from .protocol import MODULES as PARSER_MODULES
from .slot_classes import DeviceField, HostField, RequestStates, StepLayout
from .stat_loggers import MODULES as STAT_LOGGER_MODULES

if TYPE_CHECKING:
    import torch

_NAME = "vllm"


class VLLMValidationError(ValueError):
    """vLLM's error for wrong parameters of a request."""


class V1Base(ABC):
    """vLLM V1's base class of logits processors."""

    @classmethod  # noqa: B027 - as vLLM's
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept every request."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Raise NotImplementedError, as vLLM's."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the new logits."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the likeliest token never changes."""

    @abstractmethod
    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""


class V2Base(ABC):
    """Base class of logits processors of vLLM's model runner V2."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:  # noqa: B027 - as vLLM's
        """Keep nothing."""

    @classmethod  # noqa: B027 - as vLLM's
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept every request."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:  # noqa: ARG002 - as vLLM's
        """Return that the processor changes the request's logits."""
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027 - as vLLM's
        """Write nothing."""

    @abstractmethod
    def apply(self, logits: Any, ctx: Any) -> Any:
        """Return the new logits."""


def process_dict_updates(
    req_entries: dict[int, Any],
    batch_update: Any,
    new_state: Callable[[Any, Any, Any], Any],
) -> bool:
    """Update states by row for vLLM's batch update; return whether one changed."""
    if not batch_update:
        return False
    before = dict(req_entries)
    for row, params, prompt, outputs in batch_update.added:
        state = new_state(params, prompt, outputs)
        req_entries.pop(row, None)
        if state is not None:
            req_entries[row] = state
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for source, destination, direction in batch_update.moved:
        moved, other = req_entries.pop(source, None), req_entries.pop(destination, None)
        if moved is not None:
            req_entries[destination] = moved
        if other is not None and direction == MoveDirectionality.SWAP:
            req_entries[source] = other
    return before.keys() != req_entries.keys() or any(
        before[row] is not state for row, state in req_entries.items()
    )


class AdapterBase(V1Base):
    """vLLM's class that runs per-request callables: `new_req_logits_processor` makes them."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: ARG002
        """Start with no request."""
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> Callable[..., Any] | None:
        """Return the callable of a request, None if it has none."""

    def _new_state(self, params: Any, prompt: Any, outputs: Any) -> Callable[[Any], Any] | None:
        call = self.new_req_logits_processor(params)
        if not call:
            return None
        if len(inspect.signature(call).parameters) == 3:
            if prompt is None:
                raise ValueError("this logits processor needs the ids of the prompt")
            return functools.partial(call, prompt, outputs)
        return functools.partial(call, outputs)

    def update_state(self, batch_update: Any) -> None:
        """Make and move the callables."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Any) -> Any:
        """Run each request's callable on its row."""
        for row, call in self.req_info.items():
            before = logits[row]
            result = call(before)
            if result is not before:
                logits[row] = result
        return logits


class StagedWriteTensor(DeviceField):
    """vLLM's tensor on the device to which the host stages writes: `apply_write` does them."""

    def __init__(
        self,
        size: int | Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        max_concurrency: int | None = None,  # noqa: ARG002 - as vLLM's
        uva_instead_of_gpu: bool = False,  # noqa: ARG002 - as vLLM's
    ) -> None:
        """Allocate zeros."""
        shape = (size,) if isinstance(size, int) else tuple(size)
        super().__init__(shape, device, dtype)
        self.dtype, self.device, self.num_rows = dtype, device, shape[0]
        self._staged: list[tuple[int, int, list[Any]]] = []

    def stage_write(self, index: int, start: int, x: Iterable[Any]) -> None:
        """Stage values for a row, from a place on."""
        self._staged.append((index, start, list(x)))

    def stage_write_elem(self, index: int, x: Any) -> None:
        """Stage the first value of a row, or the value of a tensor of one dimension."""
        self._staged.append((index, 0, [x]))

    def apply_write(self) -> None:
        """Write the staged values."""
        from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

        for index, start, values in self._staged:
            row = self.gpu[index] if self.gpu.dim() > 1 else self.gpu[index : index + 1]
            row[start : start + len(values)] = to_device(values, self.device, self.dtype)
        self.clear_staged_writes()

    def clear_staged_writes(self) -> None:
        """Drop the staged values."""
        self._staged.clear()


class UvaBackedTensor(HostField):
    """vLLM's tensor on the host with a view of the device: `copy_to_uva` brings that up to date."""

    def __init__(
        self,
        size: int | Iterable[int],
        dtype: torch.dtype,
        max_concurrency: int | None = None,  # noqa: ARG002 - as vLLM's
    ) -> None:
        """Allocate zeros, on the device of this worker."""
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = "cuda" if has_cuda else "cpu"
        super().__init__(size, torch.device(device), dtype)
        self.dtype = dtype

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        """Copy the values to the device, and return the first `n` rows."""
        self.flush()
        return self.gpu if n is None else self.gpu[:n]


def _async_tensor_h2d(
    data: Any, device: Any = "cpu", dtype: Any = None, pin_memory: bool = False
) -> Any:
    """Return data of the host on a device."""
    import torch  # noqa: PLC0415 - the contract imports no torch until it is used

    del pin_memory
    return torch.as_tensor(data, dtype=dtype).to(device, non_blocking=True)


@contextlib.contextmanager
def _gpu_sync_allowed(*_: Any, **__: Any) -> Generator[None]:
    yield


_BATCH = {
    "LogitsProcessor": V1Base,
    "BatchUpdate": ExternalBatchUpdate,
    "MoveDirectionality": MoveDirectionality,
}
_SLOTS = {
    "LogitsProcessor": V2Base,
    "LogitsContext": StepLayout,
    "LogitsProcRequestState": RequestStates,
}
_PARAMS = {"SamplingParams": ExternalParams}
_INPUTS = ("PromptType", "TextPrompt", "TokensPrompt")
_OUTPUTS = ("PoolingOutput", "PoolingRequestOutput", "RequestOutput")
PROGRAM_NAMES: Mapping[str, tuple[str, ...]] = {
    "vllm.inputs": _INPUTS,
    "vllm.inputs.data": _INPUTS,
    "vllm.outputs": _OUTPUTS,
    "vllm.pooling_params": ("PoolingParams",),
}
"""Names by module that are the names of `hardpoint.vllm`, imported when a plugin reads them."""
MODULES: Mapping[str, Mapping[str, Any]] = {
    **PARSER_MODULES,
    **IO_PROCESSOR_MODULES,
    **STAT_LOGGER_MODULES,
    **CONNECTOR_MODULES,
    **{module: dict[str, Any]() for module in PROGRAM_NAMES},
    "vllm": _PARAMS,
    "vllm.sampling_params": _PARAMS,
    "vllm.config": {"VllmConfig": VllmConfigFields},
    "vllm.exceptions": {"VLLMValidationError": VLLMValidationError},
    "vllm.logger": {"init_logger": logging.getLogger, "logger": logging.getLogger(_NAME)},
    "vllm.logits_process": {"LogitsProcessor": Callable},
    "vllm.utils": {},
    "vllm.utils.torch_utils": {"async_tensor_h2d": _async_tensor_h2d},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": _gpu_sync_allowed},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {
        **_BATCH,
        "AdapterLogitsProcessor": AdapterBase,
        "RequestLogitsProcessor": Callable,
        "process_dict_updates": process_dict_updates,
        "LOGITSPROCS_GROUP": "vllm.logits_processors",
        "STR_POOLING_REJECTS_LOGITSPROCS": "pooling models take no logits processors",
        "STR_SPEC_DEC_REJECTS_LOGITSPROCS": "this logits processor does not go with speculation",
    },
    "vllm.v1.sample.logits_processor.interface": _BATCH,
    "vllm.v1.sample.logits_processor.builtin": {"process_dict_updates": process_dict_updates},
    "vllm.v1.worker": {},
    "vllm.v1.worker.gpu": {},
    "vllm.v1.worker.gpu.buffer_utils": {
        "StagedWriteTensor": StagedWriteTensor,
        "UvaBackedTensor": UvaBackedTensor,
    },
    "vllm.v1.worker.gpu.sample": {},
    "vllm.v1.worker.gpu.sample.logits_processor": _SLOTS,
    "vllm.v1.worker.gpu.sample.logits_processor.interface": _SLOTS,
}


def is_missing(module: str) -> bool:
    """Return whether a module of vLLM's is missing because vLLM is not installed."""
    return module.partition(".")[0] == _NAME and not _installed()


@contextlib.contextmanager
def stand_ins() -> Generator[None]:
    """Provide the modules in the body.

    Raises:
        ImportError: the body imported another module or name of vLLM's.
    """
    modules = {name: _Module(name, names) for name, names in MODULES.items()}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith(f"{_NAME}."):
            raise ImportError(_lacking(f"module {error.name!r}", error.name)) from error
        raise
    finally:
        for name in modules:
            sys.modules.pop(name, None)


class _Module(ModuleType):
    """A module that stands in for one of vLLM's."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        """Take over the names."""
        super().__init__(name, f"Stands in for {name}, which is not installed.")
        self.__path__ = []
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        """Return a name of `hardpoint.vllm`.

        Raises:
            ImportError: it is another public name.
            AttributeError: it is a private name, which Python's own protocols look for.
        """
        if name in PROGRAM_NAMES.get(self.__name__, ()):
            module = importlib.import_module(f"hardpoint.{self.__name__}")
            return getattr(module, name)
        error = AttributeError if name.startswith("_") else ImportError
        raise error(_lacking(f"{name!r} of {self.__name__}", f"{self.__name__}.{name}"))


def _lacking(name: str, module: str) -> str:
    return (
        f"there is no {name}: vLLM is not installed, and it has stand-ins only for the needs of "
        f"{ADAPTED}; {why_not_in(module) or 'install vLLM, too'}"
    )


def _installed() -> bool:
    return importlib.util.find_spec(_NAME) is not None
