"""Start of worker halves that move KV blocks, with the hash of the weights.

The hash is part of the keys of blocks: a hash of other weights gives wrong tokens.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import ConfigError, Executor, HardpointError, WeightLoader
from hardpoint.plugins.config_tables import WeightCacheConfig

from .file_hashes import cache_folder, hash_file

__all__ = ["BlockStart", "WeightsHash", "hash_weights"]

_log = logging.getLogger("hardpoint")


class MovingParts(Protocol):
    """The engine halves of step parts."""

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move blocks, for messages; None if none does."""

    def started(self, handshakes: Sequence[Mapping[str, bytes]]) -> None:
        """Take the handshakes of the worker halves, of each rank."""

    def start_failed(self, cause: BaseException) -> None:
        """Go on without the worker halves."""


class BlockStart:
    """Starts worker halves that move blocks, with the hash of the weights.

    `weights_load` comes before the workers load weights, `start` or `restart` after it, once the KV
    cache is allocated. Without parts that move blocks, they do nothing.
    """

    def __init__(self, parts: MovingParts, describe_fault: Callable[[BaseException], str]) -> None:
        """Store the engine halves; see `EngineHalfContext` for `describe_fault`."""
        self._parts, self._describe_fault = parts, describe_fault
        self._executor: Executor | None = None
        self._loader: WeightLoader | None = None
        self._cache = WeightCacheConfig()
        self._weights: WeightsHash | None = None

    def use(self, executor: Executor, cache: WeightCacheConfig) -> None:
        """Start the halves of these workers; the folder of the cache keeps hashes of files."""
        self._executor, self._cache = executor, cache

    def weights_load(self, loader: WeightLoader | None = None) -> None:
        """Begin to hash the weights that the workers are about to load.

        Args:
            loader: loader of the weights; None is the one of the last call.

        Raises:
            ConfigError: the loader cannot identify them.
        """
        self.close()
        self._loader = loader or self._loader
        if (user := self._parts.moves_blocks) is not None:
            assert self._loader is not None, "no weights are loaded yet"
            self._weights = WeightsHash(self._loader, self._cache, user, self._describe_fault)

    def start(self) -> None:
        """Start the worker halves.

        Raises:
            ConfigError: the model, its loader or its attention backend cannot identify blocks.
            PluginFaultError: a plugin failed.
        """
        if self._weights is None:
            return
        weights = self._weights.result()
        self._weights = None
        self._parts.started(self._start_parts(weights))

    def restart(self) -> None:
        """Start the worker halves again; if that fails, let the parts go on without them."""
        try:
            self.start()
        except BaseException as cause:
            self._describe_fault(cause)  # an interrupt is raised again
            self._parts.start_failed(cause)
            self._start_parts(None)  # other ranks may have started

    def _start_parts(self, weights: str | None) -> Sequence[Mapping[str, bytes]]:
        assert self._executor is not None, "no workers run yet"
        return self._executor.collective_rpc("start_parts", (weights,))

    def close(self) -> None:
        """Stop hashing."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None


class WeightsHash:
    """The hash of a model's weights, made in a thread while workers load them."""

    def __init__(
        self,
        loader: WeightLoader,
        config: WeightCacheConfig,
        user: str,
        describe_fault: Callable[[BaseException], str],
    ) -> None:
        """Begin; before the workers do.

        Args:
            user: the setting that needs it, for messages.
            describe_fault: as in `EngineHalfContext`.

        Raises:
            ConfigError: the loader cannot identify the weights.
        """
        if type(loader).content_hash is WeightLoader.content_hash:
            raise _no_content_hash(loader, user)
        self._loader, self._config, self._user = loader, config, user
        self._describe_fault = describe_fault
        self._fingerprint = _fingerprint(loader)
        self._hash: Future[str] = Future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="WeightsHash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._hash.set_result(
                hash_weights(
                    self._loader, self._config, self._user, self._describe_fault, self._stop
                )
            )
        except BaseException as error:
            self._hash.set_exception(error)

    def result(self) -> str:
        """Return it, once it is there; after the workers have loaded the weights.

        If files have changed in the meantime, it is a hash that no other engine gets.

        Raises:
            ConfigError: the loader cannot identify the weights.
            HardpointError: the loader failed.
            OSError: a file cannot be read.
        """
        weights_hash = self._hash.result()
        if _fingerprint(self._loader) == self._fingerprint:
            return weights_hash
        _log.warning("files of the weights changed during loading: KV blocks are not shared")
        return f"{weights_hash}, changed while loading: {secrets.token_hex(16)}"

    def close(self) -> None:
        """Give up."""
        self._stop.set()
        self._thread.join()


def _fingerprint(loader: WeightLoader) -> str | None:
    try:
        return loader.fingerprint()
    except Exception:  # of a plugin; the weights' hash is made with another method
        return None


def _no_content_hash(loader: WeightLoader, user: str) -> ConfigError:
    return ConfigError(
        f"{user} has to distinguish blocks of different weights, "
        f"and the loader {loader.name!r} has no content_hash()"
    )


def hash_weights(
    loader: WeightLoader,
    config: WeightCacheConfig,
    user: str,
    describe_fault: Callable[[BaseException], str],
    stop: threading.Event | None = None,
) -> str:
    """Return a text that identifies the weights of a model, for the keys of KV blocks.

    Args:
        loader: loader of the weights.
        config: its folder keeps the hashes of files.
        user: the setting that needs it, for messages.
        describe_fault: as in `EngineHalfContext`.
        stop: ends it, if set.

    Raises:
        ConfigError: the loader cannot identify the weights.
        HardpointError: the loader failed, or it was stopped.
        OSError: a file cannot be read.
    """
    folder = cache_folder(config)
    try:
        weights_hash = loader.content_hash(lambda path: hash_file(path, folder, stop))
    except (HardpointError, OSError):
        raise
    except BaseException as cause:
        raise PluginFaultError(
            f"loader {loader.name!r}: its content_hash() failed: {describe_fault(cause)}"
        ) from cause
    if weights_hash is None:
        raise _no_content_hash(loader, user)
    if not isinstance(weights_hash, str) or not weights_hash:
        raise PluginFaultError(
            f"loader {loader.name!r}: its content_hash() gave {shown(weights_hash)}, "
            "expected a text"
        )
    return weights_hash
