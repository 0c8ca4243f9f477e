"""A loaded model of a rank: the memory that it leaves, and what step parts get of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import torch

from hardpoint.core.weights.planned_model import PlannedModel
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.checked_model import CheckedModel, is_replayable
from hardpoint.host.boundary.parts.components import Components, describe_fault
from hardpoint.host.boundary.parts.opening import open_worker_parts
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.host.boundary.trial_steps import PaddedTrial, decode_bytes, trial_bytes
from hardpoint.host.registry.blame import close_if_failed
from hardpoint.host.system.memory import (
    MemoryEstimate,
    MemoryLimit,
    cache_share,
    is_out_of_memory,
    memory_limit,
    out_of_memory,
)
from hardpoint.plugins import ConfigError, ModelError, Ops, WeightLoader, WorkerInfo
from hardpoint.plugins.step_part.worker import PreparedModel
from hardpoint.plugins.worker_half import LoadedModel, WorkerHalfContext

from .ranks import Ranks
from .sequence_model import model_opener

_log = logging.getLogger("hardpoint")


def share_of_memory(spec: WorkerSpec, ranks: Ranks) -> MemoryLimit:
    """Return the memory that this rank may still allocate; CPU ranks of one host share theirs.

    So do engines of one host that are loading at the same time.
    """
    limit = memory_limit(spec.device)
    shared = {"ranks": ranks.num_local, "engines": spec.place.num_sharing}
    if spec.device.type != "cpu":
        return limit
    for what, count in shared.items():
        if count > 1:
            share = f"{limit.source}, divided by {count} {what}"
            limit = MemoryLimit(limit.available // count, share)
    return limit


@contextlib.contextmanager
def naming_memory(estimate: Callable[[], MemoryEstimate | None]) -> Iterator[None]:
    """Give an allocation of the body that fails the figures of memory.

    Raises:
        ModelError: in the place of the allocation's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ModelError(f"model: {out_of_memory(error, estimate())}") from error
        raise


@torch.inference_mode()
def measure(
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
    info = attention.worker_info()
    reserved = sum(estimate.parts.values())
    if spec.device.type != "cuda":
        available = share_of_memory(spec, ranks).available - estimate.step - reserved
        return dataclasses.replace(info, available_bytes=max(available, 0))
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
    return dataclasses.replace(info, available_bytes=available, cache_share=share)


def open_parts(
    spec: WorkerSpec,
    planned: PlannedModel,
    ops: Ops,
    ranks: Ranks,
    activity: Activity,
    prepare_again: Callable[[Callable[[], WeightLoader]], PreparedModel],
) -> WorkerParts:
    """Build the worker halves of the step parts.

    Args:
        spec: spec of the worker.
        planned: the loaded model.
        ops: operations of its layers.
        ranks: the ranks of the model.
        activity: records the methods that run.
        prepare_again: see `LoadedModel`.

    Raises:
        PluginError: one cannot be built, or changes layers that the model does not let it
            change; all are closed.
    """
    context = WorkerHalfContext(
        device=spec.device,
        rank=spec.rank,
        world_size=spec.config.parallel.world_size,
        vocab_size=spec.model_config.vocab_size,
        hidden_size=planned.model.hidden_size,
        components=Components(spec.plugins, functools.partial(PluginCalls, activity)),
        describe_fault=describe_fault,
        host_memory=lambda: memory_limit(torch.device("cpu")).available,
        loaded=_loaded_model(spec, planned, ops, prepare_again),
        open_model=model_opener(spec),
        num_draft_tokens=spec.num_draft_tokens,
    )
    samples = ranks.is_output
    parts = open_worker_parts(spec.plugins, spec.for_parts, context, activity, samples=samples)
    with contextlib.ExitStack() as undo:
        close_if_failed(undo, parts.close)
        parts.check_hooks(planned.checked, ranks.parallel)
        if spec.num_draft_tokens and samples and parts.verifier is None:
            raise ConfigError(
                "plugins: a step part drafts tokens, and none verifies drafts; expected one whose "
                'worker half has verify_drafts, such as "speculation"'
            )
        undo.pop_all()
    return parts


def _loaded_model(
    spec: WorkerSpec,
    planned: PlannedModel,
    ops: Ops,
    prepare_again: Callable[[Callable[[], WeightLoader]], PreparedModel],
) -> LoadedModel:
    model, attention = planned.checked, planned.attention
    place = spec.device, spec.max_model_len, spec.config.kv_cache.block_size
    ops_source = spec.plugins.one("ops").source
    replayable = (
        (ops_source, is_replayable(ops)),
        (model.source, model.is_replayable),
        (attention.source, attention.is_replayable),
    )
    return LoadedModel(
        model=model,
        ops=ops,
        ops_source=ops_source,
        attention_source=attention.source,
        pads=attention.pads,
        num_groups=len(attention.groups),
        unreplayable=[source for source, is_declared in replayable if not is_declared],
        max_model_len=spec.max_model_len,
        decode_bytes=functools.partial(decode_bytes, model, attention, *place),
        matrices=model.hooks.matrices,
        classify=model.classify if planned.model.classifies else None,
        loader=spec.loader,
        prepare_again=prepare_again,
    )
