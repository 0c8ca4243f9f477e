"""Activation taps: read or change hidden states inside of a model, or end its layers early."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import fitting, instance, returns
from hardpoint.plugins.text.arguments import ComponentWithArguments, argument_column
from hardpoint.typed import stable_bytes

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.ops import Ops

__all__ = ["ActivationTap", "ActivationTapContext", "TapRows", "TapSite"]

TapPlace = Literal["attention_output", "mlp_output", "layer_output"]


class TapSite(NamedTuple):
    """A place in a model where a tap reads or changes hidden states.

    Attributes:
        layer: index of a decoder layer of the model, from 0.
        place: "attention_output" and "mlp_output" are the outputs of attention and MLP of the layer
            to the residual stream; "layer_output" is the residual stream after the layer.
    """

    layer: int
    place: TapPlace = "layer_output"


PLACES = get_args(TapPlace)


def is_site(site: Any) -> bool:
    """Return whether a value is a place in some model."""
    is_layer = isinstance(site, TapSite) and type(site.layer) is int and site.layer >= 0
    return is_layer and site.place in PLACES


SITES = fitting(
    "TapSites, at least one, each once",
    lambda value: (
        isinstance(value, Sequence)
        and len(value) == len(set(value)) > 0
        and all(is_site(site) for site in value)
    ),
)


@dataclass(frozen=True, kw_only=True)
class ActivationTapContext(Context["ActivationTap"]):
    """Context of a tap, in each worker.

    Attributes:
        device: device of the model, a `torch.device`.
        hidden_size: hidden size of the model.
        ops: operations of its layers; `linear` gives a row the same product alone and in
            any batch; None if the context was made by hand.
        unembed: returns the logits [tokens, vocab] of a residual stream [tokens, hidden_size], as
            if the model ended after its layer (the logit lens); None if the model is divided among
            ranks, or the context was made by hand.
    """

    device: Any
    hidden_size: int
    ops: Ops | None = None
    unembed: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class TapRows:
    """The tokens of a call, request by request.

    Attributes:
        arguments: arguments of each request, instances of `Arguments`, or of `Prepared`.
        starts: index of the first token of each request, and at the end the number of all tokens.
        first_positions: position of the first token of each request in its sequence.
        prompt_lens: tokens of each request's prompt.
        device: device of the hidden states.
    """

    arguments: Sequence[Any]
    starts: Sequence[int]
    first_positions: Sequence[int]
    prompt_lens: Sequence[int]
    device: Any

    def spans(self) -> Iterator[tuple[Any, range]]:
        """Yield the arguments of each request, and the range of its tokens in the call."""
        for arguments, (start, end) in zip(self.arguments, pairwise(self.starts), strict=True):
            yield arguments, range(start, end)

    def tensor(self, name: str) -> torch.Tensor:
        """Return an argument for each token, [tokens, 1]: int64 of integers, or float32."""
        repeated = [arguments for arguments, tokens in self.spans() for _ in tokens]
        return argument_column(repeated, name, self.device)

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sequence, int64 [tokens]."""
        return self._on_device(self._positions())

    def in_prompt(self) -> torch.Tensor:
        """Return whether each token is of a prompt, bool [tokens]."""
        lens = [
            length
            for length, (_, tokens) in zip(self.prompt_lens, self.spans(), strict=True)
            for _ in tokens
        ]
        pairs = zip(self._positions(), lens, strict=True)
        return self._on_device([position < length for position, length in pairs])

    def _on_device(self, values: Sequence[Any]) -> torch.Tensor:
        from hardpoint.plugins.process.device import to_device  # noqa: PLC0415 - it loads torch

        return to_device(values, self.device)

    def _positions(self) -> list[int]:
        firsts = zip(self.first_positions, self.spans(), strict=True)
        return [first + index for first, (_, tokens) in firsts for index in range(len(tokens))]


class ActivationTap(ComponentWithArguments):
    """Reads or changes hidden states inside of the model, or ends its layers, for some requests.

    A request asks by its arguments under `plugin_args[name]`, `{}` if there are none. A class
    overrides some of `change`, `exits` and `read`: at one site, they are called in this order, and
    the others get the result of `change`. Taps are called in their order (`plugins.enable`).

    None of them changes state: the results depend on the hidden states, the arguments and the
    positions of a token alone, so that it does not matter how a prompt is cut into chunks, which
    other requests run, and whether a draft is computed again.

    Attributes:
        needs_all: whether `read` needs all tokens. If not, it does not get tokens with keys and
            values in the cache.
    """

    named_only = True
    needs_all: ClassVar[bool] = True

    context: ActivationTapContext

    @classmethod
    @returns(SITES)
    @abstractmethod
    def sites(cls, arguments: Any) -> Sequence[TapSite]:
        """Return where the tap is called for a request.

        Called in several processes. A layer that the model does not have rejects the request.

        Args:
            arguments: an instance of `Arguments`, or of `Prepared`.
        """

    @classmethod
    @returns(instance(bytes))
    def cache_key(cls, arguments: Any) -> bytes:
        """Return a key of the effect of `change` and `exits`, besides options and version.

        Requests share keys and values in the KV cache, and in stores of it, only where it is the
        same. By default all arguments. Of a class that reads a file, it should have the content of
        the file in it.
        """
        return stable_bytes(arguments)

    def read(
        self,
        site: TapSite,  # noqa: ARG002
        values: torch.Tensor,  # noqa: ARG002
        rows: TapRows,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return numbers for the caller, a row per token; None gives none of these tokens.

        They become `CompletionOutput.part_arrays["activation_taps"]["NAME/LAYER/PLACE"]`. Called in
        the rank that samples, for tokens of drafts, too: rejected drafts are left out.

        Args:
            site: one of `sites` of each request.
            values: [tokens, hidden_size], in the dtype of the model; not to be changed.
            rows: the requests of these tokens.

        Returns:
            [tokens, ...], the same shape after the first dimension in each call for a request.
        """
        return None

    def change(
        self,
        site: TapSite,  # noqa: ARG002
        values: torch.Tensor,  # noqa: ARG002
        rows: TapRows,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return other hidden states, [tokens, hidden_size]; None leaves them.

        Called in each rank of the layer, with the same values.

        Args:
            site: one of `sites` of each request.
            values: [tokens, hidden_size], in the dtype of the model; not to be changed in place.
            rows: the requests of these tokens.
        """
        return None

    def exits(
        self,
        site: TapSite,  # noqa: ARG002
        values: torch.Tensor,  # noqa: ARG002
        rows: TapRows,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return which tokens skip all later layers, bool [tokens]; None if none does.

        Called at sites after a layer, `"layer_output"`. The next token is then sampled as if the
        model ended there. Later layers still compute keys and values of these tokens, see
        `ResidualStream.skips`.

        Args:
            site: one of `sites` of each request.
            values: [tokens, hidden_size], in the dtype of the model; not to be changed.
            rows: the requests of these tokens.
        """
        return None
