"""Speculator with a draft model, sampled with the noise of the request itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    DraftRequest,
    Meta,
    ModelError,
    Speculator,
    SpeculatorContext,
)

from .drawing import draw

_MOST_TOKENS = 1 << 16
"""Tokens of the cache by default, of all requests together."""

_CHUNK = 512
"""Tokens of a text that are computed in a step."""


class DraftModel(Speculator):
    """Drafts tokens with a smaller model that has the same tokenizer.

    It samples with the request's temperature, truncation and noise. With the same noise, two
    distributions choose the same token nearly as often as they overlap (M. Daliri, C. Musco,
    A. T. Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    2024).
    The drafts of a request do not depend on other requests. The draft model has a KV cache of its
    own, which survives a preemption of the request. A request with prompt embeddings has no
    drafts.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            model: the draft model, as `model` of the configuration.
            cache_tokens: size of its KV cache in tokens, for all requests; a request without room
                has no drafts. None is the length of `max_num_seqs` requests, at most 65536.
        """

        model: Annotated[str, Meta(min_length=1)]
        cache_tokens: Annotated[int, Meta(ge=1)] | None = None

    options: Options

    def __init__(self, context: SpeculatorContext) -> None:
        """Load the draft model.

        Raises:
            ConfigError: it has another vocabulary or tokenizer, cannot be loaded or does not fit.
        """
        super().__init__(context)
        if context.open_model is None:
            raise ConfigError(f"plugin.{self.name}: its context was made by hand: no open_model")
        longest = context.max_num_seqs * context.max_model_len
        num_tokens = self.options.cache_tokens or min(longest, _MOST_TOKENS)
        path = f"plugin.{self.name}.model"
        try:
            self._model = context.open_model(
                self.options.model, num_tokens, vocab_size=context.vocab_size, same_tokens=True
            )
        except ModelError as error:
            raise ConfigError(f"{path}: {str(error).removeprefix('model: ')}") from error

    def start(self, request: DraftRequest) -> list[int] | None:
        """Return the tokens that the draft model has computed: none.

        None for a prompt with embeddings, which are the engine's model's own: it has no drafts.
        """
        return None if None in request.prompt_token_ids else []

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:
        """Return drafts, one token of all requests after the other."""
        drafts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        fed = {}
        for request in requests:
            if request.state is None:
                continue
            new = self._new_tokens(request)
            if not self._model.reserve(request.request_id, len(new) + request.limit):
                continue
            if len(new) <= _CHUNK:
                fed[request.request_id] = request, new
            else:  # a long prompt is computed over several steps, without drafts
                self._model.extend({request.request_id: new[:_CHUNK]})
                request.state.extend(new[:_CHUNK])
        while fed and budget > 0:
            drawn = self._drawn(fed, drafts)
            following = {}
            for name, token in drawn.items():
                request, new = fed[name]
                request.state.extend(new)
                if budget > 0:
                    drafts[name].append(token)
                    budget -= 1
                    if len(drafts[name]) < request.limit:
                        following[name] = request, [token]
            fed = following
        return list(drafts.values())

    def _new_tokens(self, request: DraftRequest) -> list[int]:
        known: list[int] = request.state
        prompt, output = request.prompt_token_ids, request.output_token_ids
        length = len(prompt) + len(output)
        # Drafts are at the end of the sequence; earlier tokens were compared before.
        same = min(len(known), length - 1, self._model.length(request.request_id))
        at = max(0, min(len(prompt), same))
        while at < same and known[at] == output[at - len(prompt)]:
            at += 1
        del known[at:]
        self._model.cut(request.request_id, at)
        if at < len(prompt):
            return [*prompt[at:], *output]
        return list(output[at - len(prompt) :])

    def _drawn(
        self,
        fed: dict[str, tuple[DraftRequest, list[int]]],
        drafts: dict[str, list[int]],
    ) -> dict[str, int]:
        logits = self._model.extend({name: new for name, (_, new) in fed.items()})
        requests = [request for request, _ in fed.values()]
        positions = [len(r.output_token_ids) + len(drafts[r.request_id]) for r in requests]
        drawn = draw(self.context.ops, logits, requests, positions)
        return dict(zip(fed, drawn, strict=True))

    def ended(self, request: DraftRequest) -> None:
        """Release the sequence of a request."""
        self._model.cut(request.request_id, 0)

    def memory(self) -> int:
        """Return the bytes of the draft model's KV cache."""
        return self._model.cache_bytes

    def sleep(self, level: int) -> None:  # noqa: ARG002
        """Release the KV cache."""
        self._model.sleep()

    def wake_up(self) -> None:
        """Allocate the KV cache; all sequences begin again."""
        self._model.wake_up()

    def close(self) -> None:
        """Close the draft model."""
        self._model.close()
