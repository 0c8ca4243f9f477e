"""The logits processors that a request uses, and their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.plugins import (
    EngineCoreRequest,
    PrepareContext,
    ReasoningParser,
    RequestError,
    SamplingParams,
    Tokenizer,
    typed,
)
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.manifest import PluginEntry
from hardpoint.plugins.read_only import ReadOnlyList, read_only
from hardpoint.registry.blame import describe, raise_unless_fault, text_of
from hardpoint.registry.plugin_set import PluginSet

from .plugin_health import PluginHealth

_DEFAULTS = SamplingParams()
_UNPREPARED = LogitsPlugin.prepare.__func__  # type: ignore[attr-defined]

_SHAPING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "thinking_token_budget",
    "logits_processors",
)
"""Fields of SamplingParams that only a logits processor can honour."""


@dataclass(frozen=True)
class _Processor:
    """An enabled logits processor.

    Attributes:
        fields: of SamplingParams that are its own.
        uses: the answer of `LogitsPlugin.uses`, which is the same for all requests; None for a
            class that overrides it.
    """

    entry: PluginEntry
    cls: type[LogitsPlugin]
    options: Any
    fields: frozenset[str]
    uses: bool | None


class PluginArguments:
    """Gathers, checks and completes each request's arguments for each logits processor."""

    def __init__(
        self,
        plugins: PluginSet,
        health: PluginHealth,
        vocab_size: int,
        tokenizer: Tokenizer,
        reasoning: ReasoningParser | None,
    ) -> None:
        """Load the classes; instances live in the workers."""
        self._plugins = plugins
        self._health = health
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._processors = [
            _Processor(
                entry,
                cls,
                plugins.options(entry),
                frozenset(cls.params_fields),
                _same_for_all(cls),
            )
            for entry, cls in plugins.logits_processors()
        ]
        self._honoured = {field for processor in self._processors for field in processor.fields}

    def resolve(self, request: EngineCoreRequest) -> dict[str, dict[str, Any]]:
        """Return, for each processor that the request uses, its arguments as plain data.

        Raises:
            RequestError: an argument is wrong, belongs to no enabled plugin, or asks for something
                that no enabled plugin can do.
        """
        self.check_names(request.params.plugin_args)
        self._refuse_unhonoured(request.params)
        return self._resolved(request, self._processors)

    def fields(
        self, params: SamplingParams, resolved: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the fields of parameters that a request gives under `plugin_args`.

        Not only the processor reads them: stop strings are held back until `min_tokens`, and a
        greedy sampler is recognised by `temperature`.

        Args:
            params: of the request, `plugin_args` included.
            resolved: the result of `resolve`.
        """
        return {
            field: resolved[processor.entry.name][field]
            for processor in self._processors
            if processor.entry.name in params.plugin_args
            for field in processor.fields & resolved[processor.entry.name].keys()
        }

    def complete(self, request: EngineCoreRequest) -> None:
        """Check a request's resolved arguments; resolve those of the other processors that it uses.

        Raises:
            RequestError: as `resolve`.
        """
        self._check(request.plugin_args)
        self._refuse_unhonoured(request.params)
        left = [p for p in self._processors if p.entry.name not in request.plugin_args]
        request.plugin_args |= self._resolved(request, left)

    def revise(self, request: EngineCoreRequest, before: EngineCoreRequest) -> None:
        """Resolve the arguments of a request again after a hook changed its parameters.

        Arguments that the hook changed or removed itself stay so.

        Args:
            before: the request before the hook.

        Raises:
            RequestError: as `resolve`.
        """
        stale = [
            p
            for p in self._processors
            if _set_fields(p.cls, request.params) != _set_fields(p.cls, before.params)
            and request.plugin_args.get(p.entry.name) == before.plugin_args.get(p.entry.name)
        ]
        for processor in stale:
            request.plugin_args.pop(processor.entry.name, None)
        self._check(request.plugin_args)
        self._refuse_unhonoured(request.params)
        request.plugin_args |= self._resolved(request, stale)

    def _resolved(
        self, request: EngineCoreRequest, processors: Sequence[_Processor]
    ) -> dict[str, dict[str, Any]]:
        """Return the arguments of those processors that the request uses."""
        resolved = {}
        for processor in self._used(processors, request.params):
            name = processor.entry.name
            arguments = self._given(processor, request.params)
            if name in self._health.ended or name in self._health.deadly:
                self._health.check(name)
            prepared = self._prepared(processor, arguments, request)
            resolved[name] = msgspec.to_builtins(prepared, str_keys=False)
        return resolved

    def _used(
        self, processors: Sequence[_Processor], params: SamplingParams
    ) -> Iterator[_Processor]:
        """Yield the processors that a request uses: by arguments, by a field, or unasked."""
        changed = {f for f in self._honoured if getattr(params, f) != getattr(_DEFAULTS, f)}
        for processor in processors:
            if (
                processor.entry.name in params.plugin_args
                or not changed.isdisjoint(processor.fields)
                or processor.uses
                or (processor.uses is None and _asked(processor, params))
            ):
                yield processor

    def reasoning_ended(self, prompt_token_ids: Sequence[int]) -> bool | None:
        """Return whether a prompt's last marker ends reasoning; None without a reasoning parser.

        Raises:
            RequestError: the reasoning parser failed.
        """
        if self._reasoning is None:
            return None
        return self._reasoning.markers().ended(prompt_token_ids)

    def _given(self, processor: _Processor, params: SamplingParams) -> Any:
        """Return the checked arguments of a processor that the request uses."""
        name, cls = processor.entry.name, processor.cls
        fields = _set_fields(cls, params)
        if name in params.plugin_args:
            if fields:
                raise RequestError(
                    f"plugin_args.{name}: given twice, here and by {', '.join(fields)}"
                )
            given, path = params.plugin_args[name], f"plugin_args.{name}"
        elif fields:
            own = cls.Arguments.__struct_fields__
            given, path = {name: fields[name] for name in fields if name in own}, ""
        else:
            given, path = {}, f"plugin_args.{name}"
        return _converted(processor, given, path)

    def _prepared(self, processor: _Processor, arguments: Any, request: EngineCoreRequest) -> Any:
        cls: Any = processor.cls
        if cls.prepare.__func__ is _UNPREPARED:
            return arguments
        context = PrepareContext(
            options=processor.options,
            params=read_only(request.params),
            prompt_token_ids=ReadOnlyList(request.prompt_token_ids),
            stop_token_ids=request.stop_token_ids,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            reasoning=self._reasoning,
        )
        try:
            prepared = cls.prepare(arguments, context)
        except (RequestError, PluginFaultError):  # of the tokenizer, for example
            raise
        except ValueError as error:
            raise RequestError(f"{_path(processor, request.params)}: {text_of(error)}") from error
        except BaseException as cause:
            raise_unless_fault(cause)
            raise RequestError(
                f"{processor.entry.source}: its prepare failed: {describe(cause)}"
            ) from cause
        if not isinstance(prepared, cls.Arguments):
            raise RequestError(
                f"{processor.entry.source}: its prepare returned {type(prepared).__name__}, "
                f"expected its Arguments"
            )
        return prepared

    def _check(self, plugin_args: Mapping[str, Any]) -> None:
        """Check arguments that were resolved elsewhere."""
        self.check_names(plugin_args)
        for processor in self._processors:
            name = processor.entry.name
            if name in plugin_args:
                self._health.check(name)
                _converted(processor, plugin_args[name], f"plugin_args.{name}")

    def check_names(self, plugin_args: Mapping[str, Any]) -> None:
        """Refuse arguments for a processor that is not enabled.

        Raises:
            RequestError: naming it, and how to enable it.
        """
        names = [processor.entry.name for processor in self._processors]
        for name in plugin_args:
            if name not in names:
                raise RequestError(
                    f"plugin_args.{name}: no plugin of that name that takes arguments is on"
                    f"{typed.suggest(name, names)}{self._plugins.hint(name, 'logits_processors')}"
                )

    def _refuse_unhonoured(self, params: SamplingParams) -> None:
        for field in _SHAPING_FIELDS:
            value = getattr(params, field)
            if value == getattr(_DEFAULTS, field) or field in self._honoured:
                continue
            if field == "temperature" and params.greedy:  # the sampler's own
                continue
            raise RequestError(
                f"{field}: no logits processor that is on honours it, so {value!r} would be "
                f"ignored; enable one, or leave it at {getattr(_DEFAULTS, field)!r}"
            )


def _same_for_all(cls: type[LogitsPlugin]) -> bool | None:
    """Return the answer of the default `uses`, None if the class has its own."""
    default = cls.uses.__func__ is LogitsPlugin.uses.__func__  # type: ignore[attr-defined]
    return cls.uses(_DEFAULTS) if default else None


def _asked(processor: _Processor, params: SamplingParams) -> bool:
    try:
        return processor.cls.uses(params)
    except BaseException as cause:
        raise_unless_fault(cause)
        raise RequestError(
            f"{processor.entry.source}: its uses failed: {describe(cause)}"
        ) from cause


def _converted(processor: _Processor, given: Any, path: str) -> Any:
    """Return a processor's arguments, checked."""
    try:
        return typed.convert(given, processor.cls.Arguments, path=path, error=RequestError)
    except RequestError:
        raise
    except BaseException as cause:  # raised by the plugin's own check
        raise_unless_fault(cause)
        raise RequestError(
            f"{processor.entry.source}: its Arguments failed: {describe(cause)}"
        ) from cause


def _set_fields(cls: type[LogitsPlugin], params: SamplingParams) -> dict[str, Any]:
    """Return the processor's own fields that a request sets."""
    return {
        field: getattr(params, field)
        for field in cls.params_fields
        if getattr(params, field) != getattr(_DEFAULTS, field)
    }


def _path(processor: _Processor, params: SamplingParams) -> str:
    """Return where a request's arguments for a processor were given."""
    given = processor.entry.name in params.plugin_args
    fields = {} if given else _set_fields(processor.cls, params)
    return "/".join(fields) if fields else f"plugin_args.{processor.entry.name}"
