"""The memory limit of this process, a model's memory estimate, and weights moved to the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from hardpoint.errors import size_text
from hardpoint.plugins import EngineConfig, Model, ModelError, WorkerInfo
from hardpoint.plugins.cache_memory import CacheMemory
from hardpoint.plugins.model.loader import WeightFormat

from .control_groups import PROC, control_groups, read_control

try:
    import resource
except ImportError:  # another system than Unix
    resource = None  # type: ignore[assignment]

_UNLIMITED = 1 << 60  # version 1 of control groups writes a huge number for none
_FLOAT = 4  # bytes
_ARRAYS = 4
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process.

    Attributes:
        available: bytes that the process may still allocate.
        source: origin of the limit.
    """

    available: int
    source: str

    def __str__(self) -> str:
        return f"{size_text(self.available)} ({self.source})"


def memory_limit(device: torch.device, proc: Path = PROC) -> MemoryLimit:
    """Return the closest limit on further allocations of this process on a device.

    Those of the CPU are the machine's available memory, the control groups of the process (of
    containers for example) and its resource limits (`ulimit`).

    Args:
        proc: the system's folder of processes.
    """
    if device.type == "cuda":
        return MemoryLimit(int(torch.cuda.mem_get_info(device)[0]), f"free on {device}")
    machine = MemoryLimit(int(psutil.virtual_memory().available), "free on this machine")
    limits = [machine, *_resource_limits(), *_group_limits(proc)]
    return min(limits, key=lambda limit: limit.available)


def _resource_limits() -> Iterator[MemoryLimit]:
    if resource is None:
        return
    used = psutil.Process().memory_info()
    for name, option, held in (("RLIMIT_AS", "-v", used.vms), ("RLIMIT_DATA", "-d", used.data)):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            total = f"{name}, ulimit {option}, of {size_text(soft)}"
            yield MemoryLimit(max(soft - held, 0), total)


def _group_limits(proc: Path) -> Iterator[MemoryLimit]:
    for group in control_groups("memory", proc):
        yield from _limits_of(group)


def _limits_of(group: Path) -> Iterator[MemoryLimit]:
    for used_name, *names in (
        ("memory.current", "memory.max", "memory.high"),
        ("memory.usage_in_bytes", "memory.limit_in_bytes"),
    ):
        used = _number(group / used_name)
        if used is None:
            continue
        used = max(used - _reclaimable(group), 0)
        for name in names:
            limit = _number(group / name)
            if limit is not None and limit < _UNLIMITED:
                source = f"{group / name}, of {size_text(limit)}"
                yield MemoryLimit(max(limit - used, 0), source)


def _number(path: Path) -> int | None:
    text = read_control(path)
    return int(text) if text is not None and text.isdecimal() else None


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files, which count as used but are freed when needed."""
    lines = (read_control(group / "memory.stat") or "").splitlines()
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    prefix = "total_" if "total_inactive_file" in values else ""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(values.get(name, 0)) for name in names)


@dataclass(frozen=True)
class HeldWeight:
    """How a weight, or the part of it that a rank has, is held.

    Attributes:
        stored: how the files store all of it; None if the loader does not report it.
        scheme: name of its scheme; None if it is held as numbers of the model's dtype.
        shape: shape of the part.
        num_bytes: in memory, once it is loaded.
        loading_bytes: further memory while it is loaded.
        is_vocabulary: whether it has a row per token.
    """

    stored: WeightFormat | None
    scheme: str | None
    shape: tuple[int, ...]
    num_bytes: int
    loading_bytes: int
    is_vocabulary: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a model needs, in bytes, and that it may use.

    Attributes:
        weights: size of the loaded model.
        cache: the configured KV cache; else the cache of one request of the maximum length.
        loading: size of the memory for loading weights only.
        step: size of the largest step's intermediate results.
        limit: before anything was allocated.
        share: maximum share that the cache takes of the memory left by weights and step.
        request: memory of requests in the cache.
        is_configured: whether the size of the cache is.
        parts: memory reserved for step parts, by purpose, once that is known.
    """

    weights: int
    cache: int
    loading: int
    step: int
    limit: MemoryLimit
    share: float
    request: CacheMemory
    is_configured: bool = False
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """The memory that the cache may take."""
        return int((self.limit.available - self.weights - self.step) * self.share)

    @property
    def longest(self) -> int:
        """The longest request that fits; 0 if none does, or the weights do not."""
        if self.room < 0 or self.loading > self.limit.available - self.weights:
            return 0
        if not self.is_configured:
            return self.request.longest_in(self.room)
        return self.request.longest_in(self.cache) if self.cache <= self.room else 0

    def __str__(self) -> str:
        working = max(self.loading, self.step)
        parts = "".join(f", {name} {size_text(size)}" for name, size in self.parts.items() if size)
        return (
            f"weights {size_text(self.weights)}, KV cache {size_text(self.cache)}, working memory "
            f"{size_text(working)}{parts}; this process may use {self.limit}"
        )

    def with_cache(self, cache: int) -> MemoryEstimate:
        """Return the estimate for a KV cache of a known size."""
        return dataclasses.replace(self, cache=cache)

    def with_parts(self, parts: Mapping[str, int]) -> MemoryEstimate:
        """Return the estimate for step parts with known memory."""
        return dataclasses.replace(self, parts=parts)

    def check(self, model: str) -> None:
        """Raise unless the model fits.

        Raises:
            ModelError: it does not; the message names a configuration that does.
        """
        rest, room = self.limit.available - self.weights, self.room
        if self.loading <= rest and self.cache <= room:
            return
        if self.loading > rest or room <= 0:
            fits = "a smaller max_model_len or model would fit"
        elif self.is_configured:
            fits = f"a kv_cache of {size_text(room)} would fit"
        else:
            length = self.request.longest_in(room)
            fits = f"with {self.share:.0%} of the rest for the cache, "
            fits += (
                f"a max_model_len of {length} would fit" if length else "not even one block fits"
            )
        raise ModelError(f"model: {model!r} does not fit into memory: {self}; {fits}")


def estimate_memory(
    model: Model,
    config: EngineConfig,
    weights: Mapping[str, HeldWeight],
    request: CacheMemory,
    limit: MemoryLimit,
) -> MemoryEstimate:
    """Estimate the memory of a rank of a model, before any weight is read.

    Args:
        model: without weights.
        weights: weights of this rank, by name.
    """
    context, cache, scheduler = model.context, config.kv_cache, config.scheduler
    size, vocab = context.dtype.itemsize, context.config.vocab_size
    width = max(
        (w.shape[0] for w in weights.values() if w.shape and not w.is_vocabulary), default=0
    )
    tokens = min(scheduler.max_num_batched_tokens, context.max_model_len)
    specs = model.kv_specs()
    rotary = max((spec.head_size for spec in specs), default=0)
    # Layers with a window may have angles of their own (Gemma 3).
    rotary *= len({spec.window is None for spec in specs})
    # A few arrays of the widest layer, logits and their float32 copy, angles of all positions.
    step = _ARRAYS * tokens * width * size + scheduler.max_num_seqs * vocab * 2 * _FLOAT
    step += context.max_model_len * rotary * _FLOAT
    has_cache, share = request.of(1) > 0, 1.0
    is_configured = cache.num_blocks is not None or cache.memory_bytes is not None
    if cache.num_blocks is not None:
        cache_bytes = request.size(cache.num_blocks)
    elif cache.memory_bytes is not None and has_cache:
        cache_bytes = cache.memory_bytes
    else:
        length = cache.block_size if config.max_model_len == "auto" else context.max_model_len
        cache_bytes = request.of(length)
        share = cache.memory_fraction or cache_share(context.device)
    return MemoryEstimate(
        weights=sum(weight.num_bytes for weight in weights.values()),
        cache=cache_bytes,
        loading=max((weight.loading_bytes for weight in weights.values()), default=0),
        step=step,
        limit=limit,
        share=share,
        request=request,
        is_configured=is_configured and has_cache,
    )


def cache_share(device: torch.device) -> float:
    """Return the KV cache's share of the memory that is left, unless it is configured."""
    # A CPU's memory is shared with other programs.
    return 0.9 if device.type == "cuda" else WorkerInfo.cache_share


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    # Otherwise a program keeps that of weights which were packed, or whose engine was closed.
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):  # another C library
        pass


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        message in str(error) for message in _OUT_OF_MEMORY
    )


def out_of_memory(error: BaseException, figures: object) -> str:
    """Return the message about memory that could not be allocated."""
    cause = (str(error) or type(error).__name__).splitlines()[0][:200]
    return f"not enough memory ({cause}): {figures}"


class MovedWeights:
    """The bytes of tensors, in CPU memory; the tensors have none until they are moved back.

    Tensors stay the same objects, and views of them stay views, so that what a model has bound to
    them works again afterwards. Their addresses change.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors out; if the memory is not there, all stay where they are.

        Raises:
            RuntimeError, MemoryError: CPU memory is short.
        """
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        try:
            self._held = [(storage, host_copy(_bytes(storage))) for storage in storages.values()]
        except (RuntimeError, MemoryError):
            release_pinned_memory()
            raise
        for storage, _ in self._held:
            storage.resize_(0)

    def move_back(self) -> None:
        """Give the tensors memory again, with their content.

        Raises:
            RuntimeError: the device's memory is short; it can be tried again.
        """
        while self._held:
            storage, held = self._held[-1]
            storage.resize_(len(held))
            _bytes(storage).copy_(held)
            self._held.pop()
            del storage, held
        release_pinned_memory()


def release_pinned_memory() -> None:
    """Return pinned memory that is no longer used to the system, where torch can."""
    # Its cache keeps it otherwise, and has rounded each size up to a power of two.
    release = getattr(torch._C, "_host_emptyCache", None)  # without a public name
    if release is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            release()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_copy(memory: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory, which is pinned where that is possible: it is copied faster."""
    pinned = None
    if memory.device.type == "cuda":
        try:
            pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        except RuntimeError:  # the system limits how much may be
            pass
    copy = torch.empty(memory.shape, dtype=memory.dtype) if pinned is None else pinned
    return copy.copy_(memory)
