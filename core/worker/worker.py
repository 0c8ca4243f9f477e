"""The worker: one device's model, cache and sampler, built from plugins."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec
import torch

from hardpoint.core.weights.planned_model import (
    PlannedModel,
    load_weights,
    open_attention,
    open_ops,
    plan_model,
)
from hardpoint.core.weights.shares import check_parallelism
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.core.worker.sampling.processors import processor_changes
from hardpoint.core.worker.sampling.sampling_stage import open_stage
from hardpoint.errors import CommunicationAbortedError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.live.worker import WorkerChanges
from hardpoint.host.registry.blame import describe
from hardpoint.host.system.memory import MemoryEstimate, MovedWeights, release_pinned_memory
from hardpoint.host.system.plugin_settings import StepSettings
from hardpoint.host.system.profiling import Profiling
from hardpoint.host.system.rank_store import served_store
from hardpoint.host.system.threads import ComputeThreads, crowding
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.plugins import (
    AttentionBackend,
    GrammarBitmask,
    HardpointError,
    ModelRunnerOutput,
    Ops,
    SchedulerOutput,
    WeightLoader,
    WorkerInfo,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.model.logits_ops import warm_up
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement
from hardpoint.plugins.process.executor import LateOutput
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.plugins.worker_half import KVBlocks
from hardpoint.toolkit.kv_blocks.identity import block_identity
from hardpoint.toolkit.logits_calls.states import ObservedStates

from .input_batch import InputBatch
from .loaded_model import ReloadedModel, measure, naming_memory, open_parts, share_of_memory
from .model_runner import ModelRunner
from .ranks import Ranks

_log = logging.getLogger("hardpoint")

_TRIAL_TOKENS = 2


class LocalWorker:
    """The worker of this process: a model and its KV cache on one device.

    Attributes:
        observed_states: states of logits processors, kept when the model is released.
        movable_weights: weights that sleep level 1 moves to CPU memory; None if it moves none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        activity: Activity | None = None,
        on_forward: Callable[[], None] | None = None,
        settings: StepSettings | None = None,
    ) -> None:
        """Store the spec; `load_model` builds the model.

        Args:
            on_forward: see `WorkerLaunch`.
            settings: restores torch's settings after a step; None restores all of them.
        """
        self._spec: WorkerSpec | None = spec
        self._activity, self._settings = activity or Activity(), settings or StepSettings()
        self._device, self._on_forward = spec.device, on_forward
        self._runner: ModelRunner | None = None
        self._components: list[Component] = []
        self._max_model_len, self._num_blocks, self._num_states = spec.max_model_len, 0, 0
        self._estimate: MemoryEstimate | None = None
        self._threads: ComputeThreads | None = None
        self._weight_cache: WeightCache | None = None
        self._weights_hash: str | None = None  # once worker halves that move blocks have started
        self.movable_weights: Mapping[str, torch.Tensor] | None = None
        self._moved: MovedWeights | None = None
        is_ahead = bool(spec.config.scheduler.asynchronous)  # resolved by `prepare_worker`
        self._ranks = Ranks(spec.config.parallel, spec.rank, spec.placement, asynchronous=is_ahead)
        self._profiling = Profiling(
            spec.config.engine.profile_dir,
            spec.device,
            rank=None if spec.placement is None else spec.rank,
        )
        self.observed_states = ObservedStates()
        self._live = WorkerChanges()
        self.live_change, self.plugin_states = self._live.run, self._live.states
        self.start_profile, self.stop_profile = self._profiling.start, self._profiling.stop
        self.abort = self._ranks.abort

    def load_model(self) -> WorkerInfo:
        """Build the model and read its weights.

        Raises:
            ModelError: weights are missing or of the wrong shape, the device or the memory does not
                fit.
        """
        assert self._spec is not None
        spec = dataclasses.replace(self._spec, plugins=self._live.plugins or self._spec.plugins)
        self._use_device()
        if self._threads is None and spec.device.type == "cpu":
            num_ranks = 1 if spec.placement is None else len(spec.placement.local(spec.rank))
            num_engines, threads = spec.config.parallel.num_local, spec.config.executor.threads
            self._threads = ComputeThreads(threads, num_ranks=num_ranks, num_engines=num_engines)
            if spec.rank == 0 and (crowded := crowding(num_ranks)) is not None:
                _log.warning("%s", crowded)
        with self._naming_memory():
            return self._load_model(spec)

    def _load_model(self, spec: WorkerSpec) -> WorkerInfo:
        backend, ops = open_attention(spec), open_ops(spec)
        if spec.rank == 0:
            _log.info("operations: %s; attention: %s", ops.describe(), backend.describe())
        entry = spec.plugins.get("models", spec.model_config.model_plugin)
        check_parallelism(spec.plugins.target(entry), entry.source, spec.config.parallel)
        ranks = self._ranks
        if not ranks.have_met:
            self._meet(spec)
        planned = self._plan_model(spec, ops, backend)
        model, attention, checked = planned.model, planned.attention, planned.checked
        self._estimate = planned.estimate
        with contextlib.closing(planned.quantized):
            self._estimate.check(spec.config.model)
            # Before the weights, so that a plugin that cannot start fails early.
            stage = None
            if ranks.is_output:
                stage = open_stage(spec, ops, self._activity, self.observed_states)
            ranks.wait_for_all()  # so that none allocates while another still measures the memory
            cache = self._weight_cache = WeightCache(spec.config.weight_cache, ranks.num_local)
            load_weights(spec, planned, cache, ranks.any)
        with torch.inference_mode():
            checked.run_trial(min(_TRIAL_TOKENS, spec.max_model_len), _TRIAL_TOKENS)
            if stage is not None and spec.device.type == "cuda":
                warm_up(ops, spec.model_config.vocab_size, spec.device)
        self.movable_weights = model.packed_weights() if spec.device.type == "cuda" else None
        self._components = [backend, model, ops]
        changes = None
        if stage is not None:
            self._components = [stage.sampler, *self._components]
            changes = processor_changes(stage.pipeline, spec, ops, self._activity)
        self._runner = ModelRunner(
            checked,
            PluginCalls(self._activity, "models", entry.source),
            attention,
            ops,
            stage,
            ranks,
            spec.device,
            self._finish_late,
        )
        parts = open_parts(spec, planned, ops, ranks, self._activity, self._prepare_again)
        self._runner.use_parts(parts)
        self._live.open(changes, parts, spec.plugins)
        self._runner.on_forward = self._on_forward
        ranks.wait_for_all()
        self._estimate = self._estimate.with_parts(parts.memory())
        info = measure(checked, spec, ranks, attention, self._estimate)
        if spec.device.type == "cuda" and self.movable_weights is None:  # level 1 moves none
            info = dataclasses.replace(info, sleep_levels=(2,))
        return dataclasses.replace(info, idle_method="idle" if parts.work_when_idle else None)

    def _plan_model(self, spec: WorkerSpec, ops: Ops, backend: AttentionBackend) -> PlannedModel:
        limit = functools.partial(share_of_memory, spec, self._ranks)
        return plan_model(spec, ops, backend, self._ranks.parallel, limit)

    def _meet(self, spec: WorkerSpec) -> None:
        def connect(
            group: str, rank: int, members: Sequence[int], among: Placement | None = spec.placement
        ) -> Communicator:
            assert among is not None
            return spec.plugins.create_for_device(
                "communicators",
                CommunicatorContext,
                group=group,
                rank=rank,
                size=len(members),
                device=spec.device,
                placement=among.of(members),
                timeout_seconds=spec.config.parallel.start_seconds,
                abort_reason=self._ranks.abort_reason,
            )

        with served_store(spec.rank, spec.placement):
            self._ranks.meet(connect, spec.place)
        if self._ranks.describe() and spec.rank == 0:
            _log.info("ranks communicate by %s", self._ranks.describe())

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the length of the longest request that the KV cache has room for."""
        self._max_model_len = max_model_len

    def set_num_states(self, num_states: int) -> None:
        """Learn how many blocks of the KV cache are states."""
        self._num_states = num_states

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and the persistent batch."""
        assert self._spec is not None
        self._use_device()
        config, attention = self._spec.config, self.runner.attention
        attention.num_states = self._num_states
        if self._estimate is not None:
            self._estimate = self._estimate.with_cache(attention.num_bytes(num_blocks))
            if self._spec.rank == 0:
                _log.info("memory: %s", self._estimate)
        with self._naming_memory():
            batch = InputBatch(
                config.scheduler.max_num_seqs,
                self._max_model_len,
                config.kv_cache.block_size,
                len(attention.groups),
                packs=self.runner.parts.packs,
                attention_defaults=attention.default_arguments,
            )
            self.runner.allocate(num_blocks, batch)
        self._num_blocks = num_blocks

    def start_parts(self, weights: str | None) -> dict[str, bytes]:
        """Give the KV cache that was allocated to the worker halves that move blocks.

        Args:
            weights: hash of the weights' content; None if another rank could not start its halves
                again: these stop.

        Returns:
            The data of each half for the engine's half, by the part's name.

        Raises:
            PluginError: a half failed.
            ConfigError: the attention backend or the model cannot identify blocks.
        """
        self._weights_hash = weights
        return self.runner.parts.start(None if weights is None else self._blocks())

    def _blocks(self) -> KVBlocks:
        """Return the KV cache for the worker halves that move blocks."""
        runner, user, spec = self.runner, self.runner.parts.moves_blocks, self._spec
        assert spec is not None
        assert user is not None, "no part moves blocks"
        assert self._weights_hash is not None, "start_parts() comes first"
        quantization = spec.config.quantization.use
        entry = spec.plugins.find("quantizations", quantization)
        identity = block_identity(
            spec,
            self._ranks.parallel,
            runner.attention,
            kv_variant=runner.model.kv_variant,
            quantization=spec.config.plugin.get(quantization if entry is None else entry.name, {}),
            weights=self._weights_hash,
            user=user,
        )
        layers = runner.block_views(user)
        sizes = tuple(sum(view.shape[1] for view in views) for views in layers)
        return KVBlocks(msgspec.structs.replace(identity, layer_bytes=sizes), layers)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None means that sampling waits for `sample_tokens`.

        Raises:
            NotImplementedError: no step part encodes the inputs of the plan, or makes drafts.
        """
        if plan.draft_token_ids or plan.encoder_inputs:
            drafts = self._spec is not None and self._spec.num_draft_tokens > 0
            encodes = self._runner is not None and (
                self._runner.parts.encodes or not self._ranks.parallel.is_first
            )  # ranks of later stages embed no tokens
            _check_supported(plan, drafts=drafts, encodes=encodes)
        if not plan.total_num_scheduled_tokens and not (self._runner and self._runner.has_batch):
            self.observed_states.drop(plan.finished_request_ids)
            return ModelRunnerOutput()  # the requests of the plan have no other state here
        if self._threads is not None:
            self._threads.adapt()
        self._use_device()
        self._settings.begin()
        try:
            return self.runner.execute(plan)
        except BaseException as error:
            self._step_failed(error)
        finally:
            self._settings.end()

    def sample_tokens(
        self,
        plan: SchedulerOutput,
        bitmask: GrammarBitmask | None = None,
    ) -> ModelRunnerOutput | None:
        """Sample the tokens of a step, from the tokens that the bitmask allows."""
        output = self.begin_sampling(plan, bitmask, overlaps=False)
        assert not isinstance(output, LateOutput)
        return output

    def begin_sampling(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        bitmask: GrammarBitmask | None = None,
        *,
        overlaps: bool = True,
    ) -> ModelRunnerOutput | LateOutput | None:
        """Sample as `sample_tokens`, without a wait for the device if nothing needs the tokens."""
        self._use_device()
        self._settings.begin()
        output = None
        try:
            output = self.runner.sample(bitmask, overlaps=overlaps)
        except BaseException as error:
            self._step_failed(error)
        finally:
            if not isinstance(output, LateOutput):
                self._settings.end()
        return output

    def _finish_late(self, finish: Callable[[], ModelRunnerOutput]) -> ModelRunnerOutput:
        """Finish the sampling of a step when its tokens have come: the end of `begin_sampling`."""
        try:
            return finish()
        finally:
            self._settings.end()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run the model on one token, without a cache."""
        self._use_device()
        self.runner.model.run_trial(1, 1)

    @torch.inference_mode()
    def idle(self) -> bool | None:
        """Let a step part do one piece of work ahead; return as `ForwardWrapper.idle`."""
        if self._runner is None:
            return None
        self._use_device()
        return StepSettings().around(self._runner.parts.idle)()

    def call_part(self, name: str, message: bytes) -> tuple[str | None, bytes]:
        """Return None and the answer of a step part's half, or kind and text of an error."""
        if self._runner is None:
            return "HardpointError", b"the worker has no model: it was closed, or sleeps"
        return StepSettings().around(self._runner.parts.call)(name, message)

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return the time and the faults of each logits processor so far, by name."""
        return {} if self._runner is None else self._runner.plugin_meters()

    def sleep(self, level: int) -> None:
        """Release memory.

        Level 1 releases the KV cache; the weights move to CPU memory, if they are not there. Level
        2 releases the model as well, and `wake_up` loads it again.
        """
        assert self._spec is not None
        self._use_device()
        if level == 1:
            if self.movable_weights is not None:
                with self._naming_memory():
                    self._moved = MovedWeights(self.movable_weights.values())
            self.runner.parts.release_blocks()
            self.runner.drop_cache()
            self.runner.parts.notify("sleep", level)
        else:
            self.runner.parts.notify("sleep", level)
            self._release()
        if self._spec.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Reallocate memory released by `sleep`: "weights", "kv_cache" or both.

        Raises:
            HardpointError: the KV cache is requested before weights that were released or moved.
        """
        self._use_device()
        if "weights" in tags:
            if self._runner is None:
                self.load_model()
            elif self._moved is not None:
                with self._naming_memory():
                    self._moved.move_back()
                self._moved = None
        if "kv_cache" not in tags:
            return
        if self._runner is None or self._moved is not None:
            level = 2 if self._runner is None else 1
            raise HardpointError(
                f"tags: expected weights before kv_cache, or both, after level {level}"
            )
        if self._runner.has_batch:
            self._runner.restore_cache(self._num_blocks)
            self._runner.parts.take_blocks(self._blocks)
            self._runner.parts.notify("wake_up")
        else:
            self.initialize_cache(self._num_blocks)

    def _prepare_again(self, loader: Callable[[], WeightLoader]) -> ReloadedModel:
        assert self._spec is not None
        ops, backend = self.runner.ops, self.runner.attention.backend
        plan = functools.partial(self._plan_model, ops=ops, backend=backend)
        return ReloadedModel(self._spec, loader, plan, self._use_model)

    def _use_model(self, planned: PlannedModel, spec: WorkerSpec) -> None:
        self._use_device()
        try:
            earlier, self._spec = self.runner.model.become(planned.checked), spec
            self.runner.parts.notify("weights_changed")
            self._components[self._components.index(earlier)] = planned.model
            if self.movable_weights is not None:
                self.movable_weights = planned.model.packed_weights()
            earlier.close()
        except BaseException as error:  # other ranks have the new weights
            self._step_failed(error)
            raise

    def close(self) -> None:
        """Release the model and the KV cache, and leave the other ranks."""
        self._profiling.close()
        self._release()
        self._ranks.close()
        self._spec = None
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def _use_device(self) -> None:
        device = self._device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    def _naming_memory(self) -> contextlib.AbstractContextManager[None]:
        return naming_memory(lambda: self._estimate)

    def _step_failed(self, error: BaseException) -> NoReturn:
        """Let the other ranks fail, too, which wait for this one; name memory if it lacks."""
        follows = isinstance(error, CommunicationAbortedError)
        failed = f"rank {self._ranks.rank} failed: {describe(error)}"
        self._ranks.abort(str(error) if follows else failed)
        with self._naming_memory():
            raise error

    def _release(self) -> None:
        if self._weight_cache is not None:
            self._weight_cache.close()
        self.movable_weights = None
        if self._moved is not None:
            self._moved = None
            release_pinned_memory()
        components, self._components = self._components, []
        runner, self._runner = self._runner, None
        with contextlib.ExitStack() as stack:  # from the last to the first
            stack.callback(close_all, components)
            stack.callback(self._live.close)
            if runner is not None:
                stack.callback(runner.forget_cache)  # others may still refer to the runner
                stack.callback(runner.parts.close)
                stack.callback(runner.parts.cache_released)

    @property
    def runner(self) -> ModelRunner:
        """The runner of the loaded model."""
        if self._runner is None:
            raise RuntimeError("the worker has no model: it was not loaded, was closed, or sleeps")
        return self._runner


def _check_supported(plan: SchedulerOutput, *, drafts: bool, encodes: bool) -> None:
    parts = {
        "verifies no drafts": {} if drafts else plan.draft_token_ids,
        "encodes no features": {} if encodes else plan.encoder_inputs,
    }
    messages = [
        f"{lack}, got some for {', '.join(request_ids)}"
        for lack, request_ids in parts.items()
        if request_ids
    ]
    if messages:
        raise NotImplementedError(f"step {plan.step}: the worker {'; it '.join(messages)}")
