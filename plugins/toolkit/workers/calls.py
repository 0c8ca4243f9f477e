"""Serialized calls of workers, for executors with workers in other processes or machines.

The executor sends the result of `encode_call`, a `WorkerServer` in the worker's process runs it,
and `decode_result` returns the worker's result, or raises its exception, in the executor.
"""

from __future__ import annotations

import builtins
import functools
import traceback
import typing
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import numpy as np

from hardpoint import errors
from hardpoint.errors import CommunicationAbortedError, HardpointError
from hardpoint.plugins import Executor
from hardpoint.plugins.executor import Worker
from hardpoint.plugins.requests.plan import GrammarBitmask, SchedulerOutput
from hardpoint.toolkit.workers.joining import worker_method
from hardpoint.typed import prepared

__all__ = [
    "LateResult",
    "WorkerServer",
    "decode_result",
    "encode_call",
    "encode_failure",
    "has_failed",
]

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import LateOutput

# Token ids stay lists: both ends have lists, of which arrays are made, and lists of them, in more
# time than msgpack takes for all (8,192 ids: 19 + 96 us as a list, 45 + 75 us at best as an array).
_ARRAY = 1
"""Extension of msgpack for arrays: dtype, shape and bytes."""
_EXECUTE, _SAMPLE = "execute_model", "sample_tokens"
_MAX_PLANS = 16  # plans without their sampling call


class _Call(msgspec.Struct, array_like=True, frozen=True):
    method: str
    args: msgspec.Raw


class _Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The arguments of `sample_tokens`, without the plan, which the worker has."""

    step: int
    draft_token_ids: dict[str, list[int]]
    bitmask: GrammarBitmask | None


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    """An exception of a worker: the classes of its MRO as `module:name`, text and traceback."""

    types: list[str]
    message: str
    notes: list[str]
    traceback: str


class _Result(msgspec.Struct, array_like=True, frozen=True):
    failure: _Failure | None
    value: msgspec.Raw


def encode_call(method: str, args: Sequence[Any] = ()) -> bytes:
    """Return a call of a method of `Worker` as bytes, for all ranks alike.

    Raises:
        HardpointError: an argument is not plain data.
    """
    if method == _SAMPLE:
        plan, bitmask = (*args, None)[:2]
        drafts = {name: list(ids) for name, ids in plan.draft_token_ids.items()}
        args = (_Sampling(plan.step, drafts, bitmask),)
    return _encode((method, args), method)


class WorkerServer:
    """Runs encoded calls on a worker; the calls come one at a time."""

    def __init__(self, worker: Worker) -> None:
        """Serve a worker."""
        self._worker = worker
        self._plans: OrderedDict[int, SchedulerOutput] = OrderedDict()

    def run(self, call: bytes | memoryview) -> bytes:
        """Run a call; return its result or its exception, for `decode_result`."""
        return cast(bytes, self._run(call, begins=False))

    def begin(self, call: bytes | memoryview) -> bytes | LateResult:
        """Run a call as `run`; return a late result if its tokens may still be on the device."""
        return self._run(call, begins=True)

    def can_overlap(self, call: bytes | memoryview) -> bool:
        """Return whether a call may run before the late result of the call before is read."""
        return bool(_decode(call, _CALLS, "the call").method == _EXECUTE)

    def _run(self, call: bytes | memoryview, *, begins: bool) -> bytes | LateResult:
        method, args = "the call", cast(Sequence[Any], ())
        try:
            decoded = _decode(call, _CALLS, method)
            method = decoded.method
            args = self._arguments(method, decoded.args)
            run = getattr(self._worker, method)
            if begins and method == _SAMPLE:  # a worker of an earlier version may be wrapped
                run = getattr(self._worker, "begin_sampling", run)
            value = run(*args)
            if isinstance(value, Executor.LateOutput):
                return LateResult(value)
            return _succeeded(value, method)
        except Exception as error:
            if method == _EXECUTE and args:  # its sampling would meet ranks that are still in it
                self._plans.pop(args[0].step, None)
            return encode_failure(error)

    def _arguments(self, method: str, args: msgspec.Raw) -> Sequence[Any]:
        if method == _SAMPLE:
            (sampling,) = _decode(args, _SAMPLINGS, method)
            plan = self._plans.pop(sampling.step, None)
            if plan is None:
                # Most often because it failed, which is the error that counts.
                raise CommunicationAbortedError(
                    f"{_SAMPLE}: the model did not run step {sampling.step}"
                )
            if sampling.draft_token_ids:
                plan = msgspec.structs.replace(plan, draft_token_ids=sampling.draft_token_ids)
            return (plan, sampling.bitmask)
        arguments: Sequence[Any] = _decode(args, _arguments_of(method), method)
        if method == _EXECUTE:
            self._plans[arguments[0].step] = arguments[0]
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return arguments


class LateResult:
    """The result of a sampling call; its tokens may still be on the device."""

    def __init__(self, output: LateOutput) -> None:
        """Wrap the result of `Worker.begin_sampling`."""
        self.is_ready = output.is_ready
        self._output = output

    def read(self) -> bytes:
        """Wait for the tokens; return the result or the exception, as `WorkerServer.run`."""
        try:
            return _succeeded(self._output.result(), _SAMPLE)
        except Exception as error:
            return encode_failure(error)


def _succeeded(value: Any, method: str) -> bytes:
    return msgspec.msgpack.encode(_Result(None, msgspec.Raw(_encode(value, method))))


def encode_failure(error: BaseException) -> bytes:
    """Return an error in the format of `WorkerServer.run` for an exception of its worker."""
    formatted = "".join(traceback.format_exception(error))[-16_000:]
    failure = _Failure(
        [f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__],
        _text(error)[:16_000],
        [str(note) for note in getattr(error, "__notes__", [])],
        formatted,
    )
    return msgspec.msgpack.encode(_Result(failure, msgspec.Raw(msgspec.msgpack.encode(None))))


def has_failed(result: bytes | memoryview) -> bool:
    """Return whether a result of `WorkerServer.run` is an exception of the worker."""
    return msgspec.msgpack.decode(result, type=_Result).failure is not None


def decode_result(method: str, result: bytes | memoryview, where: str) -> Any:
    """Return the value that the worker returned.

    Args:
        method: the method that was called.
        result: from `WorkerServer.run`.
        where: names the worker in a note of its exception: `rank 1` for example.

    Raises:
        Exception: the worker's exception: an error of Hardpoint or of Python as such, another one
            as a HardpointError that names its class.
    """
    decoded = _decode(result, _RESULTS, method)
    if decoded.failure is None:
        return _decode(decoded.value, _result_of(method), method)
    failure = decoded.failure
    error = _error(failure)
    for note in failure.notes:
        error.add_note(note)
    error.add_note(f"In {where}:\n{failure.traceback.rstrip()}")
    raise error


def _text(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1:
        return str(error.args[0])  # its own text is its repr
    return str(error)


def _error(failure: _Failure) -> Exception:
    for index, name in enumerate(failure.types):
        module, _, cls = name.partition(":")
        known: Any = None
        if module == errors.__name__ and cls in errors.__all__:
            known = getattr(errors, cls)
        elif module == builtins.__name__ and index == 0:
            known = getattr(builtins, cls, None)
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                return known(failure.message)
            except TypeError:
                break  # it is made of something else than a text
    kind = (failure.types or ["an error"])[0].removeprefix("builtins:").replace(":", ".")
    return HardpointError(f"{kind}: {failure.message}")


@functools.cache
def _arguments_of(method: str) -> msgspec.msgpack.Decoder[Any]:
    hints = _hints(method)
    hints.pop("return", None)
    return _decoder(tuple[tuple(hints.values())])  # type: ignore[misc]


@functools.cache
def _result_of(method: str) -> msgspec.msgpack.Decoder[Any]:
    return _decoder(_hints(method).get("return", Any))


def _hints(method: str) -> dict[str, Any]:
    return typing.get_type_hints(worker_method(Worker, method))


def _encode(value: Any, method: str) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as cause:
        raise HardpointError(f"{method}: cannot be sent to another process: {cause}") from cause


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of object is no plain data")
        array = np.ascontiguousarray(value)
        header = (array.dtype.str, array.shape, array.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(header))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} is no plain data")


def _decode(data: Any, decoder: msgspec.msgpack.Decoder[Any], method: str) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError) as cause:
        raise HardpointError(f"{method}: the message cannot be read: {cause}") from cause


def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(prepared(type_), ext_hook=_extension)


def _extension(code: int, payload: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"expected extension {_ARRAY}, got {code}")
    dtype, shape, data = msgspec.msgpack.decode(payload, type=_Array)
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_Array = tuple[str, list[Annotated[int, msgspec.Meta(ge=0)]], bytes]
_CALLS = _decoder(_Call)
_SAMPLINGS = _decoder(tuple[_Sampling])
_RESULTS = _decoder(_Result)
