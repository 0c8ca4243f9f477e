"""The models of a rank: free memory, the contexts of step parts, and auxiliary models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from hardpoint.core.weights.planned_model import (
    PlannedModel,
    load_weights,
    open_attention,
    open_ops,
    plan_model,
)
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import size_text
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.checked_model import CheckedModel, is_replayable
from hardpoint.host.boundary.errors import attribute_error, close_all, error_of, kind_of
from hardpoint.host.boundary.layers.groups import LayerGroups
from hardpoint.host.boundary.parts.components import Components, describe_fault
from hardpoint.host.boundary.parts.opening import open_worker_parts
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.host.boundary.text_guards import open_tokenizer
from hardpoint.host.boundary.trial_steps import decode_bytes, padded_step, trial_bytes
from hardpoint.host.registry.blame import close_if_failed, raise_unless_fault
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.system.memory import (
    MemoryEstimate,
    MemoryLimit,
    cache_share,
    is_out_of_memory,
    memory_limit,
    out_of_memory,
)
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    ModelError,
    ModelFiles,
    Ops,
    WeightLoader,
    WorkerInfo,
)
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.step_part.worker import DraftingHead, MainModel, PreparedModel
from hardpoint.plugins.worker_half import LoadedModel, WorkerHalfContext
from hardpoint.toolkit.kv_blocks.releases import check_attention
from hardpoint.toolkit.workers.sequences import LoadedSequences, main_sequences

from .ranks import Ranks

_SEQUENCE_TRIAL = 8  # tokens
_RELOAD_TRIAL = 2  # tokens and rows

_log = logging.getLogger("hardpoint")


def share_of_memory(spec: WorkerSpec, ranks: Ranks) -> MemoryLimit:
    """Return the memory that this rank may still allocate; CPU ranks of one host share theirs.

    So do engines of one host that are loading at the same time.
    """
    limit = memory_limit(spec.device)
    shared = {"ranks": ranks.num_local, "engines": spec.place.num_sharing}
    if spec.device.type != "cpu":
        return limit
    for sharers, count in shared.items():
        if count > 1:
            share = f"{limit.source}, divided by {count} {sharers}"
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
        block_size = spec.config.kv_cache.block_size
        padded = padded_step(attention, spec.device, spec.max_model_len, block_size, max_num_seqs)
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
        prepare_again: see `LoadedModel`.

    Raises:
        PluginError: one cannot be built, or changes layers that the model does not let it
            change; all are closed.
        ModelError: the attention backend has no weights for a half that reads them.
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
        open_model=_model_opener(spec, planned),
        open_head=functools.partial(_open_head, spec, planned.attention, ops),
        num_draft_tokens=spec.num_draft_tokens,
        num_layers=len(planned.checked.specs),
    )
    samples = ranks.is_output
    parts = open_worker_parts(spec.plugins, spec.for_parts, context, activity, samples=samples)
    with contextlib.ExitStack() as undo:
        close_if_failed(undo, parts.close)
        parts.check_hooks(planned.checked, ranks.parallel)
        entries, target = spec.plugins.entries("step_parts"), spec.plugins.target
        releasing = [entry.source for entry in entries if target(entry).releases_blocks]
        reading = [h.source for h in parts.halves if h.overrides("take_attention_weights")]
        check_attention(releasing, reading, planned.attention, spec.max_model_len)
        if spec.num_draft_tokens and samples and parts.verifier is None:
            raise ConfigError(
                "plugins: a step part drafts tokens, and none verifies drafts; enable a part with "
                'verify_drafts, such as "speculation"'
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


def _open_head(
    spec: WorkerSpec,
    attention: CheckedAttention,
    ops: Ops,
    model: str | MainModel,
    architecture: str = "",
) -> DraftingHead:
    """Load a drafting head, as `HeadOpener`, and add its attention layers to the main model's."""
    if (size := spec.config.parallel.world_size) > 1:
        raise ModelError(f"model: expected one rank for a drafting head, got {size}")
    head = spec
    if isinstance(model, str):
        assert spec.prepare is not None, "the worker's spec was made by hand"
        head = spec.prepare(_config_of(spec.config, model))
    config = head.model_config
    if architecture:
        config = dataclasses.replace(config, architecture=architecture, implementation="")
    dtype, max_model_len = spec.dtype, spec.max_model_len
    head = dataclasses.replace(head, model_config=config, dtype=dtype, max_model_len=max_model_len)
    limit = functools.partial(memory_limit, spec.device)
    planned = plan_model(head, ops, attention.backend, Parallel(), limit)
    with contextlib.ExitStack() as undo:
        undo.callback(planned.model.close)
        _read_weights(head, planned, "model")
        first_layer = attention.add_layers(planned.checked.specs)
        undo.pop_all()
    return DraftingHead(planned.model, head.loader, first_layer)


def _open_sequences(spec: WorkerSpec, num_tokens: int) -> LoadedSequences:
    """Load a further model, with a KV cache for so many tokens of all sequences together."""
    backend, ops = open_attention(spec), open_ops(spec)
    planned = plan_model(spec, ops, backend, Parallel(), lambda: memory_limit(spec.device))
    attention, size = planned.attention, spec.config.kv_cache.block_size
    if attention.states is not None:
        raise ModelError(
            f"model: {spec.config.model!r} keeps states in some layers, which a further model "
            f"in a worker cannot; expected one with attention in all layers"
        )
    num_blocks = -(-num_tokens // size)
    cache_bytes = num_blocks * attention.bytes_per_block
    close = functools.partial(close_all, [backend, planned.model, ops])
    with contextlib.ExitStack() as undo:
        undo.callback(close)
        _read_weights(spec, planned, "model", cache_bytes)
        with torch.inference_mode():
            planned.checked.run_trial(min(_SEQUENCE_TRIAL, spec.max_model_len), 1)
        undo.pop_all()
    return LoadedSequences(planned.checked, attention, num_blocks, close, **_sizes(spec))


def _sizes(spec: WorkerSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.model_config.vocab_size,
        "max_model_len": spec.max_model_len,
        "block_size": spec.config.kv_cache.block_size,
        "device": spec.device,
    }


def _model_opener(spec: WorkerSpec, planned: PlannedModel) -> Callable[..., LoadedSequences]:
    """Return the function by which plugins of a worker open a further model.

    Args:
        spec: spec of the worker; its settings hold for the further model, too.
    """

    checked, attention = planned.checked, planned.attention  # not the model: it is replaced
    rotate = planned.model.context.ops.rotate

    def open_model(
        model: str | MainModel,
        num_tokens: int,
        *,
        vocab_size: int | None = None,
        same_tokens: bool = False,
        num_layers: int | None = None,
    ) -> LoadedSequences:
        if not isinstance(model, str):
            specs, states = checked.specs[:num_layers], attention.states
            groups = LayerGroups.single(len(specs))  # the groups of the engine share caches
            backend = attention.backend, attention.source
            return main_sequences(
                checked,
                CheckedAttention(*backend, specs, groups, rotate, states),
                num_tokens,
                num_ranks=spec.config.parallel.world_size,
                available=memory_limit(spec.device).available,
                num_layers=num_layers,
                max_layers=len(checked.specs),
                **_sizes(spec),
            )
        if num_layers is not None:
            raise ModelError(f"num_layers: expected None for {model!r}, got {num_layers}")
        assert spec.prepare is not None, "the worker's spec was made by hand"
        further = spec.prepare(_config_of(spec.config, model))
        further_size = further.model_config.vocab_size
        if vocab_size is not None and further_size != vocab_size:
            raise ModelError(
                f"model: {model!r} has a vocabulary of {further_size} tokens, expected "
                f"{vocab_size}, as {spec.config.model!r} has"
            )
        if same_tokens:
            _check_tokens(spec, further)
        return _open_sequences(further, num_tokens)

    return open_model


def _check_tokens(spec: WorkerSpec, further: WorkerSpec) -> None:
    path = spec.config.tokenizer.path
    main = find_files(path, "tokenizer.path") if path else spec.loader.context.files
    files = further.loader.context.files
    if main.path == files.path:
        return
    try:
        tokens, others = _tokens_of(spec, main), _tokens_of(spec, files)
    except (ModelError, NotImplementedError) as cause:
        _log.warning("the tokens of %s and %s are not compared: %s", main.name, files.name, cause)
        return
    if tokens == others:
        return
    pairs = enumerate(zip_longest(tokens, others, fillvalue=b""))
    token, (expected, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    raise ModelError(
        f"model: {further.config.model!r} has another tokenizer: its token {token} is "
        f"{_text_of(other)}, in {spec.config.model!r} it is {_text_of(expected)}"
    )


def _tokens_of(spec: WorkerSpec, files: ModelFiles) -> Sequence[bytes]:
    """Return the bytes of each token of a tokenizer."""
    entry, size = spec.plugins.one("tokenizers"), spec.model_config.vocab_size
    with contextlib.closing(open_tokenizer(spec.plugins, entry, files, size)) as tokenizer:
        return tokenizer.vocabulary().tokens


def _text_of(token: bytes) -> str:
    return repr(token.decode(errors="backslashreplace")) if token else "none"


def _config_of(config: EngineConfig, model: str) -> EngineConfig:
    replace = msgspec.structs.replace
    kv_cache = replace(config.kv_cache, dtype="auto", num_blocks=None, window_groups=False)
    return replace(config, model=model, dtype="auto", max_model_len=None, kv_cache=kv_cache)


class ReloadedModel:
    """The share of a rank of the model with other weights; see the contract's `PreparedModel`.

    Args:
        plan: builds the model without weights.
        use: lets the worker run with the model; the spec describes it then.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        loader: Callable[[], WeightLoader],
        plan: Callable[[WorkerSpec], PlannedModel],
        use: Callable[[PlannedModel, WorkerSpec], None],
    ) -> None:
        self._spec = dataclasses.replace(spec, progress=no_progress)
        self._loader, self._plan, self._use = loader, plan, use
        self._planned: PlannedModel | None = None

    def read(self) -> None:
        """Build the model, read its weights and try it; in any thread.

        Raises:
            ModelError: weights are missing or wrong, or memory is short.
            HardpointError: a plugin failed.
        """
        try:
            self._spec = dataclasses.replace(self._spec, loader=self._loader())
            self._planned = self._load(self._spec)
        except BaseException as error:
            raise_unless_fault(error)
            if is_out_of_memory(error):
                raise ModelError(f"weights: memory is short: {error}") from error
            named = attribute_error(error, self._spec.plugins)
            raise error_of(kind_of(named), str(named)) from error

    def _load(self, spec: WorkerSpec) -> PlannedModel:
        planned = self._plan(spec)
        with contextlib.ExitStack() as undo:
            undo.callback(planned.model.close)
            # No file of the cache for each of the many versions of a training.
            _read_weights(spec, planned, "weights", path="off")
            # Calls among ranks would mix with those of the steps that run.
            if (among := planned.model.context.parallel).tensor.size == among.engines.size == 1:
                with torch.inference_mode():
                    planned.checked.run_trial(min(_RELOAD_TRIAL, spec.max_model_len), _RELOAD_TRIAL)
            undo.pop_all()
        return planned

    def use(self) -> None:
        """Let the worker run with the model from the next step on."""
        planned, self._planned = self._planned, None
        assert planned is not None, "read() comes first"
        self._use(planned, self._spec)

    def close(self) -> None:
        """Release the model, unless it is in use."""
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.model.close()


def _read_weights(
    spec: WorkerSpec, planned: PlannedModel, field: str, cache_bytes: int = 0, **cache: str
) -> None:
    """Read the weights of a further model, if the memory has room for them and a KV cache."""
    with contextlib.closing(planned.quantized):
        needed, limit = planned.estimate.weights + cache_bytes, planned.estimate.limit
        if needed > limit.available:
            raise ModelError(
                f"{field}: {size_text(needed)} are needed in addition to the current ones, "
                f"{size_text(limit.available)} are available ({limit.source})"
            )
        weight_cache = WeightCache(msgspec.structs.replace(spec.config.weight_cache, **cache))
        load_weights(spec, planned, weight_cache, bool)
