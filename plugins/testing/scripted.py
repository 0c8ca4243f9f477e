"""The scripted model: logits are a pure function of the token history.

The engine around it is real: blocks, batches, scheduling, sampling, detokenization. Its arithmetic
is exact, so a request must give the same tokens, bit for bit, alone and in any batch; a token read
from a wrong block changes every token after it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardpoint import typed
from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import (
    AttentionBackend,
    AttentionStep,
    EngineConfig,
    ForwardBatch,
    KVSpec,
    Model,
    ModelContext,
)
from hardpoint.plugins.executor import WorkerProcess
from hardpoint.toolkit.layers import over_engines

from .scripted_tokenizer import ByteTokens

EOS = 256
"""End-of-sequence token of the scripted model; tokens 0 to 255 stand for one byte each."""

HISTORY_MODULUS = 2**31 - 1
HISTORY_BASE = 1_000_003
_SHORT = 64  # tokens of a history that is hashed one by one


def history_hash(tokens: Iterable[int]) -> int:
    """Return a hash below 2**31 of a token history."""
    value = 0
    for token in tokens:
        value = (value * HISTORY_BASE + token + 1) % HISTORY_MODULUS
    return value


class HistoryAttention(AttentionBackend[torch.Tensor, AttentionStep]):
    """Stores token ids as keys; "attends" by hashing every token up to the query's own."""

    contract = 1
    kv_layout = "scripted[blocks, block_size]"
    devices = ("cpu",)
    reports_weights = True

    def bytes_per_block(self, spec: KVSpec) -> int:  # noqa: ARG002
        """Return the bytes of one block."""
        return self.context.block_size * 8

    def allocate(self, spec: KVSpec, num_blocks: int) -> torch.Tensor:  # noqa: ARG002
        """Return int64 [blocks, block_size]."""
        return torch.zeros(num_blocks, self.context.block_size, dtype=torch.int64)

    def block_views(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Return the token ids of each block as bytes."""
        return [cache.view(torch.uint8)]

    def plan(self, step: AttentionStep) -> AttentionStep:
        """Return the step."""
        return step

    def attend(
        self,
        spec: KVSpec,  # noqa: ARG002
        cache: torch.Tensor,
        plan: AttentionStep,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Store the token ids in `k`, then return each query's history hash as two numbers."""
        cache.view(-1)[plan.slots] = k[:, 0, 0].long()
        starts, hashes = plan.query_starts.tolist(), []
        for index, length in enumerate(plan.seq_lens.tolist()):
            blocks = plan.block_table[index, : -(-length // plan.block_size)]
            history = cache[blocks].view(-1)[:length].numpy()
            before = length - (starts[index + 1] - starts[index])
            first = history[:before]
            value = history_hash(first.tolist()) if before < _SHORT else _hash_of(first)
            for token in history[before:].tolist():
                value = (value * HISTORY_BASE + token + 1) % HISTORY_MODULUS
                hashes.append((value >> 16, value & 0xFFFF))
        result = torch.empty_like(q)
        if hashes:
            result[: len(hashes), 0, :2] = torch.tensor(hashes, dtype=q.dtype, device=q.device)
        return result

    def attention_weights(
        self,
        spec: KVSpec,
        cache: torch.Tensor,  # noqa: ARG002
        step: AttentionStep,
        sequence: int,
        q: torch.Tensor,
    ) -> torch.Tensor:
        """Return even weights: a query attends alike to all tokens that it sees."""
        length = int(step.seq_lens[sequence])
        seen = torch.arange(length - len(q), length)[:, None] + 1
        weights = (torch.arange(length) < seen).float() / seen
        return weights.sum(0).expand(spec.num_heads, length)


def _hash_of(tokens: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    powers = _powers_up_to(1 << max(len(tokens) - 1, 0).bit_length())[: len(tokens)]
    # Each product is below 2**62, and so is the sum of 2**31 remainders.
    products = (tokens + 1) % HISTORY_MODULUS * powers[::-1] % HISTORY_MODULUS
    return int(products.sum()) % HISTORY_MODULUS


@functools.lru_cache(maxsize=32)
def _powers_up_to(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    powers = np.ones(count, np.int64)
    for place in range(1, count):
        powers[place] = int(powers[place - 1]) * HISTORY_BASE % HISTORY_MODULUS
    return powers


class ScriptedModel(Model):
    """Follows `replies` from the checkpoint's configuration, else pseudo-random logits.

    A history that starts with a reply's prompt is continued with that reply, then EOS; what
    follows any other history is a fixed pseudo-random function of it and of `seed`, one of the
    tokens `likely` where the configuration has some.

    Ranks that share it give the same logits as one, bit for bit, and others if the parts of one
    rank get lost, or to a wrong rank. Each stage has a layer, which attends to the whole history;
    the ranks of a stage divide the vocabulary, and each adds a part to the hidden states.
    """

    contract = 1
    parallelism = ("tensor", "pipeline", "expert")
    hidden_size = 2

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        hf = context.config.hf
        self._seed = int(hf.get("seed", 0))
        self._likely = torch.tensor(hf.get("likely", []), dtype=torch.int64)
        self._vocab_size = context.config.vocab_size
        self._launch_forward = getattr(context.ops, "launch_forward", lambda: None)
        self._next: dict[int, int] = {}
        for prompt, reply in hf.get("replies", []):
            for length, token in enumerate([*reply, EOS]):
                self._next[history_hash([*prompt, *reply[:length]])] = token

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return none: there are no weights."""
        return {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check that there are no weights."""
        for name, _ in weights:
            raise ValueError(f"the scripted model has no weight {name!r}")

    def kv_specs(self) -> list[KVSpec]:
        """Return one layer of one head of two elements; every stage has one."""
        return [KVSpec(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return float32 [tokens, 2]: the high and the low 16 bits of each history's hash."""
        self._launch_forward()
        # Whole numbers below 2**24 are exact in float32.
        hooks, ids = self.context.hooks, self._embedded(batch.token_ids)
        ids = ids.to(self.context.dtype).view(-1, 1).expand(-1, 2)
        if hooks.embedded is not None:
            ids = hooks.embedded(ids)
        if hooks.linear is not None:
            ids = hooks.linear([("scripted", 2)], ids, ids.clone())
        ids = ids.unsqueeze(1)
        hidden = self._summed(self._of_engines(batch.attend(0, ids, ids, ids).reshape(-1, 2)))
        if batch.hidden is None:
            return hidden
        # The layer before has the same result, but if it is another one, so is this.
        return 2 * batch.hidden - hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocab] in [0, 8), or 100 for the scripted token."""
        tensor = self.context.parallel.tensor
        share = self.context.parallel.padded_share(self._vocab_size)
        parts = hidden.long()
        values = (parts[:, :1] << 16) + parts[:, 1:]
        state = values + self._seed * 7_919
        tokens = torch.arange(share.start, share.start + -(-self._vocab_size // tensor.size))
        mixed = (state * 48_271 + tokens * 69_621) % HISTORY_MODULUS
        mixed = (mixed * 16_807 + 11) % HISTORY_MODULUS
        logits = (mixed % 65_536).float() / 8_192
        likely = self._likely[(self._likely >= share.start) & (self._likely < share.stop)]
        logits[:, likely - share.start] += 16.0
        for row, value in enumerate(values.view(-1).tolist()):
            token = self._next.get(value)
            if token is not None and token in share:
                logits[row, token - share.start] = 100.0
        if tensor.size == 1:
            return logits
        gathered = tensor.all_gather(logits)  # [ranks, rows, part of the vocabulary]
        return gathered.transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        tensor = self.context.parallel.tensor
        if tensor.size == 1:
            return token_ids
        share = self.context.parallel.padded_share(self._vocab_size)
        is_elsewhere = (token_ids < share.start) | (token_ids >= share.stop)
        return tensor.all_reduce(token_ids.masked_fill(is_elsewhere, 0))

    def _of_engines(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, 2] as the sum of a part of each engine that has experts."""
        engines = self.context.parallel.engines
        if engines.size == 1:
            return x

        def part(x: torch.Tensor, _chosen: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
            return (x + engines.rank).div(engines.size, rounding_mode="floor")

        weights = x.new_ones(len(x), 1)
        return over_engines(engines, part, x, weights.long(), weights)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, 2] as the sum of a part of each rank of the stage."""
        tensor = self.context.parallel.tensor
        if tensor.size == 1:
            return x
        part = (x + tensor.rank).div(tensor.size, rounding_mode="floor")  # they add up to x
        if not self.context.parallel.expert:
            return tensor.all_reduce(part)
        # Each rank sums the parts of some of the tokens, as experts get tokens of all ranks.
        rows = -(-len(x) // tensor.size)
        padded = part.new_zeros(tensor.size * rows, 2)
        padded[: len(x)] = part
        received = tensor.all_to_all(padded.view(tensor.size, rows, 2))
        return tensor.all_gather(received.sum(0)).flatten(0, 1)[: len(x)]


@dataclass
class ScriptedClock:
    """A clock that tests advance; every reading advances it by `tick` seconds too."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


def write_scripted_model(
    folder: Path,
    replies: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
    max_position_embeddings: int = 512,
    special_tokens: Sequence[str] = (),
    likely: str = "",
) -> Path:
    """Write a checkpoint folder of the scripted model, byte-level tokenizer included.

    Args:
        folder: created if it does not exist.
        replies: prompt text to the text that follows it.
        seed: selects the pseudo-random function.
        max_position_embeddings: the longest context.
        special_tokens: texts of further tokens; their ids follow EOS.
        likely: the characters of which other texts consist, of one byte each; empty is all bytes
            and EOS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ByteTokens(special_tokens)
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "vocab_size": EOS + 1 + len(special_tokens),
        "max_position_embeddings": max_position_embeddings,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        "seed": seed,
        "replies": [
            [tokens.encode(prompt), tokens.encode(reply)]
            for prompt, reply in (replies or {}).items()
        ],
    }
    if likely:
        config["likely"] = tokens.encode(likely)
    (folder / "config.json").write_text(json.dumps(config))
    tokens.write(folder, _CHAT_TEMPLATE)
    return folder


def scripted_config(folder: Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration that loads a folder of `write_scripted_model`.

    Args:
        folder: the checkpoint.
        extra: further configuration, which overrides it table by table.
    """
    config: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "load": {"use": "dummy"},
        "attention": {"use": "hardpoint.testing:HistoryAttention"},
        "plugins": {
            "enable": [{"use": "hardpoint.testing:ScriptedModel", "name": "ScriptedForCausalLM"}]
        },
    }
    for key, value in (extra or {}).items():
        if key == "plugins":
            value = {**value, "enable": config["plugins"]["enable"] + value.get("enable", [])}
        current = config.get(key)
        if isinstance(current, dict) and isinstance(value, Mapping):
            value = {**current, **value}
        config[key] = value
    return config


def _start_worker(*arguments: Any) -> WorkerProcess:
    from hardpoint.process.worker_process import LaunchedWorker  # noqa: PLC0415 - few tests have one

    return LaunchedWorker(*arguments)


def scripted_engine(
    folder: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    clock: Callable[[], float] | None = None,
) -> LLMEngine:
    """Open an engine on a folder of `write_scripted_model`, by default on a ScriptedClock."""
    config = typed.convert(scripted_config(folder, extra), EngineConfig, path="")
    clock = clock or ScriptedClock(tick=1e-6)
    if config.engine.in_process:
        return build_engine(config, clock=clock, start_worker=_start_worker)
    from hardpoint.process.build import build_process_engine  # noqa: PLC0415 - few tests have one

    return build_process_engine(config, clock=clock)


_CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
