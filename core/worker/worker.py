"""The worker: one device's model, cache and sampler, built from plugins."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from hardpoint.boundary.activity import Activity, PluginCalls
from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel, checked_weights
from hardpoint.boundary.errors import close_all
from hardpoint.boundary.step_part_components import Components, describe_fault
from hardpoint.boundary.worker_parts import BoundWorkerHalf, WorkerParts, opened_half
from hardpoint.core.weights.planned_model import PlannedModel, open_attention, open_ops, plan_model
from hardpoint.core.weights.shares import check_parallelism
from hardpoint.core.weights.weight_cache import WeightCache
from hardpoint.core.weights.weight_key import cache_key
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.core.worker.sampling.observed_states import ObservedStates
from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.core.worker.sampling.processor_runner import ProcessorRunner
from hardpoint.core.worker.sampling.sampling_stage import SamplingStage, warm_up
from hardpoint.errors import CommunicationAbortedError
from hardpoint.plugins import (
    GrammarBitmask,
    HardpointError,
    LogitsContext,
    Model,
    ModelError,
    ModelRunnerOutput,
    Ops,
    SamplerContext,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.parallel import Communicator, CommunicatorContext
from hardpoint.plugins.plan import DraftTokenIds
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.plugins.stats import PluginMeter
from hardpoint.plugins.step_part import (
    KVBlocks,
    LoadedModel,
    StepPartContext,
    WorkerHalfContext,
)
from hardpoint.registry.blame import describe
from hardpoint.system.memory import (
    MemoryEstimate,
    MemoryLimit,
    MovedWeights,
    cache_share,
    is_out_of_memory,
    memory_limit,
    out_of_memory,
    release_pinned_memory,
    trim_memory,
)
from hardpoint.system.threads import ComputeThreads, crowding

from .block_identity import block_identity
from .input_batch import InputBatch
from .model_runner import ModelRunner
from .padded_trial import PaddedTrial, decode_bytes, trial_bytes
from .profiling import Profiling
from .rank_store import served_store
from .ranks import Ranks

_log = logging.getLogger("hardpoint")

_TRIAL_TOKENS = 2


class LocalWorker:
    """The worker of this process: a model and its KV cache on one device.

    Attributes:
        observed_states: of logits processors, kept when the model is released.
        movable_weights: those that level 1 of sleep moves to CPU memory; None if it moves none.
    """

    def __init__(self, spec: WorkerSpec, activity: Activity | None = None) -> None:
        """Store the spec; `load_model` builds the model.

        Args:
            spec: what to build.
            activity: records the methods of plugins that run.
        """
        self._spec: WorkerSpec | None = spec
        self._device = spec.device
        self._activity = activity or Activity()
        self._runner: ModelRunner | None = None
        self._components: list[Component] = []
        self._max_model_len = spec.max_model_len
        self._num_blocks = 0
        self._bytes_per_block = 0
        self._kv_variant = ""
        self._estimate: MemoryEstimate | None = None
        self._threads: ComputeThreads | None = None
        self._weight_cache: WeightCache | None = None
        self._weights_hash: str | None = None  # once worker halves that move blocks have started
        self.movable_weights: Mapping[str, torch.Tensor] | None = None
        self._moved: MovedWeights | None = None
        self._ranks = Ranks(spec.config.parallel, spec.rank, spec.placement)
        self._profiling = Profiling(
            spec.config.engine.profile_dir,
            spec.device,
            rank=None if spec.placement is None else spec.rank,
        )
        self.observed_states = ObservedStates()

    def load_model(self) -> WorkerInfo:
        """Build the model and read its weights.

        Raises:
            ModelError: weights are missing or of the wrong shape, the device or the memory does not
                fit.
        """
        assert self._spec is not None
        spec = self._spec
        self._use_device()
        if self._threads is None and spec.device.type == "cpu":
            num_ranks = 1 if spec.placement is None else len(spec.placement.local(spec.rank))
            self._threads = ComputeThreads(spec.config.executor.threads, num_ranks=num_ranks)
            if spec.rank == 0 and (crowded := crowding(num_ranks)) is not None:
                _log.warning("%s", crowded)
        with self._naming_memory():
            return self._load_model(spec)

    def _load_model(self, spec: WorkerSpec) -> WorkerInfo:
        backend, ops = open_attention(spec), open_ops(spec)
        if spec.rank == 0:
            _log.info("operations: %s; attention: %s", ops.describe(), backend.describe())
        entry = spec.plugins.get("models", spec.model_config.architecture)
        check_parallelism(spec.plugins.target(entry), entry.source, spec.config.parallel)
        ranks = self._ranks
        if not ranks.have_met:
            self._meet(spec)
        share = plan_model(
            spec, ops, backend, ranks.parallel, lambda: _share_of_memory(spec, ranks)
        )
        model, checked, attention = share.model, share.checked, share.attention
        self._bytes_per_block = attention.bytes_per_block
        self._estimate = share.estimate
        with contextlib.closing(share.quantized):
            self._estimate.check(spec.config.model)
            # Before the weights, so that a plugin that cannot start fails early.
            stage = self._sampling(spec, ops) if ranks.is_output else None
            ranks.wait_for_all()  # so that none allocates while another still measures the memory
            with torch.inference_mode():
                self._load_weights(spec, ranks, share)
        with torch.inference_mode():
            checked.run_trial(min(_TRIAL_TOKENS, spec.max_model_len), _TRIAL_TOKENS)
            if stage is not None and spec.device.type == "cuda":
                warm_up(ops, spec.model_config.vocab_size, spec.device)
        self._kv_variant = checked.kv_variant
        self.movable_weights = model.packed_weights() if spec.device.type == "cuda" else None
        self._components = [backend, model, ops]
        if stage is not None:
            processors = [runner.processor for runner in stage.pipeline.runners]
            self._components = [*processors, stage.sampler, *self._components]
        self._runner = ModelRunner(
            checked,
            PluginCalls(self._activity, "models", entry.source),
            attention,
            ops,
            stage,
            ranks,
            {entry.name: cls for entry, cls in spec.plugins.logits_processors()},
            spec.device,
        )
        loaded = _loaded_model(spec, checked, ops, attention)
        parts = self._step_parts(spec, model.hidden_size, loaded, samples=ranks.is_output)
        parts.check_hooks(checked, ranks.parallel)
        self._runner.use_parts(parts)
        ranks.wait_for_all()
        self._estimate = self._estimate.with_parts(parts.memory())
        info = _measured(checked, spec, ranks, attention, self._estimate)
        if (
            spec.device.type == "cuda" and self.movable_weights is None
        ):  # level 1 could not move them
            info = dataclasses.replace(info, sleep_levels=(2,))
        return dataclasses.replace(info, idle_method="idle" if parts.work_when_idle else None)

    def _step_parts(
        self, spec: WorkerSpec, hidden_size: int, loaded: LoadedModel, *, samples: bool
    ) -> WorkerParts:
        """Build the worker halves of the step parts.

        Raises:
            PluginError: one cannot be built; the others are closed.
        """
        context = WorkerHalfContext(
            device=spec.device,
            rank=spec.rank,
            world_size=spec.config.parallel.world_size,
            vocab_size=spec.model_config.vocab_size,
            hidden_size=hidden_size,
            components=Components(spec.plugins, functools.partial(PluginCalls, self._activity)),
            describe_fault=describe_fault,
            host_memory=lambda: memory_limit(torch.device("cpu")).available,
            loaded=loaded,
        )
        bound: list[BoundWorkerHalf] = []
        with contextlib.ExitStack() as undo:
            for entry in spec.plugins.entries("step_parts"):
                part = spec.plugins.create(entry, StepPartContext, config=spec.config)
                calls = PluginCalls(self._activity, "step_parts", entry.source)
                if (half := opened_half(part, context, entry.source)) is None:
                    part.close()
                    continue
                bound.append(BoundWorkerHalf(part, half, calls))
                undo.callback(bound[-1].close)
            undo.pop_all()
        return WorkerParts(bound, rank=spec.rank, samples=samples)

    def _meet(self, spec: WorkerSpec) -> None:
        """Meet the other ranks."""

        def connect(group: str, rank: int, members: list[int]) -> Communicator:
            assert spec.placement is not None
            entry = spec.entry_for_device("communicators")
            return spec.plugins.create(
                entry,
                CommunicatorContext,
                group=group,
                rank=rank,
                size=len(members),
                device=spec.device,
                placement=spec.placement.of(members),
                timeout_seconds=spec.config.parallel.start_seconds,
                abort_reason=self._ranks.abort_reason,
            )

        with served_store(spec.rank, spec.placement):
            self._ranks.meet(connect)
        if self._ranks.are_many and spec.rank == 0:
            _log.info("ranks communicate by %s", self._ranks.describe())

    def _load_weights(self, spec: WorkerSpec, ranks: Ranks, share: PlannedModel) -> None:
        """Load the weights that an earlier process has packed, else those of the model's files."""
        model, checked, quantized = share.model, share.checked, share.quantized
        cache = self._weight_cache = WeightCache(spec.config.weight_cache, ranks.num_local)
        key = _cache_key(spec, model) if cache.is_on else None
        if key is not None and cache.load(key, model):
            ranks.any(True)  # the others may ask; what was not used would not have been kept
            return
        loader = spec.plugins.get("loaders", spec.loader.name)
        weights = checked_weights(spec.loader, loader.source, checked.shapes, checked.cuts)
        model.load_weights(quantized.pass_on(_checked(weights, checked.needed, spec)))
        quantized.check_used(ranks.any(quantized.is_used))
        said = quantized.describe()
        if spec.rank == 0 and said is not None:
            _log.info("matrices of few bits: %s", said)
        trim_memory()
        if key is not None and _cache_key(spec, model) == key:  # the files are the same as before
            cache.save(key, model, said)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the length of the longest request that the KV cache has room for."""
        self._max_model_len = max_model_len

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and the persistent batch."""
        assert self._spec is not None
        self._use_device()
        config = self._spec.config
        if self._estimate is not None:
            self._estimate = self._estimate.with_cache(num_blocks * self._bytes_per_block)
            if self._spec.rank == 0:
                _log.info("memory: %s", self._estimate)
        with self._naming_memory():
            batch = InputBatch(
                config.scheduler.max_num_seqs,
                self._max_model_len,
                config.kv_cache.block_size,
                len(self.runner.attention.groups),
                packs=self.runner.parts.packs,
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
        """Return the KV cache for the worker halves that move blocks.

        Raises:
            ConfigError: its blocks cannot be identified, or the backend has no views of them.
        """
        runner, user = self.runner, self.runner.parts.moves_blocks
        assert self._spec is not None
        assert user is not None, "no part moves blocks"
        assert self._weights_hash is not None, "start_parts() comes first"
        identity = block_identity(
            self._spec,
            self._ranks.parallel,
            runner.attention,
            kv_variant=self._kv_variant,
            weights=self._weights_hash,
            user=user,
        )
        return KVBlocks(identity, runner.block_views(user))

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None means that sampling waits for `sample_tokens`.

        Raises:
            NotImplementedError: the plan has encoder inputs, or drafts and no step part makes any.
        """
        if plan.draft_token_ids or plan.encoder_inputs:
            self._check_supported(plan)
        if not plan.total_num_scheduled_tokens and not (self._runner and self._runner.has_batch):
            self.observed_states.drop(plan.finished_request_ids)
            return ModelRunnerOutput()  # the requests of the plan have no other state here
        if self._threads is not None:
            self._threads.adapt()
        self._use_device()
        try:
            return self.runner.execute(plan)
        except BaseException as error:
            self._step_failed(error)
            raise

    def _check_supported(self, plan: SchedulerOutput) -> None:
        drafts = self._spec is not None and self._spec.num_draft_tokens > 0
        if messages := _unsupported(plan, drafts=drafts):
            raise NotImplementedError(f"step {plan.step}: the worker {'; it '.join(messages)}")

    def sample_tokens(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        bitmask: GrammarBitmask | None = None,
    ) -> ModelRunnerOutput | None:
        """Sample the tokens of a step whose model has run, of those that the bitmask allows."""
        self._use_device()
        try:
            return self.runner.sample(bitmask)
        except BaseException as error:
            self._step_failed(error)
            raise

    def execute_dummy_batch(self) -> None:
        """Run the model on one token, without a cache."""
        self._use_device()
        self.runner.run_dummy()

    @torch.inference_mode()
    def idle(self) -> bool | None:
        """Let a step part do one piece of work ahead; return as `WorkerHalf.idle`."""
        if self._runner is None:
            return None
        self._use_device()
        return self._runner.parts.idle()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Refuse: this worker has no speculator."""
        raise NotImplementedError("the worker makes no drafts")

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
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
            self.runner.parts.sleep(level)
        else:
            self.runner.parts.sleep(level)
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
            self._runner.parts.wake_up()
        else:
            self.initialize_cache(self._num_blocks)

    def start_profile(self) -> None:
        """Start a profile."""
        self._profiling.start()

    def stop_profile(self) -> str:
        """Stop the profile; return the file that it was written to."""
        return self._profiling.stop()

    def abort(self, reason: str) -> None:
        """Let calls that wait for other ranks fail."""
        self._ranks.abort(reason)

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
        """Make this rank's GPU the current one of the thread, as code that names none expects."""
        device = self._device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    @contextlib.contextmanager
    def _naming_memory(self) -> Iterator[None]:
        """Give an allocation of the body that fails the figures of memory."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self._name_memory(error)
            raise

    def _step_failed(self, error: BaseException) -> None:
        """Let the other ranks fail, too, which wait for this one; name memory if it lacks."""
        if self._ranks.are_many:
            follows = isinstance(error, CommunicationAbortedError)
            failed = f"rank {self._ranks.rank} failed: {describe(error)}"
            self._ranks.abort(str(error) if follows else failed)
        if isinstance(error, MemoryError | RuntimeError):
            self._name_memory(error)

    def _name_memory(self, error: Exception) -> None:
        """Raise a ModelError with the figures of memory, if an allocation has failed."""
        if is_out_of_memory(error):
            raise ModelError(f"model: {out_of_memory(error, self._estimate)}") from error

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

    def _sampling(self, spec: WorkerSpec, ops: Ops) -> SamplingStage:
        vocab_size = spec.model_config.vocab_size
        slow_seconds = spec.config.plugins.slow_seconds
        runners = []
        for entry in spec.plugins.entries("logits_processors"):
            build = functools.partial(
                spec.plugins.create,
                entry,
                LogitsContext,
                device=spec.device,
                vocab_size=vocab_size,
                max_num_seqs=spec.config.scheduler.max_num_seqs,
                ops=ops,
            )
            runners.append(
                ProcessorRunner(
                    build(),
                    entry.source,
                    spec.device,
                    spec.config.scheduler.max_num_seqs,
                    ends_engine=spec.config.plugins.on_error.get(entry.name) == "engine",
                    rebuild=build,
                    activity=self._activity,
                    slow_seconds=slow_seconds,
                )
            )
        entry = spec.plugins.one("samplers")
        sampler = spec.plugins.create(
            entry, SamplerContext, device=spec.device, vocab_size=vocab_size, ops=ops
        )
        pipeline = LogitsPipeline(runners, spec.device, self.observed_states)
        if spec.num_draft_tokens:
            pipeline.check_drafts()
        return SamplingStage(
            pipeline,
            sampler,
            spec.device,
            processed_logprobs=spec.config.sampler.logprobs == "processed",
            calls=PluginCalls(self._activity, "samplers", entry.source),
        )


def _loaded_model(
    spec: WorkerSpec, model: CheckedModel, ops: Ops, attention: CheckedAttention
) -> LoadedModel:
    """Return the model as step parts get it."""
    measure = functools.partial(
        decode_bytes,
        model,
        attention,
        spec.device,
        spec.max_model_len,
        spec.config.kv_cache.block_size,
    )
    return LoadedModel(
        model=model,
        ops=ops,
        ops_source=spec.plugins.one("ops").source,
        attention=attention,
        max_model_len=spec.max_model_len,
        decode_bytes=measure,
    )


def _share_of_memory(spec: WorkerSpec, ranks: Ranks) -> MemoryLimit:
    """Return what this rank may still allocate; the CPU ranks of one host share its memory."""
    limit = memory_limit(spec.device)
    if spec.device.type != "cpu" or ranks.num_local == 1:
        return limit
    share = f"{limit.source}, divided by {ranks.num_local} ranks"
    return MemoryLimit(limit.available // ranks.num_local, share)


def _unsupported(plan: SchedulerOutput, *, drafts: bool) -> list[str]:
    """Return what a plan has and this worker cannot serve, and for whom."""
    parts = {
        "verifies no drafts": {} if drafts else plan.draft_token_ids,
        "encodes no features": plan.encoder_inputs,
    }
    messages = [
        f"{what}, got some for {', '.join(request_ids)}"
        for what, request_ids in parts.items()
        if request_ids
    ]
    return messages


def _cache_key(spec: WorkerSpec, model: Model) -> str | None:
    """Return the key of a model's packed weights; None if they are not kept."""
    entries = [
        spec.plugins.get("loaders", spec.loader.name),
        spec.plugins.get("models", spec.model_config.architecture),
        spec.plugins.one("ops"),
        *spec.plugins.entries("quantizations"),
    ]
    components = [(e, spec.plugins.target(e)) for entry in entries for e in entry.tree()]
    return cache_key(spec.loader, model, model.context.ops, spec.config.quantization, components)


def _checked(
    weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    shapes: dict[str, tuple[int, ...]],
    spec: WorkerSpec,
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Yield the weights that the model needs, each once, after a check of a tensor's shape."""
    missing = dict(shapes)
    for name, tensor in weights:
        if (expected := missing.pop(name, None)) is None:
            continue
        if isinstance(tensor, QuantizedWeight):  # may be the whole of a part
            spec.progress("Loading weights", len(shapes) - len(missing), len(shapes))
            yield name, tensor
            continue
        if tuple(tensor.shape) != tuple(expected):
            raise ModelError(
                f"model: weight {name!r} of {spec.config.model!r} has shape "
                f"{tuple(tensor.shape)}, {spec.model_config.architecture} needs {tuple(expected)}"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"model: weight {name!r} of {spec.config.model!r} has the dtype {tensor.dtype}, "
                f"expected a floating one"
            )
        spec.progress("Loading weights", len(shapes) - len(missing), len(shapes))
        yield name, tensor
    if missing:
        names = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"model: {spec.config.model!r} lacks {len(missing)} weights: {names}")


@torch.inference_mode()
def _measured(
    model: CheckedModel,
    spec: WorkerSpec,
    ranks: Ranks,
    attention: CheckedAttention,
    estimate: MemoryEstimate,
) -> WorkerInfo:
    """Return the memory that is available for the KV cache.

    On a GPU, trial steps of the largest size are measured, one of them of decodes with the
    attention backend, so that the cache can have nearly all of the rest. On a CPU, it is what the
    limits of this process leave.
    """
    bytes_per_block = attention.bytes_per_block
    windows = tuple(group.window for group in attention.groups)
    reserved = sum(estimate.parts.values())
    if spec.device.type != "cuda":
        available = _share_of_memory(spec, ranks).available - estimate.step - reserved
        return WorkerInfo(bytes_per_block, max(available, 0), windows=windows)
    max_num_seqs, padded = spec.config.scheduler.max_num_seqs, None
    tokens = min(spec.config.scheduler.max_num_batched_tokens, spec.max_model_len)
    if attention.pads and not ranks.are_many:  # where one fails, others would wait for it
        padded = PaddedTrial(
            model,
            attention,
            spec.device,
            num_seqs=max_num_seqs,
            max_model_len=spec.max_model_len,
            block_size=spec.config.kv_cache.block_size,
        )
    num_rows = max_num_seqs * (1 + spec.num_draft_tokens)
    peak = trial_bytes(model, spec.device, tokens, num_rows, padded)
    del padded
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(spec.device)[0])
    share = cache_share(spec.device)
    available = max(free - peak - reserved, 0)
    return WorkerInfo(bytes_per_block, available, share, windows=windows)
