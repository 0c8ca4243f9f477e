"""The hash of a model's weights, made of those of its files.

It is part of the keys of KV blocks: a hash that is not that of the weights gives wrong tokens.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import ConfigError, HardpointError, WeightLoader
from hardpoint.plugins.config_tables import WeightCacheConfig

from .file_hashes import cache_folder, hash_file

__all__ = ["WeightsHash", "hash_weights"]

_log = logging.getLogger("hardpoint")


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
            loader: loader of the weights.
            config: its folder keeps the hashes of files.
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
        found = self._hash.result()
        if _fingerprint(self._loader) == self._fingerprint:
            return found
        _log.warning("files of the weights changed during loading: KV blocks are not shared")
        return f"{found}, changed while loading: {secrets.token_hex(16)}"

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
        f"{user} has to distinguish blocks from those of other weights, "
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
        found = loader.content_hash(lambda path: hash_file(path, folder, stop))
    except (HardpointError, OSError):
        raise
    except BaseException as cause:
        raise PluginFaultError(
            f"loader {loader.name!r}: its content_hash() failed: {describe_fault(cause)}"
        ) from cause
    if found is None:
        raise _no_content_hash(loader, user)
    if not isinstance(found, str) or not found:
        raise PluginFaultError(
            f"loader {loader.name!r}: its content_hash() gave {shown(found)}, expected a text"
        )
    return found
