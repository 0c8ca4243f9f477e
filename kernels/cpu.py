"""The C++ kernels of this package, for the processor that it runs on.

They are compiled once per instruction set (`PATHS`). `load` takes the best one that the processor
has and that computes a known product rightly; the environment variable HARDPOINT_KERNELS names
another one, or `off`. They run in the OpenMP runtime that torch has loaded, in as many threads as
`torch.set_num_threads` has set in the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hardpoint.kernels.twins import AffineMatrix, linear_codes

__all__ = [
    "PATHS",
    "VARIABLE",
    "Codes",
    "KernelsUnavailableError",
    "Library",
    "Recording",
    "codes_form",
    "codes_size",
    "load",
    "pack_codes",
]

_log = logging.getLogger(__name__)

PATHS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "plain")
"""Instruction sets, best first."""
VARIABLE = "HARDPOINT_KERNELS"
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""The dtypes that there are kernels for, with their names in the libraries."""

# How scales and offsets of low-bit codes are stored, in the libraries' words; 0 is not at all.
_STORED = {torch.float16: 1, torch.float32: 2, torch.int8: 3, torch.uint8: 4}
_FOLDER = Path(__file__).parent
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}
_CALL_WORDS = 18  # of a recorded call: the function that repeats it, and its arguments
# The arguments of each function, by the letters above.
_ARGUMENTS = {
    "packed_size": "ll",
    "pack": "ppll",
    "linear": "plpppllll",
    "logits": "plpppllll",
    "codes_size": "pll",
    "pack_codes": "plllppppppp",
    "check_codes": "plll",
    "linear_codes": "plpppllll",
    "logits_codes": "plpppllll",
    "linear_int8": "plpppllll",
    "logits_int8": "plpppllll",
    "linear_int16": "plpppllll",
    "logits_int16": "plpppllll",
    "gather_codes": "pplp",
    "rms_norm": "plllplpplllf",
    "rms_norm_float": "plllplpplllf",
    "rotate": "pllplll",
    "silu_and_mul": "plplll",
    "gelu_and_mul": "plplll",
    "scale_add": "plfplll",
    "experts": "plppllpplpll",
    "add_lora": "plplpllpllpplllll",
    "add_lora_float": "plplpllpllpplllll",
    "attention_block": "llll",
    "attention_plan": "pplplppllllpl",
    "attend": "plplplplpplffp",
    "gather_rows": "plplp",
    "replay": "pl",
    "choose": "plppppll",
    "keep_top_k": "plpll",
    "keep_top_p": "plpll",
    "keep_near": "plpll",
    "keep_tokens": "plpplll",
    "shared_abort": "ppl",
    "shared_reason": "pp",
    "shared_join": "pl",
    "shared_dead_member": "p",
    "shared_notes": "pp",
    "shared_leave": "p",
    "group_bytes": "lll",
    "group_create": "plll",
    "group_all_reduce": "ppll",
    "group_all_gather": "pppll",
    "group_all_to_all": "pppll",
    "group_broadcast": "pplll",
    "group_send": "pplll",
    "group_recv": "pplll",
    "broadcast_ring_bytes": "ll",
    "broadcast_ring_create": "pll",
    "broadcast_ring_write": "ppll",
    "broadcast_ring_read": "ppll",
    "suffix_tree_create": "l",
    "suffix_tree_free": "p",
    "suffix_tree_nodes": "p",
    "suffix_tree_bytes": "p",
    "suffix_tree_begin": "p",
    "suffix_tree_append": "plpl",
    "suffix_tree_remove_oldest": "p",
    "suffix_tree_draft": "pplldldpp",
}
_COUNTS = (
    *("packed_size", "codes_size", "check_codes", "attention_block", "attention_plan"),
    *("shared_reason", "shared_dead_member"),
    *(name for name in _ARGUMENTS if name.startswith(("group_", "broadcast_ring_", "suffix_"))),
)
_POINTERS = ("shared_join", "suffix_tree_create")
_RETURNS = {
    **dict.fromkeys(_COUNTS, ctypes.c_long),
    **dict.fromkeys(_POINTERS, ctypes.c_void_p),
}


class KernelsUnavailableError(RuntimeError):
    """The kernels cannot run here; the message gives the reason."""


class Recording:
    """Calls of a library's functions, to repeat them with the same arguments."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self._calls: list[tuple[int, ...]] = []
        self._thread = threading.get_ident()

    def add(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Add a call, if the thread is recording."""
        if threading.get_ident() == self._thread:
            words = (_word(argument) for argument in arguments)
            self._calls.append((function.recorded, *words))  # type: ignore[attr-defined]

    def words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the argument of `replay`, [calls, words]."""
        words = np.zeros((len(self._calls), _CALL_WORDS), np.int64)
        for row, call in zip(words, self._calls, strict=True):
            row[: len(call)] = call
        return words


def _word(argument: float | None) -> int:
    """Return an argument as the word that the library's `from_word` reads."""
    if isinstance(argument, float):
        return int(struct.unpack("<i", struct.pack("<f", argument))[0])
    return argument or 0


class Library:
    """The kernels for one instruction set.

    Attributes:
        path: the instruction set.
        recording: what `run` is recorded in, if any.
    """

    def __init__(self, path: str) -> None:
        """Load the library.

        Raises:
            KernelsUnavailableError: it is not there, or the processor cannot run it.
        """
        file = self._file = _FOLDER / f"cpu_{path}.so"
        if not file.exists():
            raise KernelsUnavailableError(_why_missing(path))
        _share_openmp()
        self.path = path
        self.recording: Recording | None = None
        self._recording_lock = threading.Lock()
        try:
            # Functions of the first keep Python's global lock, those of the second release it.
            self._short, self._long = ctypes.PyDLL(str(file)), ctypes.CDLL(str(file))
        except OSError as cause:
            raise KernelsUnavailableError(f"{file} cannot be loaded: {cause}") from cause
        for name in _ARGUMENTS:
            if not (
                hasattr(self._short, f"hp_{name}") or hasattr(self._short, f"hp_{name}_bfloat16")
            ):
                raise KernelsUnavailableError(
                    f"{file} has no {name}: it was compiled from another version of the source, so "
                    f"install hardpoint again"
                )

    @functools.cached_property
    def build(self) -> str:
        """Name of the library's build; another one may lay matrices out in another way."""
        return f"{self.path}-{hashlib.sha256(self._file.read_bytes()).hexdigest()[:16]}"

    def supports(self, path: str) -> bool:
        """Return whether this processor has an instruction set."""
        return bool(self._short.hp_supports(path.encode()))

    def function(
        self, name: str, dtype: torch.dtype | None, *, releases: bool = False
    ) -> Callable[..., Any]:
        """Return a function of the library.

        Args:
            name: without prefix and dtype.
            dtype: dtype of the rows that it works on; None if it works on none.
            releases: whether other Python threads may run meanwhile. For calls that take long:
                to get the lock back from a busy thread can take 5 ms.
        """
        library = self._long if releases else self._short
        function = getattr(library, f"hp_{name}_{DTYPES[dtype]}" if dtype else f"hp_{name}")
        function.argtypes = [_TYPES[letter] for letter in _ARGUMENTS[name]]
        function.restype = _RETURNS.get(name)
        with contextlib.suppress(AttributeError):  # most functions are recorded, not all
            recorded = getattr(library, function.__name__.replace("hp_", "hp_call_", 1))
            function.recorded = ctypes.cast(recorded, ctypes.c_void_p).value
        return function  # type: ignore[no-any-return]

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function, and record the call while its thread records."""
        function(*arguments)
        recording = self.recording  # another thread may end it
        if recording is not None:
            recording.add(function, arguments)

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the calls of this thread; one thread at a time."""
        with self._recording_lock:
            recording = self.recording = Recording()
            try:
                yield recording
            finally:
                self.recording = None


class Codes(Protocol):
    """Rows of a matrix of low-bit codes, see `hardpoint.kernels.twins.AffineMatrix`."""

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [rows, columns], of 8 bits int8."""

    @property
    def bits(self) -> int:
        """Of a code."""

    @property
    def group(self) -> int:
        """Columns that share a scale."""

    @property
    def scales(self) -> torch.Tensor:
        """[rows, groups]."""

    @property
    def offsets(self) -> torch.Tensor | None:
        """As scales."""

    @property
    def outer_scales(self) -> torch.Tensor | None:
        """float16 [rows, columns / 256]."""

    @property
    def outer_offsets(self) -> torch.Tensor | None:
        """Likewise for offsets."""

    @property
    def values(self) -> torch.Tensor | None:
        """float32 [2**bits]."""


def codes_form(part: Codes) -> tuple[int, ...]:
    """Return the arguments of a library's `codes_size` and `pack_codes` for a part of a matrix."""
    offsets = 0 if part.offsets is None else _STORED[part.offsets.dtype]
    return (len(part.codes), part.bits, part.group, _STORED[part.scales.dtype], offsets)


def codes_size(library: Library, forms: Sequence[tuple[int, ...]], depth: int) -> int:
    """Return the bytes of a packed matrix with parts of these forms."""
    words = np.array(forms, np.int64)
    size: int = library.function("codes_size", None)(words.ctypes.data, len(forms), depth)
    return size


def pack_codes(
    library: Library,
    parts: Sequence[Codes],
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return a matrix of parts, its rows one part after the other, as `linear_codes` takes it.

    Args:
        parts: parts with the same number of columns, contiguous in memory.
        allocate: returns uint8 [count], 64-byte aligned.
    """
    forms, depth = [codes_form(part) for part in parts], parts[0].codes.shape[1]
    words = np.array(forms, np.int64)
    size = codes_size(library, forms, depth)
    packed = (
        allocate(size) if allocate else torch.frombuffer(allocate_pages(size), dtype=torch.uint8)
    )
    pack = library.function("pack_codes", None, releases=True)
    for index, part in enumerate(parts):
        factors = (part.scales, part.outer_scales, part.offsets, part.outer_offsets)
        tensors = (part.codes, *factors, part.values)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        pack(words.ctypes.data, len(forms), depth, index, *pointers, packed.data_ptr())
    return packed


def allocate_pages(num_bytes: int) -> mmap.mmap:
    """Return memory of zeros, in huge pages where the system has them.

    The system allocates a page when it is first used.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, num_bytes)
    # Shared memory, which is the default, has no huge pages in most systems.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@functools.cache
def load(path: str = "") -> Library:
    """Load the kernels.

    Args:
        path: one of `PATHS`; by default what HARDPOINT_KERNELS names, else the best one that works.

    Raises:
        KernelsUnavailableError: there are none, none works, or they are switched off.
    """
    wanted = path or os.environ.get(VARIABLE, "")
    if wanted == "off":
        raise KernelsUnavailableError(f"{VARIABLE} is off")
    if wanted not in ("", *PATHS):
        raise KernelsUnavailableError(
            f"{VARIABLE} is {wanted!r}, expected one of {', '.join(PATHS)}, off"
        )
    plain = Library("plain")
    failures = []
    for name in [wanted] if wanted else PATHS:
        if not plain.supports(name):
            if wanted:
                failures.append(f"the processor has no {name}")
            continue
        try:
            library = plain if name == "plain" else Library(name)
        except KernelsUnavailableError as error:
            failures.append(f"{name}: {error}")
            continue
        if _multiplies_rightly(library):
            for failure in failures:
                _log.warning("kernels of instruction set %s are used; %s", name, failure)
            return library
        failures.append(f"{name}: a known product came out wrong")
    raise KernelsUnavailableError("; ".join(failures))


def _why_missing(path: str) -> str:
    """Return why the library of an instruction set is not there."""
    if path != "plain" and (_FOLDER / "cpu_plain.so").exists():
        return (
            f"it was not compiled: install with HARDPOINT_BUILD_KERNELS={path} (or =all), and "
            "install a wheel or with a C++ compiler (g++ or clang++) that knows it"
        )
    return (
        "they were not compiled when hardpoint was installed, for want of a C++ compiler "
        "(g++ or clang++) that takes them"
    )


def _share_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded known to libraries that are loaded next.

    Raises:
        KernelsUnavailableError: none is found.
    """
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    for file in sorted(files):
        if "libgomp" in file or "libomp" in file or "libiomp" in file:
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
            return
    raise KernelsUnavailableError("torch has loaded no OpenMP runtime that they could use")


def _multiplies_rightly(library: Library) -> bool:
    """Return whether products of whole numbers, which have one right result, are right."""
    with torch.device("cpu"):  # whatever torch's default is: the kernels read addresses
        return _multiplies_matrix_rightly(library) and _multiplies_codes_rightly(library)


def _multiplies_matrix_rightly(library: Library) -> bool:
    dtype, depth, columns = torch.bfloat16, 37, 21
    x = (torch.arange(3 * depth) % 7 - 3).to(dtype).view(3, depth)
    weight = (torch.arange(columns * depth) % 5 - 2).to(dtype).view(columns, depth)
    packed = torch.empty(library.function("packed_size", dtype)(columns, depth), dtype=dtype)
    library.function("pack", dtype)(weight.data_ptr(), packed.data_ptr(), columns, depth)
    y = torch.empty(3, columns, dtype=dtype)
    library.function("linear", dtype)(
        x.data_ptr(), depth, packed.data_ptr(), None, y.data_ptr(), columns, 3, columns, depth
    )
    return torch.equal(y, (x.float() @ weight.float().T).to(dtype))


def _multiplies_codes_rightly(library: Library) -> bool:
    dtype, depth, columns = torch.bfloat16, 37, 21
    x = (torch.arange(3 * depth) % 7 - 3).to(dtype).view(3, depth)
    scales = (torch.arange(columns * 2) % 3).to(torch.float16).view(columns, 2)
    parts = []
    for bits, type_ in ((4, torch.uint8), (8, torch.int8)):
        codes = (torch.arange(columns * depth) % 13).to(type_).view(columns, depth)
        offsets = scales + 1 if bits == 4 else None
        parts.append(AffineMatrix(codes, bits, 32, scales, offsets))
    packed = pack_codes(library, parts)
    expected = linear_codes(x, parts)
    linear = library.function("linear_codes", dtype)
    for rows in (1, 3):
        y = torch.empty(rows, 2 * columns, dtype=dtype)
        linear(
            x.data_ptr(), depth, packed.data_ptr(), None, y.data_ptr(), 2 * columns, rows,
            2 * columns, depth,
        )  # fmt: skip
        if not torch.equal(y, expected[:rows].to(dtype)):
            return False
    return True
