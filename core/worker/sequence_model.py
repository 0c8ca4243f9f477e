"""A further model in a worker, with a KV cache of its own, for plugins that run one themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import msgspec
import numpy as np
import torch

from hardpoint.core.weights.planned_model import (
    load_weights,
    open_attention,
    open_ops,
    plan_model,
)
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import ModelError
from hardpoint.host.boundary.text_guards import open_tokenizer
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.system.memory import memory_limit
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.plugins import AttentionStep, EngineConfig, ForwardBatch, ModelFiles
from hardpoint.plugins.device import to_device
from hardpoint.plugins.parallel import Parallel

_TRIAL_TOKENS = 8

_log = logging.getLogger("hardpoint")


class LoadedSequences:
    """Sequences of a model by name; see `SequenceModel`."""

    def __init__(self, spec: WorkerSpec, num_tokens: int) -> None:
        """Load the model.

        Args:
            num_tokens: tokens of all sequences together.

        Raises:
            ModelError: the model or its cache does not fit, or weights are missing.
        """
        size = spec.config.kv_cache.block_size
        self.vocab_size = spec.model_config.vocab_size
        self.max_model_len = spec.max_model_len
        self._device, self._block_size = spec.device, size
        self._num_blocks = -(-num_tokens // size)
        backend, self._ops = open_attention(spec), open_ops(spec)
        planned = plan_model(
            spec, self._ops, backend, Parallel(), lambda: memory_limit(spec.device)
        )
        self._model, self._attention = planned.checked, planned.attention
        if self._attention.states is not None:
            raise ModelError(
                f"model: {spec.config.model!r} keeps states in some layers, which a further model "
                f"in a worker cannot; expected one with attention in all layers"
            )
        self.cache_bytes = self._num_blocks * self._attention.bytes_per_block
        self._components = [backend, planned.model, self._ops]
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with contextlib.closing(planned.quantized):
                needed = planned.estimate.weights + self.cache_bytes
                if needed > planned.estimate.limit.available:
                    raise ModelError(
                        f"model: {spec.config.model!r} and its cache of {num_tokens} tokens need "
                        f"{needed} bytes, {planned.estimate.limit.available} are available"
                    )
                load_weights(spec, planned, WeightCache(spec.config.weight_cache), bool)
            with torch.inference_mode():
                self._model.run_trial(min(_TRIAL_TOKENS, self.max_model_len), 1)
            undo.pop_all()
        self.wake_up()

    def wake_up(self) -> None:
        """Allocate the cache; there are no sequences."""
        self._caches = self._attention.allocate(self._num_blocks)
        self._free = list(range(self._num_blocks))[::-1]
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def sleep(self) -> None:
        """Release the cache."""
        self._caches = []

    def length(self, name: str) -> int:
        """Return the number of tokens of a sequence; 0 if there is none."""
        return self._lengths.get(name, 0)

    def reserve(self, name: str, count: int) -> bool:
        """Return whether a sequence can get so many more tokens; the room is its own then."""
        length, held = self.length(name) + count, len(self._blocks.get(name, ()))
        missing = max(0, -(-length // self._block_size) - held)
        if length > self.max_model_len or missing > len(self._free):
            return False
        self._blocks.setdefault(name, []).extend(self._free.pop() for _ in range(missing))
        return True

    def cut(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`; all of them with 0."""
        if length <= 0:
            self._lengths.pop(name, None)
        elif name in self._lengths:
            self._lengths[name] = min(length, self._lengths[name])
        held = self._blocks.get(name, [])
        kept = -(-max(length, 0) // self._block_size)
        self._free += held[kept:][::-1]
        del held[kept:]
        if not held:
            self._blocks.pop(name, None)

    @torch.inference_mode()
    def extend(self, token_ids: Mapping[str, Sequence[int]]) -> torch.Tensor:
        """Append tokens to sequences; return the logits after each, float32 [sequences, vocab].

        Raises:
            ValueError: no tokens for a sequence, or more than there is room for.
        """
        names = sorted(token_ids, key=lambda name: len(token_ids[name]) > 1)  # one token first
        starts = np.zeros(len(names) + 1, dtype=np.int64)
        lens = np.zeros(len(names), dtype=np.int64)
        for row, name in enumerate(names):
            count = len(token_ids[name])
            if not count or not self.reserve(name, count):
                raise ValueError(f"{name}: {count} tokens, for which there is no room")
            lens[row] = self._lengths[name] = self.length(name) + count
            starts[row + 1] = starts[row] + count
        batch = self._batch(names, token_ids, starts, lens)
        hidden = self._model.forward(batch)
        order = {name: row for row, name in enumerate(names)}
        rows = [int(starts[order[name] + 1]) - 1 for name in token_ids]
        last = to_device(rows, self._device)
        return self._model.compute_logits(hidden[last]).to(torch.float32, copy=True)

    def _batch(
        self,
        names: Sequence[str],
        token_ids: Mapping[str, Sequence[int]],
        starts: np.ndarray[Any, np.dtype[np.int64]],
        lens: np.ndarray[Any, np.dtype[np.int64]],
    ) -> ForwardBatch:
        """Return the inputs of a step.

        Args:
            names: sequences, those with one token first.
            token_ids: new tokens of each.
            starts: first token of each sequence, and the number of all tokens.
            lens: length of each sequence, the new tokens included.
        """
        size = self._block_size
        table = np.zeros((len(names), -(-int(lens.max()) // size)), dtype=np.int64)
        positions = np.empty(int(starts[-1]), dtype=np.int64)
        slots = np.empty_like(positions)
        for row, (name, (start, end)) in enumerate(zip(names, pairwise(starts), strict=True)):
            held = np.asarray(self._blocks[name], dtype=np.int64)
            table[row, : len(held)] = held[: table.shape[1]]  # more of them may be reserved
            own = np.arange(lens[row] - (end - start), lens[row])
            positions[start:end] = own
            slots[start:end] = held[own // size] * size + own % size
        ids = [token for name in names for token in token_ids[name]]
        step = AttentionStep(
            query_starts=starts,
            seq_lens=lens,
            num_single=sum(len(token_ids[name]) == 1 for name in names),
            block_table=to_device(table, self._device),
            slots=to_device(slots, self._device),
            block_size=size,
        )
        attend = self._attention.of_step(self._caches, [step])
        place = self._device
        return ForwardBatch(to_device(ids, place, torch.int64), to_device(positions, place), attend)

    def close(self) -> None:
        """Close the model and its backends."""
        with contextlib.ExitStack() as stack:
            for component in self._components:
                stack.callback(component.close)


def model_opener(spec: WorkerSpec) -> Callable[..., LoadedSequences]:
    """Return the function by which plugins of a worker open a further model.

    Args:
        spec: spec of the worker; its settings hold for the further model, too.
    """

    def open_model(
        model: str,
        num_tokens: int,
        *,
        vocab_size: int | None = None,
        same_tokens: bool = False,
    ) -> LoadedSequences:
        assert spec.prepare is not None, "the worker's spec was made by hand"
        further = spec.prepare(_config_of(spec.config, model))
        own = further.model_config.vocab_size
        if vocab_size is not None and own != vocab_size:
            raise ModelError(
                f"model: {model!r} has a vocabulary of {own} tokens, expected {vocab_size}, that "
                f"of {spec.config.model!r}"
            )
        if same_tokens:
            _check_tokens(spec, further)
        return LoadedSequences(further, num_tokens)

    return open_model


def _check_tokens(spec: WorkerSpec, further: WorkerSpec) -> None:
    path = spec.config.tokenizer.path
    own = find_files(path, "tokenizer.path") if path else spec.loader.context.files
    files = further.loader.context.files
    if own.path == files.path:
        return
    try:
        tokens, others = _tokens_of(spec, own), _tokens_of(spec, files)
    except (ModelError, NotImplementedError) as cause:
        _log.warning("the tokens of %s and %s are not compared: %s", own.name, files.name, cause)
        return
    if tokens == others:
        return
    pairs = enumerate(zip_longest(tokens, others, fillvalue=b""))
    token, (one, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    raise ModelError(
        f"model: {further.config.model!r} has another tokenizer: its token {token} is "
        f"{_text_of(other)}, that of {spec.config.model!r} is {_text_of(one)}"
    )


def _tokens_of(spec: WorkerSpec, files: ModelFiles) -> Sequence[bytes]:
    """Return the bytes of each token of a tokenizer.

    Raises:
        ModelError: there is no tokenizer.
        NotImplementedError: it has no vocabulary.
    """
    entry, size = spec.plugins.one("tokenizers"), spec.model_config.vocab_size
    with contextlib.closing(open_tokenizer(spec.plugins, entry, files, size)) as tokenizer:
        return tokenizer.vocabulary().tokens


def _text_of(token: bytes) -> str:
    return repr(token.decode(errors="backslashreplace")) if token else "none"


def _config_of(config: EngineConfig, model: str) -> EngineConfig:
    replace = msgspec.structs.replace
    kv_cache = replace(config.kv_cache, dtype="auto", num_blocks=None, window_groups=False)
    return replace(config, model=model, dtype="auto", max_model_len=None, kv_cache=kv_cache)
