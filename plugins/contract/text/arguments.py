"""Components that take arguments of each request, and how these are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint import typed
from hardpoint.plugins.component.base import Component
from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.requests.params import SamplingParams

from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

__all__ = ["PrepareContext"]


@dataclass(frozen=True, kw_only=True)
class PrepareContext:
    """The request and frontend components that `prepare` may use.

    Attributes:
        options: the component's own, checked.
        params: checked parameters of the request.
        prompt_token_ids: None in place of an id where the prompt has an embedding.
        stop_token_ids: every token id that ends the request.
        tokenizer: None where a policy is changed on a running engine, for requests that are there.
        reasoning: markers of the configured reasoning parser, if any; None for parsers.
    """

    options: Any
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    vocab_size: int
    tokenizer: Tokenizer | None
    reasoning: ReasoningMarkers | None = None


class NoArguments(typed.Arguments):
    """The arguments of a component that takes none."""


class ComponentWithArguments(Component):
    """Base of the interfaces of components with arguments per request.

    They are a class `Arguments` in its body, derived from `hardpoint.plugins.Arguments`. A caller
    gives them under `plugin_args[name]`, or `plugin_args["kind/name"]`. They are checked
    by the class's `Arguments`, then `prepare` may add derived values. A class
    with `prepare` declares the type of the result as `Prepared`, derived from its `Arguments`: a
    caller cannot set the fields that only `Prepared` has. A class without `Prepared` returns its
    `Arguments`.

    Every request uses the sampler, the policy and the output parsers, whether it gives arguments
    or not: each field of their `Arguments` and `Prepared` has a default.

    Attributes:
        named_only: whether only requests that give arguments use a component, though it be `{}`.
            The arguments of such a step part may have fields without a default.
    """

    Arguments: ClassVar[type[typed.Arguments]] = NoArguments
    named_only: ClassVar[bool] = False

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:  # noqa: ARG003
        """Check or complete one request's arguments, in the frontend, once.

        Returns:
            The arguments to use: an instance of `Prepared`, or of `Arguments` in a class without
            `Prepared`.

        Raises:
            ValueError: rejects the request; the user gets the message after the path of the
                arguments. A RequestError is passed on unchanged.
        """
        return arguments


def argument_column(arguments: Sequence[Any], name: str, device: torch.device) -> torch.Tensor:
    """Return one argument of every row as [rows, 1] on a device.

    Whole numbers give int64, others float32.
    """
    import torch  # noqa: PLC0415 - the contract itself loads without it

    from hardpoint.plugins.process.device import to_device  # noqa: PLC0415 - which loads it

    values = [getattr(row_arguments, name) for row_arguments in arguments]
    is_integral = all(isinstance(value, int) for value in values)
    dtype = torch.int64 if is_integral else torch.float32
    return to_device(values, device, dtype).unsqueeze(1)
