"""The group `weights` of LLM and AsyncLLM: update weights, and own their files."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from hardpoint import typed
from hardpoint.core.engine.utility_calls import ControlCalls, PauseModeName
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import shown, size_text
from hardpoint.plugins import EngineConfig, HardpointError, ModelError, RequestError
from hardpoint.plugins.config_tables import LoadConfig, absolute_path
from hardpoint.toolkit.updated_weights import tensor_files, write_tensors

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

if TYPE_CHECKING:
    import torch

_PART = "weight_updates"
_TICKET_BITS = 60
_MEMORY = Path("/dev/shm")
_PREFIX, _FILE = "hardpoint-weights-", "weights.safetensors"
_POLL_SECONDS = (0.002, 0.05)
"""The shortest and the longest time between two questions whether something is read."""

_ABANDONED_S = 60.0
"""Age of a folder that no program locks: a younger one may be about to be locked."""

Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, torch.Tensor]"
"""Path of a safetensors file or a folder of them; or tensors by their names in the checkpoint."""


class WeightUpdateGroup:
    """The weights of an LLM: `llm.weights`."""

    def __init__(self, engine: LLMEngine, files: WeightFiles) -> None:
        """`files`: the files that updates write; the caller removes them."""
        self._engine, self._files = engine, files

    @property
    def version(self) -> str:
        """The version of the weights in use."""
        return self._engine.parts.config.load.version

    def update(
        self,
        weights: Weights,
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model; return their version.

        They are read and packed while requests go on with those in use; then the engine pauses for
        a moment. All ranks have the new weights, or nothing has changed. They hold for an
        engine that is restarted, and after a sleep.

        Args:
            weights: path of a safetensors file, or of a folder of them, which stay where they are
                until the next update; or tensors by their names in the checkpoint, which are copied
                to shared memory. Weights that are not among them stay as they are.
            version: name of the version; None is the number after the current one.
            mode: treatment of requests in flight, as for `engines.pause`.
            recompute: whether those that are kept compute their keys and values again. If not, they
                go on with those of earlier weights, which `CompletionOutput.weight_runs` shows.

        Raises:
            RequestError: a field is wrong, or the engine cannot do this; names the field.
            ModelError: files or tensors are missing, broken or not the model's; names file, tensor
                and value. Or memory is short.
            HardpointError: the engine sleeps or is about to, or the update was given up.
        """
        engine, files = self._engine, self._files

        def call(method: str, arguments: Mapping[str, Any]) -> Any:
            return ControlCalls.call_part.call(engine.call_utility, _PART, method, arguments)

        with files.lock, files.kept_of(engine):
            load = files.after(engine.parts.config, weights, version)
            prepare, poll, use = _arguments(load, mode, recompute=recompute)
            try:
                call("prepare", prepare)
                for pause in pauses():
                    if call("poll", poll):
                        break
                    time.sleep(pause)
                with _starting_with(load, engine):
                    call("use", use)
                files.taken()
            except BaseException:
                with contextlib.suppress(HardpointError):
                    call("drop", {})
                raise
        return load.version


class AsyncWeightUpdateGroup:
    """The weights of an AsyncLLM: `llm.weights`."""

    def __init__(self, engine: AsyncEngine, files: WeightFiles) -> None:
        """`files`: the files that updates write; the caller removes them."""
        self._engine, self._files, self._lock = engine, files, asyncio.Lock()

    @property
    def version(self) -> str:
        """The version of the weights in use."""
        return self._engine.parts.config.load.version

    async def update(
        self,
        weights: Weights,
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model, as `LLM.weights.update` does.

        A task that is cancelled while the engine takes the weights ends once it has them.
        """
        async with self._lock:
            with self._files.kept_of(self._engine):
                return await self._update(weights, version, mode, recompute)

    async def _update(
        self, weights: Weights, version: str | None, mode: PauseModeName, recompute: bool
    ) -> str:
        engine, files = self._engine, self._files
        load = await asyncio.to_thread(files.after, engine.parts.config, weights, version)
        prepare, poll, use = _arguments(load, mode, recompute=recompute)

        async def call(method: str, arguments: Mapping[str, Any]) -> Any:
            call_utility = engine.call_utility
            return await ControlCalls.call_part.call_async(call_utility, _PART, method, arguments)

        async def use_prepared() -> None:
            with _starting_with(load, engine):
                await call("use", use)
            files.taken()

        try:
            await call("prepare", prepare)
            for pause in pauses():
                if await call("poll", poll):
                    break
                await asyncio.sleep(pause)
            await _to_its_end(use_prepared())
        except BaseException:
            with contextlib.suppress(HardpointError):
                await call("drop", {})
            raise
        return load.version


def _arguments(
    load: LoadConfig, mode: PauseModeName, *, recompute: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    ticket = {"ticket": secrets.randbits(_TICKET_BITS)}
    use = {**ticket, "mode": str(mode), "recompute": recompute}
    return {**use, "updates": list(load.updates), "version": load.version}, ticket, use


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must not be interrupted; a canceled task ends once it is done."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and task.exception() is None:
        raise cancelled
    task.result()


@contextlib.contextmanager
def _starting_with(load: LoadConfig, engine: LLMEngine | AsyncEngine) -> Iterator[None]:
    """Let engines that start from now on have new weights; after an error the earlier ones."""
    before = engine.parts.config.load
    engine.set_load(load)
    try:
        yield
    except BaseException:
        engine.set_load(before)
        raise


class WeightFiles:
    """The files of an engine's later weights; files of tensors are in shared memory, if possible.

    The files are removed with this object, if not before.

    Attributes:
        lock: held during an update by a program that waits for it.
    """

    def __init__(self, updates: Sequence[str] = ()) -> None:
        """`updates`: the files that the engine has taken at its start."""
        self.lock = threading.Lock()
        self._folders = TensorFolders(_PREFIX, "weights")
        self._names: dict[str, set[str]] = {}  # of tensors that were taken, by path
        self._next = self._names  # the same after the update that is under way
        for path in updates:
            with contextlib.suppress(ModelError):  # it is not here any more
                self._names[path] = _names(path)

    def after(self, config: EngineConfig, weights: Weights, version: str | None) -> LoadConfig:
        """Return how weights are read after an update; tensors are written to a file.

        Earlier files are left out if later ones have all of their tensors.

        Args:
            config: configuration of the engine.
            weights: the new ones.
            version: the version of the weights; None is the next number.

        Raises:
            RequestError: a field is wrong.
            ModelError: files are missing or broken, or earlier ones lack tensors that they had.
            HardpointError: there is no room for the tensors.
        """
        load = config.load
        version = _following(load.version) if version is None else version
        plain = {"use": load.use, "updates": (), "version": version}
        load = typed.convert(plain, LoadConfig, path="", error=RequestError)
        if isinstance(weights, Mapping):
            path = str(self._folders.write(_FILE, weights) / _FILE)
        else:
            path = _path(weights)
        later = _names(path)
        names_by_path = {path: set(later)}
        for earlier in reversed(config.load.updates):
            names = self._names.get(earlier) or _names(earlier)
            if needed := names - later:
                _check_has(earlier, needed)
                names_by_path[earlier] = names
                later |= names
        self._next = names_by_path
        return msgspec.structs.replace(load, updates=tuple(reversed(names_by_path)))

    def taken(self) -> None:
        """Note that the engine has the weights of the last `after`."""
        self._names = self._next

    @contextlib.contextmanager
    def kept_of(self, engine: LLMEngine | AsyncEngine) -> Iterator[None]:
        """Remove the files, once an update is over, that the engine does not have."""
        try:
            yield
        finally:
            self.keep(engine.parts.config.load.updates)

    def keep(self, updates: Collection[str]) -> None:
        """Remove the files that were written and are none of these."""
        self._folders.keep({Path(path).parent for path in updates})


def _path(weights: Any) -> str:
    """Return the absolute path of files.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(weights, str | os.PathLike) or not os.fspath(weights):
        raise RequestError(
            f"weights: expected a path, or tensors by their names, got {shown(weights)}"
        )
    return absolute_path(os.fspath(weights))


def _names(path: str) -> set[str]:
    return {name for names in tensor_files(path).values() for name in names}


def _check_has(path: str, needed: set[str]) -> None:
    """Check that files of an earlier update have tensors that no later one replaces.

    Raises:
        ModelError: they lack one.
    """
    if lost := sorted(needed - _names(path)):
        raise ModelError(
            f"{path}: expected the tensor {shown(lost[0])} of an earlier update, got a file "
            "without it; keep the files of updates, or replace all of their tensors"
        )


def _following(version: str) -> str:
    if not version.isdecimal():
        raise RequestError(
            f"version: expected one, since the current version {version!r} is no number"
        )
    return str(int(version) + 1)


def pauses() -> Iterator[float]:
    """Yield seconds to wait between two questions whether something is read."""
    pause, longest = _POLL_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest)


class TensorFolders:
    """Folders in shared memory, if it has room; they go with this object, if not before.

    Each is locked. Those of a program that was killed are not, and go with the next that is made.
    A fork of the process that wrote a folder leaves it.
    """

    def __init__(self, prefix: str, field: str) -> None:
        """Write nothing yet.

        Args:
            prefix: start of the names of folders.
            field: names the tensors in messages.
        """
        self._prefix, self._field = prefix, field
        self._locks: dict[Path, _Lock] = {}
        weakref.finalize(self, _remove_all, self._locks)

    def write(self, name: str, tensors: Any, others: Mapping[str, bytes] | None = None) -> Path:
        """Write tensors to a folder of their own; return its path.

        Args:
            name: name of the safetensors file.
            tensors: by name.
            others: contents of other files, by name.

        Raises:
            RequestError: they are no tensors by their names.
            HardpointError: there is no room for them.
        """
        self._check(tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=_place(size)))
        try:
            self._locks[folder] = _locked(folder)
            _remove_abandoned(folder.parent, self._prefix)
            write_tensors(folder / name, tensors)
            for other, data in (others or {}).items():
                (folder / other).write_bytes(data)
        except Exception as cause:
            self.remove([folder])
            raise HardpointError(
                f"{self._field}: {size_text(size)} cannot be written to {folder.parent}: {cause}"
            ) from cause
        return folder

    def _check(self, tensors: Any) -> None:
        import torch  # noqa: PLC0415 - LLM and AsyncLLM are imported without it

        expected = f"{self._field}: expected tensors by their names"
        if not isinstance(tensors, Mapping):
            raise RequestError(f"{expected}, got {shown(tensors)}")
        if not tensors:
            raise RequestError(f"{expected}, got none")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise RequestError(f"{expected}, got {shown(tensor)} for {shown(name)}")

    def keep(self, used: Collection[Path]) -> None:
        """Remove all folders but these."""
        self.remove(self._locks.keys() - set(used))

    def empty(self, folder: Path) -> None:
        """Remove the files of a folder, but no folders in it."""
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()

    def remove(self, folders: Collection[Path]) -> None:
        """Remove folders."""
        for folder in folders:
            _remove(folder, self._locks.pop(folder, None))


class _Lock(NamedTuple):
    """The lock of a folder."""

    descriptor: int
    owner: int
    """The process that wrote the folder."""


def _place(size: int) -> Path | None:
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > size:
            return _MEMORY
    return None


def _locked(folder: Path) -> _Lock:
    """Lock a folder until the descriptor is closed, or its process is gone.

    Raises:
        OSError: it is locked already.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return _Lock(descriptor, os.getpid())


def _remove_abandoned(place: Path, prefix: str) -> None:
    """Remove the folders of programs of this user that are gone, and so lock them no more."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or gone
            status = folder.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _ABANDONED_S:
                _remove(folder, _locked(folder))


def _remove(folder: Path, lock: _Lock | None) -> None:
    if lock is None or lock.owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock.descriptor)


def _remove_all(locks: dict[Path, _Lock]) -> None:
    while locks:
        _remove(*locks.popitem())
