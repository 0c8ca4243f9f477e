"""Context of the engine half of a step part, and the fields of requests that parts use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hardpoint.errors import RequestError
from hardpoint.plugins.kv_cache.events import KVEvent
from hardpoint.plugins.kv_cache.eviction import RetainedBlocks
from hardpoint.plugins.requests.releases import BlockReleases
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.scheduling.step_cost import StepCost
from hardpoint.plugins.scheduling.step_record import WaitReason
from hardpoint.plugins.text.vocabulary import Vocabulary

from .components import ComponentFactory, FaultCounter

if TYPE_CHECKING:
    from hardpoint.plugins.model.loader import WeightLoader

__all__ = ["EngineHalfContext"]


REQUEST_FIELDS = {
    "pooling_params": "no model of this engine pools",
    "second_type_start": "expected none, no model here reads pairs",
    "prompt_embeds": "expected token ids, this engine takes no embeddings",
    "features": "expected none, no part of this engine encodes any, got {count}",
    "lora": "expected none, no worker of this engine holds adapters, got {value.name!r}",
    "retention": "expected none, no part of this engine keeps blocks",
    "prompt_is_token_ids": "expected none, this engine has no use for it, got {value!r}",
}
"""Optional fields of `EngineCoreRequest` that only step parts make use of.

With the error of a request that sets a field without an enabled part for it: `value` is the value
of the field, `count` the number of its items.
"""


def _without_workers(message: bytes) -> Sequence[bytes]:  # noqa: ARG001
    raise RuntimeError("no workers run")


class StepBorder(Protocol):
    """Runs actions of step parts between two steps, while no step is under way."""

    @property
    def loader(self) -> WeightLoader:
        """The loader of the weights that the engine started with."""

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move KV blocks, for messages; None if none does."""

    def check(self, mode: str) -> None:
        """Check that `run` can pause the engine.

        Args:
            mode: handling of requests in flight, as in `LLM.pause`.

        Raises:
            RequestError: an unknown mode, or a mode that this engine does not support.
            HardpointError: the engine is asleep, or is about to be.
        """

    def run(self, part: str, mode: str, action: Callable[[], Any]) -> Future[Any]:
        """Pause the engine, run an action once no step is under way, and continue.

        Afterwards the engine is paused only if the user has paused it.

        Args:
            part: name of the part. Its earlier action, if still waiting, is canceled.
            mode: as for `check`.
            action: its result, or exception, is set in the future.

        Raises:
            RequestError, HardpointError: as `check`.
        """

    def give_up(self, part: str, why: str) -> None:
        """Fail the future of an action that has not run, and end its pause.

        Args:
            part: name of the part.
            why: message of the future's HardpointError.
        """

    def live_requests(self) -> Iterable[Request[Any]]:
        """Return the live requests, which may be kept until they end."""

    def change_weights(
        self,
        change: Callable[[], object],
        loader: Callable[[], WeightLoader],
        *,
        recompute: bool,
    ) -> None:
        """Change the weights of all workers; call it in an action of `run`.

        The prefix cache is cleared before, and step parts are notified afterwards.

        Args:
            change: gives the workers other weights.
            loader: returns a loader of these weights, for parts that move KV blocks.
            recompute: whether requests that have begun compute their keys and values again.
        """


@dataclass(frozen=True, kw_only=True)
class EngineHalfContext:
    """Context of the half in the engine.

    Attributes:
        components: builds components of other kinds.
        describe_fault: returns class and text of an exception that a component raised; raises it
            again if it is not the component's fault but the user's interrupt.
        faults: counts the faults of components.
        clock: seconds.
        scheduler: names the scheduler in messages.
        vocab_size: vocabulary size of the model.
        vocabulary: vocabulary of the tokenizer; None if no frontend half has asked for it, or the
            tokenizer has none.
        block_size: tokens of a block of the KV cache.
        world_size: number of workers.
        block_hashes: `block_hashes(request, n)` returns the hashes of at least the first n blocks
            of a request, which its known tokens must fill. They are chained, and include its salt.
        publish: publishes events of the KV cache.
        retained: the cached blocks that eviction policies are to keep, if they can.
        step_cost: returns the cost of a step, as far as is known by now; it is measured if
            `scheduler.step_milliseconds` is set or a part drafts.
        why_waiting: returns why a live request got no tokens in the last plan; None if it got some,
            or the scheduler gives no reasons.
        call_workers: returns the results of `WorkerCalls.call` in each rank, in rank order, after
            the steps that were planned before; raises the exception of a rank. Once workers run.
        border: runs actions between two steps, once workers run; None if the context was made by
            hand.
        can_release_blocks: whether `release_blocks` can be called: `StepPart.releases_blocks`.
    """

    components: ComponentFactory
    describe_fault: Callable[[BaseException], str]
    faults: FaultCounter
    clock: Callable[[], float]
    scheduler: str
    vocab_size: int
    vocabulary: Vocabulary | None
    block_size: int
    world_size: int
    block_hashes: Callable[[Request, int], Sequence[bytes]]
    publish: Callable[[Sequence[KVEvent]], None]
    retained: RetainedBlocks = field(default_factory=RetainedBlocks)
    step_cost: Callable[[], StepCost] = StepCost
    call_workers: Callable[[bytes], Sequence[bytes]] = _without_workers
    why_waiting: Callable[[str], WaitReason | None] = lambda _request_id: None
    border: StepBorder | None = None
    can_release_blocks: bool = False

    def release_blocks(self, request: Request, span: range, at: int | None = None) -> range:
        """Release KV blocks of a request; its tokens from position `at` on do not attend to them.

        All tokens keep their positions. The division into steps changes no token: the scheduler
        ends a step before `at`, and a preempted request computes the same keys and values again.
        Blocks with tokens from `at` on are not shared by the prefix cache.

        Args:
            request: a live request, from `AdmissionGate.gate` until it ends.
            span: positions of tokens before `at`; only whole blocks are released. Without any, a
                step ends before `at` all the same.
            at: not before a token that is planned, or an earlier release. None: the next token
                that is not planned. Steps may be planned ahead, so that this is not the same token
                in each run: pass a position if outputs have to be reproducible.

        Returns:
            The positions of the blocks; empty if the span has no whole block.

        Raises:
            RequestError: a request with images or other media, or of a group.
            ValueError: a position that is out of range.
            RuntimeError: the part does not have `releases_blocks`.
        """
        if not self.can_release_blocks:
            raise RuntimeError("release_blocks: expected releases_blocks = True in the step part")
        releases = request.releases or BlockReleases()
        earliest = max(request.num_computed_tokens, releases.all[-1].at if releases.all else 1)
        at, name = earliest if at is None else at, f"release_blocks: {request.request_id!r}"
        if at < earliest:
            cause = "planned tokens" if earliest == request.num_computed_tokens else "a release"
            raise ValueError(
                f"{name}: at: expected a position from {earliest} on, because of {cause}, got {at}"
            )
        if span.step != 1 or not 0 <= span.start <= span.stop <= at:
            raise ValueError(f"{name}: span: expected positions from 0 to {at}, got {span}")
        if features := request.source.features:
            raise RequestError(f"{name}: expected a prompt without media, got {len(features)}")
        if request.source.members or request.source.leader is not None:
            raise RequestError(f"{name}: members: expected none with released blocks")
        size = self.block_size
        blocks = range(-(-span.start // size), span.stop // size)
        releases.add(blocks, at, size)
        request.releases = releases
        return range(blocks.start * size, blocks.stop * size) if blocks else range(0)
