"""The arguments of a request, as the components of its generation of the plugins get them."""

from __future__ import annotations

from typing import Any

from hardpoint import typed
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.request_arguments import argument_key
from hardpoint.plugins import EngineCoreRequest, HardpointError, RequestFault, Sampler
from hardpoint.typed import ReadOnlyDict, prepared_type

from .pipeline import LogitsPipeline

_ELSEWHERE = {
    kind.name
    for kind in KINDS.values()
    if kind.takes_arguments and kind.name not in ("logits_processors", "samplers")
}
"""Kinds whose components get their arguments elsewhere."""

Converted = tuple[ReadOnlyDict[str, Any], Any, RequestFault | None]
"""Arguments of processors by name, those of the sampler, and the fault if one is rejected."""


def no_arguments() -> Converted:
    """Return the arguments of a request in a rank that does not sample."""
    return ReadOnlyDict(), None, None


class RequestArguments:
    """Converts the arguments of requests."""

    def __init__(self, pipeline: LogitsPipeline, sampler: Sampler) -> None:
        self._pipeline, self._sampler = pipeline, sampler
        self._key = argument_key("samplers", sampler.name)
        self._type = prepared_type(type(sampler))
        self._defaults = self._type()

    def of(self, source: EngineCoreRequest) -> Converted:
        """Convert the arguments of a request."""
        # The frontend has checked them, but a plugin's own check may fail in this process only.
        arguments: dict[str, Any] = {}
        sampler_arguments = self._defaults
        for name, plain in source.plugin_args.items():
            path = f"plugin_args.{name}"
            if name == self._key:
                try:
                    sampler_arguments = typed.convert(plain, self._type, path=path)
                except HardpointError as cause:
                    return self._rejected(RequestFault(str(cause)))
                except BaseException as cause:
                    raise_unless_fault(cause)
                    what = f"sampler {self._sampler.name!r}: its Arguments failed"
                    return self._rejected(RequestFault(f"{what}: {describe(cause)}"))
                continue
            runner = self._pipeline.runner(name, source.generation)
            if runner is None:
                if name.partition("/")[0] in _ELSEWHERE:
                    continue
                message = f"{path}: no logits processor of that name is enabled"
                return self._rejected(RequestFault(message))
            try:
                type_ = prepared_type(type(runner.processor))
                arguments[name] = typed.convert(plain, type_, path=path)
            except HardpointError as cause:
                return self._rejected(RequestFault(str(cause), name))
            except BaseException as cause:
                return self._rejected(runner.fault("Arguments", cause))
        return ReadOnlyDict(arguments), sampler_arguments, None

    def _rejected(self, fault: RequestFault) -> Converted:
        return ReadOnlyDict(), self._defaults, fault
