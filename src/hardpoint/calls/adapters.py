"""The group `adapters` of LLM and AsyncLLM: load, unload, pin, list, resolve."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from hardpoint import typed
from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import shown
from hardpoint.plugins import LoRARequest, RequestError
from hardpoint.plugins.config_tables import absolute_path
from hardpoint.typed import is_list

from .adapter_resolvers import AdapterResolvers
from .weights import TensorFolders, pauses

if TYPE_CHECKING:
    import torch

    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["AdapterGroup", "AsyncAdapterGroup", "with_adapters", "with_adapters_async"]

RemoveMode = Literal["drain", "end"]

LoRAs = list[LoRARequest]
"""Loaded adapters; in the groups, `list` is a method."""

_PART = "adapters"
_TICKET_BITS = 60
_OPTION = "lora_request"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "hardpoint-adapter-"
_TYPE = {"peft_type": "LORA"}

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"


class AdapterGroup:
    """The adapters (LoRA) of an LLM: `llm.adapters`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._folders = TensorFolders(_PREFIX, "tensors")

    def add(
        self,
        lora: LoRARequest,
        tensors: Tensors | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> LoRARequest:
        """Load an adapter, while requests go on; return it with the hash of its content.

        One of the same name is replaced for the requests that follow. Those that were admitted
        before keep the content that they began with.

        Args:
            lora: name, number and folder, which this program's directory and user complete if it is
                relative or begins with "~"; the number identifies it in `remove`. With a
                `content_hash`, its files have to have that one.
            tensors: the adapter itself, without a folder, as PEFT's `get_peft_model_state_dict`
                returns it; copied to shared memory, where it stays as long as it is needed.
            config: with `tensors`, the content of `adapter_config.json`.

        Raises:
            RequestError: the number is another adapter's, or `adapters.max_loras` is 0; or there
                are tensors and a folder, or one of tensors and `config` is missing or wrong.
            ModelError: its files are missing or broken, or are not for this model; names file,
                field and value. Nothing has changed then.
        """
        _check_on(self._engine, "lora")
        arguments = _load_arguments(self._folders, lora, tensors, config)
        with _until_loaded(self._folders, arguments):
            ticket = self._call("load", arguments)
            for pause in pauses():
                if (added := self._call("poll", {"ticket": ticket})) is not None:
                    break
                time.sleep(pause)
        return msgspec.convert(added, LoRARequest)

    def remove(self, lora_id: int, mode: RemoveMode = "drain") -> bool:
        """Unload an adapter; return whether there was one.

        Args:
            lora_id: its number.
            mode: what happens to requests that were admitted with it: "drain" lets them go on to
                their end, and "end" ends them with an error.

        Raises:
            RequestError: an unknown mode.
        """
        return _has_adapters(self._engine) and bool(
            self._call("remove", _number(lora_id) | {"mode": mode})
        )

    def list(self) -> LoRAs:
        """Return the loaded adapters, with the hashes of their contents."""
        return msgspec.convert(self._call("list"), LoRAs) if _has_adapters(self._engine) else []

    def pin(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory until it is removed; return whether there is one.

        Raises:
            RequestError: `adapters.max_cpu_loras` are pinned already.
        """
        return _has_adapters(self._engine) and bool(self._call("pin", _number(lora_id)))

    def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return the adapter that a resolver finds for a name; None if no resolver knows it.

        Raises:
            RequestError: a resolver rejects the name.
            PluginFaultError: one failed, or took longer than `adapters.resolve_seconds`.
            EngineClosedError: the engine is closed.
        """
        return self._engine.parts.companion(AdapterResolvers).wait_for(name)

    def _call(self, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
        call = self._engine.call_utility
        return EngineUtilities.call_part.call(call, _PART, method, arguments)


def with_adapters(adapters: AdapterGroup, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options of requests with the content hashes of their adapters.

    Adapters that are not loaded are loaded.

    Raises:
        RequestError, ModelError: one is unknown, or cannot be loaded.
    """
    loras, listed = _adapters_in(options)
    if not listed:
        return options
    _check_on(adapters._engine, _OPTION)
    found = adapters._call("resolve", {"loras": listed})
    if None in found:
        loaded = {lora.name: lora for lora in adapters.list()}
        for index in range(len(found)):
            if found[index] is None:
                lora, is_added = _addable(listed[index], loaded)
                found[index] = adapters.add(lora) if is_added else lora
    return _resolved(options, loras, listed, found)


class AsyncAdapterGroup:
    """The adapters (LoRA) of an AsyncLLM: `llm.adapters`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._folders = TensorFolders(_PREFIX, "tensors")

    async def add(
        self,
        lora: LoRARequest,
        tensors: Tensors | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> LoRARequest:
        """Load an adapter, as `LLM.adapters.add` does."""
        _check_on(self._engine, "lora")
        content = lora, tensors, config
        arguments = await asyncio.to_thread(_load_arguments, self._folders, *content)
        with _until_loaded(self._folders, arguments):
            ticket = await self._call("load", arguments)
            for pause in pauses():
                if (added := await self._call("poll", {"ticket": ticket})) is not None:
                    break
                await asyncio.sleep(pause)
        return msgspec.convert(added, LoRARequest)

    async def remove(self, lora_id: int, mode: RemoveMode = "drain") -> bool:
        """Unload an adapter, as `LLM.adapters.remove` does."""
        return _has_adapters(self._engine) and bool(
            await self._call("remove", _number(lora_id) | {"mode": mode})
        )

    async def list(self) -> LoRAs:
        """Return the loaded adapters, as `LLM.adapters.list` does."""
        if not _has_adapters(self._engine):
            return []
        return msgspec.convert(await self._call("list"), LoRAs)

    async def pin(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory, as `LLM.adapters.pin` does."""
        return _has_adapters(self._engine) and bool(await self._call("pin", _number(lora_id)))

    async def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return the adapter that a resolver finds for a name, as `LLM.adapters.resolve` does."""
        return await self._engine.parts.companion(AdapterResolvers).resolve(name)

    async def _call(self, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
        call = self._engine.call_utility
        return await EngineUtilities.call_part.call_async(call, _PART, method, arguments)


async def with_adapters_async(
    adapters: AsyncAdapterGroup, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return options with the contents of their adapters, as `with_adapters` does."""
    loras, listed = _adapters_in(options)
    if not listed:
        return options
    _check_on(adapters._engine, _OPTION)
    found = await adapters._call("resolve", {"loras": listed})
    if None in found:
        loaded = {lora.name: lora for lora in await adapters.list()}
        for index in range(len(found)):
            if found[index] is None:
                lora, is_added = _addable(listed[index], loaded)
                found[index] = await adapters.add(lora) if is_added else lora
    return _resolved(options, loras, listed, found)


def _has_adapters(engine: LLMEngine | AsyncEngine) -> bool:
    return engine.parts.config.adapters.max_loras > 0


def _check_on(engine: LLMEngine | AsyncEngine, field: str) -> None:
    if not _has_adapters(engine):
        raise RequestError(
            f"{field}: expected none, as adapters.max_loras is 0; set it to the number of adapters "
            f"that run at once"
        )


def _load_arguments(folders: TensorFolders, lora: Any, tensors: Any, config: Any) -> dict[str, Any]:
    """Return the arguments of `load`; tensors are written to a folder.

    Raises:
        RequestError: arguments are wrong.
        HardpointError: there is no room for the tensors.
    """
    plain = _plain(lora, "lora")
    if tensors is None:
        if config is not None:
            raise RequestError("config: expected none without tensors, as the folder has its own")
        return {"lora": plain, "ticket": _ticket()}
    if plain["path"]:
        raise RequestError(
            f"lora.path: expected an empty one, as tensors are given, got {plain['path']!r}"
        )
    folder = folders.write(_TENSORS, tensors, {_CONFIG: _encoded(config)})
    return {"lora": plain | {"path": str(folder)}, "ticket": _ticket(), "is_temporary": True}


def _ticket() -> int:
    return secrets.randbits(_TICKET_BITS) | 1 << _TICKET_BITS


@contextlib.contextmanager
def _until_loaded(folders: TensorFolders, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Remove the files of tensors of `load` after the body; engines have links to them."""
    if not arguments.get("is_temporary"):
        yield
        return
    folder = Path(arguments["lora"]["path"])
    try:
        yield
    except BaseException:
        folders.remove([folder])
        raise
    folders.empty(folder)


def _encoded(config: Any) -> bytes:
    """Return the configuration of an adapter as JSON, equal ones as equal bytes.

    Raises:
        RequestError: it is of another type, or has values that JSON cannot hold.
    """
    expected = "config: expected the fields of adapter_config.json by their names"
    if not isinstance(config, Mapping):
        raise RequestError(f"{expected}, as tensors are given, got {shown(config)}")
    try:
        return msgspec.json.encode({**_TYPE, **config}, order="deterministic")
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RequestError(f"{expected}: {error}") from None


def _plain(lora: Any, field: str) -> dict[str, Any]:
    """Return an adapter as plain data, with an absolute path.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(lora, LoRARequest):
        raise RequestError(f"{field}: expected a LoRARequest, got {shown(lora)}")
    return msgspec.structs.asdict(
        _placed(typed.convert(lora, LoRARequest, path=field, error=RequestError))
    )


def _placed(lora: LoRARequest) -> LoRARequest:
    if not lora.path:
        return lora
    return msgspec.structs.replace(lora, path=absolute_path(lora.path))


def _unscaled(plain: dict[str, Any]) -> dict[str, Any]:
    return plain | {"scale": 1.0}


def _number(lora_id: Any) -> dict[str, Any]:
    return {"lora_id": typed.convert(lora_id, int, path="lora_id", error=RequestError)}


def _adapters_in(options: Mapping[str, Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    value = options.get(_OPTION)
    loras: list[Any] = list(value or ()) if is_list(value) else [value]
    listed: list[dict[str, Any]] = []
    for lora in loras:
        if lora is not None and (plain := _unscaled(_plain(lora, _OPTION))) not in listed:
            listed.append(plain)
    return loras, listed


def _addable(
    requested: Mapping[str, Any], loaded: Mapping[str, LoRARequest]
) -> tuple[LoRARequest, bool]:
    """Return an adapter to load, and whether `add` loads it.

    An earlier content of a name is not added again: an engine that lacks it reads it for the
    request.

    Args:
        requested: the adapter as the request has it.
        loaded: the adapters of the engines, by name.

    Raises:
        RequestError: no engine has it, and it has no path.
    """
    lora = msgspec.convert(requested, LoRARequest)
    named = loaded.get(lora.name)
    if named is None and not lora.path:
        known = ", ".join(map(repr, loaded)) or "a loaded adapter (there is none)"
        raise RequestError(
            f"lora_request: expected one of {known}, or the path of an adapter to load, got "
            f"{lora.name!r}"
        )
    if named is None:
        return lora, True
    if lora.content_hash not in ("", named.content_hash):
        return lora, False
    return msgspec.structs.replace(named, content_hash=lora.content_hash), True


def _resolved(
    options: Mapping[str, Any],
    requested: list[Any],
    listed: list[dict[str, Any]],
    found: Sequence[Any],
) -> Mapping[str, Any]:
    """Return options with adapters as engines loaded them: any engine can load these again."""
    adapters = msgspec.convert(found, LoRAs)

    def resolved(lora: LoRARequest | None) -> LoRARequest | None:
        if lora is None:
            return None
        plain = _unscaled(msgspec.structs.asdict(_placed(lora)))
        return msgspec.structs.replace(adapters[listed.index(plain)], scale=lora.scale)

    loras = list(map(resolved, requested))
    return {**options, _OPTION: loras if is_list(options[_OPTION]) else loras[0]}
