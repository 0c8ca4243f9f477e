"""Adapters of vLLM V0's per-request callables, and of factories that make them."""

from __future__ import annotations

import inspect
from typing import Any

from hardpoint.errors import PluginContractError
from hardpoint.plugins import LogitsRequest, Phase
from hardpoint.toolkit.logits_calls import (
    AdaptedProcessor,
    ExternalProcessor,
    OwnObjects,
    RequestProcessor,
    RowwiseProcessor,
    call_signature,
    parameter_names,
    prompt_of,
    signature_text,
    with_ids,
)

from .objects import AdapterArguments, ExternalParams


class VLLMV0Callable(OwnObjects):
    """Runs a per-request callable of vLLM V0: `(output_ids, logits)`, or with the prompt's ids."""

    contract = 1
    phase = Phase.BIAS
    adapter = "vLLM V0 callable"


class PerRequestFactory(RowwiseProcessor):
    """Runs the callables that a factory `(params) -> callable | None` makes for each request."""

    contract = 1
    phase = Phase.BIAS
    adapter = "per-request callables"

    class Arguments(AdapterArguments):
        """Arguments that the factory reads."""

    def start(self, request: LogitsRequest) -> RequestProcessor:
        """Return the processor that the factory makes for a request.

        Raises:
            TypeError: the factory returned no callable of an accepted form.
        """
        extra_args = request.arguments[self.name].extra_args
        params = ExternalParams(request.params, extra_args, request.stop_token_ids)
        call = self.external.target(params)
        prompt = prompt_of(request)
        return (
            RequestProcessor(prompt)
            if call is None
            else RequestProcessor(prompt, call, with_ids(call_signature(call), prompt))
        )


def adapt_callable(external: ExternalProcessor) -> type[AdaptedProcessor]:
    """Return the component for a callable of vLLM V0, or for a factory of such callables.

    The number of parameters distinguishes them: one of a factory, two or three of a callable.

    Raises:
        PluginContractError: it is neither.
    """
    target = external.target
    call = target
    if inspect.isclass(target):
        if _num_parameters(target) == 1:
            return adapt_factory(external)
        unbound: Any = target.__call__
        call = unbound.__get__(object())
    if not inspect.isbuiltin(target) and _num_parameters(call) in (2, 3):
        return VLLMV0Callable.of(external)
    return adapt_factory(external)


def adapt_factory(external: ExternalProcessor) -> type[AdaptedProcessor]:
    """Return the component for a factory of per-request callables.

    Raises:
        PluginContractError: the factory does not take exactly one positional parameter.
    """
    target = external.target
    try:
        names = parameter_names(target)
        problem = "" if len(names) == 1 else signature_text(target)
        if inspect.isbuiltin(target):
            problem = f"the function {target.__name__} of Python itself"
    except TypeError as cause:
        problem = str(cause)
    if not problem:
        return PerRequestFactory.of(external)
    advice = "it seems to be such a callable itself, or a class of them: name a function that takes"
    raise PluginContractError(
        f"{external.source}: it derives from no interface of hardpoint.plugins; to make "
        f"per-request callables it must take exactly one positional parameter, (params), "
        f"this is {problem}; {advice} the parameters of a request and returns the callable for it, "
        f"or None"
    )


def _num_parameters(call: Any) -> int | None:
    """Return the number of parameters, None if one is not plain and positional."""
    try:
        return len(parameter_names(call))
    except TypeError:
        return None
