"""Permission of HTTP clients to send modules, which are compiled outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from hardpoint.plugins import HookContext, RequestError, hookimpl
from hardpoint.plugins.server import Call, Client, ServerContext, Transform

from .compilation import CompileOptions, open_compiler, read_module

if TYPE_CHECKING:
    from hardpoint.plugins.server.extension import ServerExtension

__all__ = ["WasmSenders"]

_PATH = "plugin_args.wasm.module"


class WasmSenders:
    """Compile the modules of keys that may send some; reject modules of other keys with 403."""

    contract = 1

    class Options(CompileOptions):
        """The senders, and the limits, which must be equal to those of the logits processor.

        Attributes:
            senders: names of keys, or tags of keys as "name=value".
        """

        senders: list[str] = []

    def __init__(self, context: HookContext) -> None:
        """Keep the options."""
        self.options: WasmSenders.Options = context.options

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[ServerExtension]:  # noqa: ARG002
        """Return the transform."""
        return [Transform(request=self._admit)]

    async def _admit(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        text = _module_of(body)
        if text is not None:
            if not may_send(call.client, self.options.senders):
                raise HTTPException(
                    403, f"{_PATH}: needs a key that plugin.wasm_senders.senders lists"
                )
            try:
                module = read_module(text, self.options)
            except ValueError as error:
                raise RequestError(f"{_PATH}: {error}") from None
            compiler = open_compiler(self.options)
            await asyncio.to_thread(compiler.admit, module, call.client.name)
        return body


def may_send(client: Client, senders: Sequence[str]) -> bool:
    """Return whether the name of a key, or one of its tags, is listed."""
    own = {client.name, *(f"{name}={value}" for name, value in client.tags.items())}
    return not own.isdisjoint(senders)


def _module_of(body: dict[str, Any]) -> str | None:
    arguments: Any = body
    for name in ("plugin_args", "wasm", "module"):
        arguments = arguments.get(name) if isinstance(arguments, dict) else None
    return arguments if isinstance(arguments, str) and arguments else None
