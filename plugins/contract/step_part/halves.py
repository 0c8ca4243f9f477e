"""All hooks of a half in one class, each with a default.

Parts that were written before there was a protocol for each thing that a part does derive their
halves from these classes. They run unchanged: the engine calls the methods that they override.
"""

# ruff: noqa: ARG002, D102

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.errors import RequestError
from hardpoint.plugins.component.base import Source
from hardpoint.plugins.model.forward import Forward
from hardpoint.plugins.requests.outputs import EngineCoreOutputs, PartArray
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.plan import (
    BlockIds,
    GrammarBitmask,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.plugins.scheduling.step_record import WaitReason

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.forward import Attend, AttentionWeights, Branch
    from hardpoint.plugins.sampling.phases import LogitsStage
    from hardpoint.plugins.sampling.rows import DraftedStep, LogitsRequest

    from .worker_data import AllocatedCache, KVBlocks, StepRows

__all__ = ["EngineHalf", "WorkerHalf"]


class EngineHalf:
    """All engine hooks of a step part; override the hooks that the part needs.

    New parts name the protocols that they implement instead: `RequestFilter`, `ResourceCost` and
    the others of `engine_hooks`, which describe the hooks.
    """

    capacity: Mapping[str, int] = {}
    every_plan: bool = False
    for_fields: Collection[str] = ()
    for_parameters: Collection[str] = ()
    only_included: bool = False
    is_active: bool = True
    num_draft_tokens: int = 0
    tasks: Collection[str] = ()
    encoder_cache: Any = None
    max_encoder_tokens: int = 0

    def started(self, handshakes: Sequence[bytes | None]) -> None: ...

    def start_failed(self, cause: BaseException) -> None:
        raise cause

    def workers_started(self) -> Mapping[str, RequestFault]:
        return {}

    def uses(self, request: EngineCoreRequest) -> bool:
        return True

    def check(self, request: EngineCoreRequest) -> None: ...

    def refused(self, request_id: str) -> None: ...

    def gate(self, request: Request) -> WaitReason | str | None:
        return None

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        return None

    def cost(self, request: Request) -> Mapping[str, int]:
        return {}

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        return None

    def needs_results(self, plan: SchedulerOutput) -> Collection[str]:
        return ()

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        return None

    def masked(self, plan: SchedulerOutput, masks: Mapping[Source, GrammarBitmask]) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None: ...

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        return False, None

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        return {}

    def figures(self, request_id: str) -> Mapping[str, float | str | Sequence[float]]:
        return {}

    def arrays(self, request_id: str) -> Mapping[str, PartArray]:
        return {}

    def publish(self, outputs: Mapping[int, EngineCoreOutputs]) -> None: ...

    def updated(self, plan: SchedulerOutput) -> None: ...

    def drafts(self) -> Mapping[str, Sequence[int]]:
        return {}

    def limit_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        return {}

    def lost(self, plan: SchedulerOutput) -> None: ...

    def preempted(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None: ...

    def weights_changed(self) -> None: ...

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any | Future[Any]:
        raise RequestError(f"method: the part answers no calls, got {method!r}")

    def wait(self) -> None: ...

    def add_stats(self, stats: SchedulerStats) -> None: ...

    def close(self) -> None: ...


class WorkerHalf:
    """All worker hooks of a step part; override the hooks that the part needs.

    New parts name the protocols that they implement instead: `WorkerStep`, `ModelLogits` and the
    others of `worker_hooks`, which describe the hooks.
    """

    packs: ClassVar[bool] = False
    changes_inputs: ClassVar[bool] = False
    only_users: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    wants_layers: bool = True
    layers: Collection[int] | None = None

    def start(self, blocks: KVBlocks | None) -> bytes | None:
        return None

    def release_blocks(self) -> None: ...

    def take_blocks(self, blocks: KVBlocks) -> None: ...

    def memory(self) -> Mapping[str, int]:
        return {}

    def around_model(self, forward: Forward) -> Forward:
        return forward

    def cache_allocated(self, cache: AllocatedCache) -> None: ...

    def cache_released(self) -> None: ...

    def weights_changed(self) -> None: ...

    def block_memory(self) -> Sequence[torch.Tensor]:
        return ()

    def finished(self, request_ids: Collection[str]) -> None: ...

    def call(self, message: bytes) -> bytes:
        return b""

    def idle(self) -> bool | None:
        return None

    def begin(self, plan: SchedulerOutput, data: bytes) -> None: ...

    def take_attention_weights(self, weights: AttentionWeights) -> None: ...

    def around_layers(self, attend: Attend) -> Attend:
        return attend

    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        return None

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        x: torch.Tensor,
        y: torch.Tensor,
        rows: StepRows,
    ) -> torch.Tensor | None:
        return None

    def added(
        self,
        layer: int,
        branch: Branch,
        residual: torch.Tensor,
        delta: torch.Tensor,
        rows: StepRows,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def skips(self, layer: int, rows: StepRows) -> torch.Tensor | None:
        return None

    def after_layers(self) -> None: ...

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        return None

    def logits(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor | None:
        return None

    def combine(self, logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    def processed(
        self, stage: LogitsStage, logits: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> None: ...

    def verify_drafts(self, step: DraftedStep) -> Sequence[int]:
        return [0] * len(step.requests)

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None: ...

    def report(self) -> bytes | None:
        return None

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None: ...
