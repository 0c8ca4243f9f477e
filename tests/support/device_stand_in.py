"""A stand-in for a CUDA device in CPU memory, which notes where the host would wait for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, _disabled_torch_function_impl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint import plugins

DEVICE = torch.device("cuda", 0)
_INSTALLED = Path(plugins.__file__).resolve().parents[1]
_SOURCES = [
    Path(__file__).resolve().parents[1],
    *(path for path in sorted(_INSTALLED.iterdir()) if path.is_dir() and path.name != "testing"),
]
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_HERE = Path(__file__).resolve()


class StandIn(torch.Tensor):
    """A tensor in CPU memory that claims to be on a CUDA device."""

    __torch_function__ = _disabled_torch_function_impl
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


@dataclass(frozen=True)
class Wait:
    """A place where the host waits for the device.

    Attributes:
        what: makes it wait.
        place: file and function, the innermost of the sources.
        line: line number in the file.
    """

    what: str
    place: tuple[str, str]
    line: int

    def __str__(self) -> str:
        """Return all for a message."""
        return f"{self.place[0]}:{self.line} in {self.place[1]}: {self.what}"


_WAITING = {
    "_local_scalar_dense": "a number is read",
    "nonzero": "the size of the result depends on values",
    "nonzero_numpy": "the size of the result depends on values",
    "masked_select": "the size of the result depends on values",
    "_unique": "the size of the result depends on values",
    "_unique2": "the size of the result depends on values",
    "unique_dim": "the size of the result depends on values",
    "unique_consecutive": "the size of the result depends on values",
    "unique_dim_consecutive": "the size of the result depends on values",
    "bincount": "the size of the result depends on values",
    "equal": "a bool is read",
    "allclose": "a bool is read",
    "multinomial": "the probabilities are checked",
}
"""Operations of torch that wait for a CUDA device."""


class StandInDevice(TorchFunctionMode):
    """A mode in which tensors on `cuda` are a StandIn, and waits are recorded.

    Operations run on the CPU. As on a CUDA device, those of tensors there and here together fail,
    and so does `numpy()`. Not seen: waits inside of kernels and on streams and events.

    Attributes:
        waits: since they were last cleared.
    """

    def __init__(self) -> None:
        """Start without waits."""
        super().__init__()
        self.waits: list[Wait] = []
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that it is used once
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda tensor: self._move(tensor, torch.device("cpu")),
            torch.Tensor.cuda: lambda tensor, *_, **options: self._move(tensor, DEVICE, **options),
            torch.Tensor.copy_: self._copy,
            torch.Tensor.pin_memory: lambda tensor, *_: self._pin(tensor.clone()),
            torch.Tensor.is_pinned: lambda tensor, *_: self._is_pinned(tensor),
            torch.Tensor.tolist: self._tolist,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._numpy,
            torch.Tensor.__getitem__: self._get,
            torch.Tensor.__setitem__: self._set,
            torch.Tensor.new_tensor: self._new_tensor,
            torch.tensor: functools.partial(self._made, torch.tensor),
            torch.as_tensor: functools.partial(self._made, torch.as_tensor),
            torch.asarray: functools.partial(self._made, torch.asarray),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, and note whether it waits."""
        kwargs = dict(kwargs or {})
        if special := self._special.get(func):
            return special(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        tensors = list(_tensors((args, kwargs)))
        here = _is_cuda(kwargs.get("device")) or any(isinstance(t, StandIn) for t in tensors)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if not here:
            result = func(*args, **kwargs)
            return self._pin(result) if is_pinned else result
        if any(not isinstance(t, StandIn) and t.dim() for t in tensors):
            raise RuntimeError(f"{func.__name__}: tensors on the device and on the host together")
        with _Watch(self.note):
            return _stand_in(func(*args, **kwargs))

    def note(self, call: str) -> None:
        """Note a wait of the code that called torch."""
        self.waits.append(Wait(call, *_caller()))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        flags = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, bool):
                flags.append(arg)
            elif arg is not None:
                device = arg
        kwargs |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        target = tensor.device if device is None else torch.device(device)
        return self._move(tensor, target, dtype=dtype, **kwargs)

    def _move(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        dtype = tensor.dtype if dtype is None else dtype
        there, here = device.type == "cuda", isinstance(tensor, StandIn)
        if there == here:
            moved = tensor.to(dtype, **options)
            return moved.as_subclass(StandIn) if here else moved
        self._crossing(tensor if there else None, there=there, non_blocking=non_blocking)
        moved = tensor.as_subclass(torch.Tensor).to(dtype, copy=True)
        return moved.as_subclass(StandIn) if there else moved

    def _crossing(self, host: torch.Tensor | None, *, there: bool, non_blocking: bool) -> None:
        """Note the wait of a copy between host and device; `host` is the tensor on the host."""
        where = "to the device" if there else "to the host"
        if not non_blocking:
            self.note(f"a copy {where} that blocks")
        elif host is not None and not self._is_pinned(host):
            self.note(f"a copy {where}, where the memory of the host is not pinned")

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        there, here = isinstance(target, StandIn), isinstance(source, StandIn)
        if there != here:
            host = source if there else target
            self._crossing(host, there=there, non_blocking=non_blocking)
        return target.copy_(source)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, StandIn):
            self.note("numbers are read")
        return tensor.tolist()

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, StandIn):
            raise TypeError("a tensor on cuda:0 has no numpy()")
        return tensor.numpy(*args, **kwargs)

    def _get(self, tensor: torch.Tensor, index: Any) -> Any:
        if not isinstance(tensor, StandIn):
            return tensor[index]
        self._note_index(index)
        with _Watch(self.note):
            return tensor[index].as_subclass(StandIn)

    def _set(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        there, here = isinstance(tensor, StandIn), isinstance(value, StandIn)
        if isinstance(value, torch.Tensor) and there != here and value.dim():
            self._crossing(None, there=there, non_blocking=False)
        if not there:
            tensor[index] = value
            return
        self._note_index(index)
        with _Watch(self.note):
            tensor[index] = value

    def _note_index(self, index: Any) -> None:
        """Note the waits of an index that is on the host."""
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, torch.Tensor):
                if not isinstance(part, StandIn) and part.dim():
                    self.note("an index that is on the host")
            elif hasattr(part, "__array_interface__") or isinstance(part, list | range):
                self.note("an index that is a list")

    def _new_tensor(self, tensor: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        options = {"dtype": tensor.dtype, "device": tensor.device} | options
        return self._made(torch.tensor, data, **options)

    def _made(self, make: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return a tensor of values of the host."""
        there = _is_cuda(options.get("device"))
        is_pinned = options.pop("pin_memory", False)
        if there:
            options["device"] = "cpu"
            if not isinstance(args[0], StandIn):
                self._crossing(None, there=True, non_blocking=False)
        made: torch.Tensor = make(*args, **options)
        if is_pinned:
            self._pin(made)
        return made.as_subclass(StandIn) if there else made


class _Watch(TorchDispatchMode):
    """Records the operations that wait for a device, including nested ones."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported for that

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if why := _WAITING.get(name):
            self._note(f"{name}: {why}")
        elif func is torch.ops.aten.repeat_interleave.Tensor:
            if (kwargs or {}).get("output_size") is None:
                self._note("repeat_interleave without output_size")
        elif name in ("index", "index_put", "index_put_") and any(map(_is_mask, args[1])):
            if name == "index" or args[2].numel() != 1:  # one value is filled in, without a wait
                self._note(f"{name}: an index of bools")
        elif func.has_kernel_for_dispatch_key(_COMPOSITE):
            # In inference mode it comes whole; what it consists of may wait.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _stand_in(value: Any) -> Any:
    """Return a result of torch with stand-ins for its tensors."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, StandIn) else value.as_subclass(StandIn)
    if isinstance(value, list | tuple):
        parts = [_stand_in(part) for part in value]
        return type(value)(parts) if type(value) in (list, tuple) else type(value)(tuple(parts))
    return value


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _caller() -> tuple[tuple[str, str], int]:
    """Return the innermost place of the sources that runs, and its line."""
    frame = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename).resolve()
        for folder in _SOURCES:
            if path != _HERE and path.is_relative_to(folder):
                return (str(path.relative_to(folder.parent)), frame.f_code.co_name), frame.f_lineno
        frame = frame.f_back
    raise AssertionError("called by no code of the sources")


class _Event:
    """An event of the stand-in; its work is always done."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that the work is done."""
        return True

    def synchronize(self) -> None:
        """Note the wait."""
        self._note("an event is waited for")


@contextmanager
def fake_cuda(monkeypatch: Any) -> Iterator[StandInDevice]:
    """Let torch find one CUDA device, a stand-in, in this thread."""
    stand_in = StandInDevice()
    values = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: stand_in.note("torch.cuda.synchronize()"),
        "Event": lambda: _Event(stand_in.note),
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with stand_in:
        yield stand_in
