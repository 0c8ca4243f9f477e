"""Speculators: draft how the output of requests goes on, which the next step verifies.

A draft is accepted while it is the token that its request draws at that position, with its own
logits, processors and noise. So no speculator changes any output: it changes the number of steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import (
    LONG,
    Default,
    Returned,
    notifies,
    returns,
    unusable,
)
from hardpoint.plugins.component.type_variables import ArgumentsT_co, StateT_co
from hardpoint.plugins.model.logits_ops import LogitsOps
from hardpoint.plugins.requests.params import SamplingParams, ids_after_embeddings
from hardpoint.plugins.text.arguments import ComponentWithArguments

from .worker import HeadOpener, LoadedModel, MainModel, ModelOpener
from .worker_data import AllocatedCache

if TYPE_CHECKING:
    import torch

__all__ = ["DraftRequest", "Speculator", "SpeculatorContext"]


@dataclass(frozen=True, kw_only=True)
class SpeculatorContext(Context["Speculator"]):
    """Context of a speculator, in the worker that samples.

    Attributes:
        device: device of the model, a `torch.device`.
        vocab_size: vocabulary size of the model.
        hidden_size: hidden size of the model.
        num_layers: layers of the model with attention, the largest `num_layers` of `open_model`;
            0 if the context was made by hand.
        max_num_seqs: requests of a step, at most.
        max_model_len: tokens of a request, at most.
        num_draft_tokens: drafts of a request and a step, at most.
        ops: operations on logits, quick ones on this device.
        loaded: the model itself; None if the context was made by hand.
        open_model: opens a further model, such as a small draft model; None if the context was
            made by hand.
        open_head: opens a drafting head, with attention layers in the engine's KV cache; None if
            the context was made by hand. For speculators with `has_kv_cache`.
        max_step_tokens: tokens of a step, at most.
        MAIN_MODEL: the engine's own model, for `open_model` and `open_head`.
    """

    MAIN_MODEL: ClassVar[MainModel] = MainModel.MAIN

    device: Any
    vocab_size: int
    hidden_size: int
    max_num_seqs: int
    max_model_len: int
    num_draft_tokens: int
    ops: LogitsOps = field(default_factory=LogitsOps)
    loaded: LoadedModel | None = None
    open_model: ModelOpener | None = None
    open_head: HeadOpener | None = None
    max_step_tokens: int = 1
    num_layers: int = 0


@dataclass(slots=True, eq=False)
class DraftRequest(Generic[ArgumentsT_co, StateT_co]):
    """A request to draft for, as a speculator sees it: it changes nothing of it.

    `DraftRequest[Arguments, History]` in an annotation states the types of arguments and state.

    Attributes:
        prompt_token_ids: its prompt; None in place of an id where it has an embedding.
        output_token_ids: its output so far; it grows between two calls. Do not keep a copy.
        params: sampling parameters.
        arguments: its arguments for the speculator; the defaults for a request that gives none.
        scope: requests of other scopes have another cache salt or adapter: data learned from
            one must not show in the drafts of another.
        seed: its seed, mixed with the index of its completion, as `SamplingRows.seeds` has it: with
            it and the output position, `LogitsOps.draw` has the noise that the request's own
            tokens are drawn with.
        state: result of `start`.
        limit: most drafts of it, now.
        hidden: hidden states [tokens, hidden_size] of the tokens just before the newest one, in
            their order: the last row belongs to the token before it, the first to position
            `len(prompt_token_ids) + len(output_token_ids) - 1 - len(hidden)`. At least one; at most
            the ones computed since the previous token of the request. Hidden states of a cached
            prefix are missing; after a preemption some may be repeated; the ones of a step
            without `propose` are not repeated. None unless `needs_hidden`. With `needs_layers`,
            [tokens, layers * hidden_size].
        hidden_start: position of the first row of `hidden`.
        block_ids: its blocks of the KV cache, with lookahead; empty without `has_kv_cache`.
        cache_start: first position from which the blocks have keys and values of this speculator,
            up to `hidden_start`; where a block begins. It is after `hidden_start` if the tokens up
            to the next block cannot be used.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    params: SamplingParams
    arguments: ArgumentsT_co
    scope: str = ""
    seed: int = 0
    state: StateT_co = field(default=None, kw_only=True)  # type: ignore[assignment]
    limit: int = 0
    hidden: torch.Tensor | None = None
    hidden_start: int = 0
    block_ids: Sequence[int] = ()
    cache_start: int = 0

    @property
    def last_prompt_ids(self) -> list[int]:
        """The ids of its prompt after the last embedding; all of a prompt of ids."""
        return ids_after_embeddings(self.prompt_token_ids)


def _drafts(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> list[list[int]]:  # noqa: ARG001
    requests = originals[0]
    try:
        drafts = [[index(token) for token in islice(tokens, LONG)] for tokens in value]
    except BaseException as error:
        raise unusable(value, ", expected token ids for each request") from error
    if len(drafts) != len(requests):
        raise unusable(value, f", expected token ids for each of {len(requests)} requests")
    for request, tokens in zip(requests, drafts, strict=True):
        if len(tokens) > request.limit:
            raise unusable(tokens, f", expected at most {request.limit} drafts of a request")
    return drafts


DRAFTS = Returned("token ids for each request, at most its `limit`", _drafts)
NO_DRAFTS = Default("its requests go on without drafts", lambda requests, *_: [[]] * len(requests))


class Speculator(ComponentWithArguments):
    """Drafts tokens that may follow the output of requests.

    A request chooses one by `SamplingParams.speculator`, and gives it arguments under
    `plugin_args[name]`.

    Attributes:
        needs_hidden: whether it reads `DraftRequest.hidden`.
        has_kv_cache: whether it has layers in the engine's KV cache (`SpeculatorContext.open_head`)
            and writes keys and values for each row of `hidden`. It needs `needs_hidden`. Then
            `propose` is called after every step, also for parts of prompts and requests without
            drafts; their `limit` is 0. Blocks have room for `num_draft_tokens` further tokens.
        needs_layers: whether the rows of `hidden` are the residual stream after `hidden_layers`.
        hidden_layers: layers of the model, by index, in the order of their parts in a row; set by
            the constructor of a speculator with `needs_layers`.
        is_quick: whether a draft takes far less time than a step. Then it also drafts for requests
            with drafts that do not pay, so that the engine notices when they would; these drafts
            are not verified.
    """

    needs_hidden: ClassVar[bool] = False
    has_kv_cache: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    hidden_layers: Sequence[int] = ()
    is_quick: ClassVar[bool] = False

    context: SpeculatorContext

    def start(self, request: DraftRequest) -> Any:  # noqa: ARG002
        """Return the state of a request, which the engine keeps until it ends.

        Called before the first `propose`, when the output may have begun. It is not called again
        after a preemption. A request for which it fails has no drafts.
        """
        return None

    @returns(DRAFTS, otherwise=NO_DRAFTS)
    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], budget: int) -> Sequence[Sequence[int]]:
        """Return the drafts of each request.

        They cost a row of the next step each, accepted or not, so that none is better than a wrong
        one. They may depend on anything but on requests of another scope.

        Args:
            requests: requests that got a token in this step, and go on.
            budget: maximum drafts of all of them together; the engine drops drafts of the last
                requests beyond it.

        Returns:
            For each request, at most `limit` token ids.
        """

    @notifies
    def verified(self, request: DraftRequest, drafts: Sequence[int], accepted: int) -> None:
        """Notify the speculator of drafts that were verified, before the next `propose`.

        Args:
            request: its output has the accepted drafts, and one more token.
            drafts: the verified drafts.
            accepted: how many of the first of them were accepted.
        """

    @notifies
    def ended(self, request: DraftRequest) -> None:
        """Notify the speculator of the end of a request that it has started."""

    @notifies
    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Take the engine's KV cache, which is allocated, also again after a sleep.

        Called with `has_kv_cache` alone.
        """

    @notifies
    def cache_released(self) -> None:
        """Drop all references to the KV cache before its memory is released."""

    def memory(self) -> int:
        """Return the bytes on the device that it is going to allocate.

        Called once, before the KV cache is sized, which leaves them free.
        """
        return 0

    def sleep(self, level: int) -> None:
        """Release memory, see `Worker.sleep`; level 2 is followed by `close`."""

    def wake_up(self) -> None:
        """Allocate the memory that `sleep` released."""
