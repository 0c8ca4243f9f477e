"""A logits processor that calls the WebAssembly module of each request."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import (
    Finish,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    PrepareContext,
    Rows,
)

from .compilation import CompileOptions, Compiler, open_compiler, read_module
from .instances import Limits, ModuleError, RunnableModule, token_bytes

__all__ = ["Wasm"]


@dataclass
class RequestState:
    """State of a request.

    Attributes:
        tokens: int32 ids of the prompt and the output.
        data: state of the module.
        failures: tokens before a failed call of `process`, with the failure.
    """

    module: RunnableModule = field(compare=False)
    num_prompt: int
    tokens: bytes
    data: bytes
    failures: dict[bytes, ModuleError] = field(default_factory=dict, compare=False)


class Wasm(LogitsProcessor):
    """Apply the WebAssembly module of each request, named by the operator or sent with it.

    A failure of a module ends its own request, with the token that follows the failed call.
    """

    contract = 1
    phase = Phase.BIAS

    class Options(CompileOptions):
        """Limits, and modules of the operator.

        Attributes:
            modules: files of modules that any request may name, by name.
            accept: which modules of requests are accepted: none; those that the hook
                `wasm_senders` has admitted; or "any", for programs that send their own requests.
            fuel: instructions of each call of `process`.
            advance_fuel: instructions of `advance` per token.
            memory_bytes: memory of an instance.
        """

        modules: dict[str, str] = {}
        accept: Literal["none", "admitted", "any"] = "none"
        fuel: Annotated[int, Meta(ge=1)] = 10_000_000
        advance_fuel: Annotated[int, Meta(ge=1)] = 1000
        memory_bytes: Annotated[int, Meta(ge=65536, le=1 << 30)] = 16 << 20

    class Arguments(plugins.Arguments):
        """The module of a request.

        Attributes:
            name: a module of the operator.
            module: a module in base64.
        """

        name: str = ""
        module: str = ""

    class Prepared(Arguments):
        """The module with its code.

        Attributes:
            compiled: compiled module.
        """

        compiled: bytes = b""

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check and compile the module."""
        options: Wasm.Options = context.options
        if bool(arguments.name) == bool(arguments.module):
            raise ValueError("expected either name or module")
        if None in context.prompt_token_ids:
            raise ValueError("expected a prompt of token ids, got embeddings")
        path = "module" if arguments.module else "name"
        try:
            compiler = open_compiler(options)
            if arguments.module:
                module = _sent_module(arguments.module, options, compiler)
            else:
                module = _operator_module(arguments.name, options)
            compiled = compiler.compile(module)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.Prepared(**msgspec.structs.asdict(arguments), compiled=compiled)

    def __init__(self, context: LogitsContext) -> None:
        """Read the limits."""
        super().__init__(context)
        options: Wasm.Options = context.options
        self._limits = Limits(options.fuel, options.advance_fuel, options.memory_bytes)

    def start(self, request: LogitsRequest) -> RequestState | Finish:
        """Load the module, and advance its state over the tokens."""
        arguments: Wasm.Prepared = request.arguments[self.name]
        tokens = token_bytes([*request.prompt_token_ids, *request.output_token_ids])
        try:
            module = RunnableModule(arguments.compiled, self._limits)
            data = module.advance(module.initial_state(), tokens)
        except ModuleError as error:
            return _finish(error)
        return RequestState(module, len(request.prompt_token_ids), tokens, data)

    def advance(self, state: RequestState, token: int) -> RequestState | Finish:
        """Advance the state of the module; end the request after a failure."""
        if (failure := state.failures.get(state.tokens)) is not None:
            return _finish(failure)
        added = token_bytes([token])
        try:
            data = state.module.advance(state.data, added)
        except ModuleError as error:
            return _finish(error)
        state.tokens, state.data = state.tokens + added, data
        return state

    def fork(self, state: RequestState) -> RequestState:
        """Return a copy that shares the module and the failures."""
        return copy.copy(state)

    def apply(self, logits: torch.Tensor, rows: Rows[Prepared, RequestState]) -> torch.Tensor:
        """Return the logits of the modules; rows of failed modules stay unchanged."""
        values = logits.cpu().numpy().copy()
        for row, state in zip(values, rows.states(), strict=True):
            try:
                row[:] = state.module.process(row, state.tokens, state.num_prompt, state.data)
            except ModuleError as error:
                state.failures[state.tokens] = error
        return torch.from_numpy(values).to(logits.device)


def _sent_module(text: str, options: Wasm.Options, compiler: Compiler) -> bytes:
    if options.accept == "none":
        raise ValueError('expected none, because plugin.wasm.accept is "none"')
    module = read_module(text, options)
    if options.accept == "admitted" and not compiler.is_admitted(module):
        raise ValueError(
            "expected a module that the hook wasm_senders has admitted; enable it, with the limits "
            "of plugin.wasm, or set plugin.wasm.accept"
        )
    return module


def _operator_module(name: str, options: Wasm.Options) -> bytes:
    if name not in options.modules:
        known = ", ".join(sorted(options.modules)) or "none"
        raise ValueError(f"expected a name in plugin.wasm.modules ({known}), got {name!r}")
    path = Path(os.path.expanduser(options.modules[name]))
    try:
        with path.open("rb") as file:
            module = file.read(options.max_module_bytes + 1)
    except OSError as error:
        raise ValueError(f"plugin.wasm.modules.{name}: {error.strerror}") from None
    if len(module) > options.max_module_bytes:
        raise ValueError(f"expected at most {options.max_module_bytes} bytes (max_module_bytes)")
    return module


def _finish(error: ModuleError) -> Finish:
    return Finish(error.reason, stop_reason=str(error))
