"""Functions of vLLM's utilities for numbers, lists, tasks, modules, addresses and processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import ipaddress
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar

from .helpers import get_open_port

T = TypeVar("T")

KiB_bytes, MiB_bytes, GiB_bytes = 1 << 10, 1 << 20, 1 << 30
MB_bytes, GB_bytes = 10**6, 10**9

_DTYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16", "float64": "double",
           "fp8": "uint8", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8", "int8": "int8"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "STR_DTYPE_TO_TORCH_DTYPE":
        raise AttributeError(name)
    import torch  # noqa: PLC0415

    types = {text: getattr(torch, torch_name) for text, torch_name in _DTYPES.items()}
    return types | {"float": torch.float32, "half": torch.float16}


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(x: int, y: int) -> int:
    """Return the smallest multiple of y that is at least x."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """Return the largest multiple of y that is at most x."""
    return x // y * y


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 if n < 1 else 1 << (n - 1).bit_length()


def is_list_of(value: object, typ: Any, *, check: Literal["first", "all"] = "first") -> bool:
    """Return whether a value is a list of a type, by its first item or by all."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, typ) for item in (value[:1] if check == "first" else value))


def as_list(maybe_list: Iterable[T]) -> list[T]:
    """Return a list as it is, another iterable as a list."""
    return maybe_list if isinstance(maybe_list, list) else list(maybe_list)


def chunk_list(lst: list[T], chunk_size: int) -> Iterator[list[T]]:
    """Yield parts of a list."""
    for start in range(0, len(lst), chunk_size):
        yield lst[start : start + chunk_size]


def flatten_2d_lists(lists: Iterable[Iterable[T]]) -> list[T]:
    """Return the items of all lists."""
    return [item for items in lists for item in items]


def run_once(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs at its first call alone."""
    calls = iter([function])

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return wrapper


def make_async(func: Callable[..., T], executor: Any = None) -> Callable[..., Awaitable[T]]:
    """Return a function that runs in a thread, for an event loop."""

    def wrapper(*args: Any, **kwargs: Any) -> Awaitable[T]:
        call = functools.partial(func, *args, **kwargs)
        return asyncio.get_running_loop().run_in_executor(executor, call)

    return wrapper


async def merge_async_iterators(*iterators: AsyncIterator[T]) -> AsyncIterator[tuple[int, T]]:
    """Yield the items of several iterators as they come, each with its iterator's index."""
    waiting = {asyncio.ensure_future(_next(it)): (i, it) for i, it in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, iterator = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(_next(iterator))] = (index, iterator)
                yield index, item
    finally:
        for task, (_, iterator) in waiting.items():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
                await iterator.aclose()  # type: ignore[attr-defined]


async def _next(iterator: AsyncIterator[T]) -> T:
    return await anext(iterator)


async def collect_from_async_generator(iterator: AsyncIterator[T]) -> list[T]:
    """Return all items of an iterator."""
    return [item async for item in iterator]


def resolve_obj_by_qualname(qualname: str) -> Any:
    """Return the object of a module by its full name."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)


def import_from_path(module_name: str, file_path: str | os.PathLike[str]) -> ModuleType:
    """Import a file as a module.

    Raises:
        ModuleNotFoundError: it is no file with Python code.
    """
    spec = importlib.util.spec_from_file_location(module_name, file_path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"file_path: expected a file with Python code, got {file_path!r}")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def update_environment_variables(envs: Mapping[str, str]) -> None:
    """Set environment variables."""
    os.environ.update(envs)


def get_tcp_uri(ip: str, port: int) -> str:
    """Return a URI of an address, with brackets around one of IPv6."""
    return f"tcp://[{ip}]:{port}" if is_valid_ipv6_address(ip) else f"tcp://{ip}:{port}"


get_distributed_init_method = get_tcp_uri


def is_valid_ipv6_address(address: str) -> bool:
    """Return whether a text is an address of IPv6."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def get_loopback_ip() -> str:
    """Return the address of this machine for itself."""
    return "127.0.0.1"


def get_open_ports_list(count: int = 5) -> list[int]:
    """Return TCP ports that are free now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(get_open_port())
    return list(ports)


def cuda_device_count_stateless() -> int:
    """Return the number of GPUs."""
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()


def is_pin_memory_available() -> bool:
    """Return whether copies to a GPU can be from pinned memory."""
    return cuda_device_count_stateless() > 0


def get_cpu_memory() -> int:
    """Return the bytes of this machine's memory."""
    import psutil  # noqa: PLC0415

    return int(psutil.virtual_memory().total)


def kill_process_tree(pid: int) -> None:
    """Kill a process and all that it started."""
    import psutil  # noqa: PLC0415

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for child in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
