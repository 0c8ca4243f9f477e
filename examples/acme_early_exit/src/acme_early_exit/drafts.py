"""A speculator that drafts with the first layers of the engine's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    DraftRequest,
    Meta,
    ModelError,
    Speculator,
    SpeculatorContext,
)

_CHUNK = 512
"""Tokens of a prompt that are computed in a step."""


_OPTIONS = {"num_layers": "num_layers", "num_tokens": "cache_tokens"}
"""Options by the arguments of `open_model`, for errors."""


class SelfSpeculation(Speculator):
    """Drafts by early exit: the first layers, the last norm and the output layer.

    J. Zhang et al., "Draft & verify: lossless large language model acceleration via
    self-speculative decoding", 2023. Drafts use the noise of the request, so that they are often
    right at any temperature. A request with prompt embeddings has no drafts.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            num_layers: number of layers that compute drafts.
            cache_tokens: size of their KV cache in tokens, for all requests; a request without room
                has no drafts.
        """

        num_layers: Annotated[int, Meta(ge=1)]
        cache_tokens: Annotated[int, Meta(ge=1)] = 1 << 14

    options: Options

    def __init__(self, context: SpeculatorContext) -> None:
        """Open the sequences of the first layers.

        Raises:
            ConfigError: the model has fewer layers, or the cache does not fit.
            ModelError: ranks share the model.
        """
        super().__init__(context)
        if context.open_model is None:
            raise ConfigError(f"plugin.{self.name}: its context was made by hand: no open_model")
        options = self.options
        try:
            self._model = context.open_model(
                context.MAIN_MODEL, options.cache_tokens, num_layers=options.num_layers
            )
        except ModelError as error:
            argument, _, text = str(error).partition(": ")
            if argument not in _OPTIONS:
                raise
            raise ConfigError(f"plugin.{self.name}.{_OPTIONS[argument]}: {text}") from error

    def start(self, request: DraftRequest) -> list[int] | None:
        """Return the tokens that the first layers have computed: none."""
        return None if None in request.prompt_token_ids else []

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:
        """Return drafts, one token of all requests after the other."""
        drafts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        new: dict[str, list[int]] = {}
        for request in requests:
            if request.state is None or not request.limit:
                continue
            tokens, name = self._new_tokens(request), request.request_id
            if not self._model.reserve(name, len(tokens) + request.limit):
                continue
            if len(tokens) <= _CHUNK:
                new[name] = tokens
            else:  # a long prompt is computed over several steps, without drafts
                self._model.extend({name: tokens[:_CHUNK]})
                request.state.extend(tokens[:_CHUNK])
        by_name = {request.request_id: request for request in requests}
        while new and budget > 0:
            drawn = self._drawn(new, by_name, drafts)
            for name, tokens in new.items():
                by_name[name].state.extend(tokens)
            new = {}
            for name, token in drawn.items():
                if budget > 0:
                    drafts[name].append(token)
                    budget -= 1
                    if len(drafts[name]) < by_name[name].limit:
                        new[name] = [token]
        return list(drafts.values())

    def _new_tokens(self, request: DraftRequest) -> list[int]:
        """Return the tokens to compute; forget computed drafts that were rejected."""
        text = [*request.prompt_token_ids, *request.output_token_ids]
        known: list[int] = request.state
        length = min(len(known), len(text) - 1, self._model.length(request.request_id))
        pairs = zip(known[:length], text, strict=False)
        same = next((at for at, (mine, other) in enumerate(pairs) if mine != other), length)
        del known[same:]
        self._model.cut(request.request_id, same)
        return text[same:]

    def _drawn(
        self,
        new: Mapping[str, Sequence[int]],
        requests: Mapping[str, DraftRequest],
        drafts: Mapping[str, Sequence[int]],
    ) -> dict[str, int]:
        """Return the token that each request would draw from the logits of the first layers."""
        logits, ops = self._model.extend(new), self.context.ops
        params = [requests[name].params for name in new]
        positions = [len(requests[name].output_token_ids) + len(drafts[name]) for name in new]
        greedy = [sampling.greedy for sampling in params]
        if all(greedy):
            return dict(zip(new, map(int, ops.argmax(logits).tolist()), strict=True))
        temperatures = [1.0 if sampling.greedy else sampling.temperature for sampling in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        ops.divide(logits, column(temperatures, torch.float32).unsqueeze(1))
        seeds = column([requests[name].seed for name in new], torch.int64)
        tokens = ops.draw(logits, seeds, column(positions, torch.int64), column(greedy, torch.bool))
        return dict(zip(new, map(int, tokens.tolist()), strict=True))

    def ended(self, request: DraftRequest) -> None:
        """Release the sequence of a request."""
        self._model.cut(request.request_id, 0)

    def memory(self) -> int:
        """Return the bytes of the KV cache of the first layers."""
        return self._model.cache_bytes

    def sleep(self, level: int) -> None:  # noqa: ARG002
        """Release the KV cache."""
        self._model.sleep()

    def wake_up(self) -> None:
        """Allocate the KV cache; all sequences begin again."""
        self._model.wake_up()
