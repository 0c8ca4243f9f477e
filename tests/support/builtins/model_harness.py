"""A minimal model runner: allocates blocks, builds steps, and runs a built-in model on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import torch

from hardpoint import EngineConfig
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.core.weights.quantized_weights import QuantizedWeights
from hardpoint.plugins import (
    AttentionBackend,
    AttentionContext,
    ForwardBatch,
    LoaderContext,
    Model,
    ModelConfig,
    ModelContext,
    ModelFiles,
    Quantization,
    WeightLoader,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.config_tables import QuantizationConfig
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.quantization import QuantizationContext
from hardpoint.testing import load_ops
from hardpoint.testing.model.model_sequences import SequenceStates
from hardpoint.testing.model.sequences import SequenceBlocks


def open_loader(kind: type[WeightLoader], path: Path, **options: object) -> WeightLoader:
    """Build a loader on a path."""
    files = ModelFiles(name=path.name, path=path)
    return kind(LoaderContext(name="test", options=kind.Options(**options), files=files))


def build_model(
    kind: type[Model],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_model_len: int = 1024,
    parallel: Parallel | None = None,
) -> Model:
    """Build a model without weights."""
    context = ModelContext(
        name=config.architecture,
        options=kind.Options(),
        config=config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        ops=load_ops(dtype),
        parallel=parallel or Parallel(),
    )
    return kind(context)


def load_model(
    kind: type[Model],
    loader: WeightLoader,
    *,
    dtype: torch.dtype,
    max_model_len: int = 1024,
    parallel: Parallel | None = None,
    use: str = "auto",
) -> Model:
    """Build a model and load its weights; `use` is `quantization.use`."""
    model = build_model(
        kind, loader.config(), dtype=dtype, max_model_len=max_model_len, parallel=parallel
    )
    config = EngineConfig(model="test", quantization=QuantizationConfig(use=use))
    cuts = model.weight_cuts()
    passing = QuantizedWeights(config, model, cuts, _with_source)
    model.load_weights(passing.pass_on(loader.cut_weights(model.weight_shapes(), cuts)))
    return model


def scheme(name: str) -> Quantization:
    """Build a scheme of GGUF files."""
    (entry,) = entry_points(group="hardpoint.quantizations", name=name)
    made = entry.load()
    context = QuantizationContext(
        name=name, options=made.Options(), device=torch.device("cpu"), dtype=torch.float32
    )
    return made(context)


def _with_source(name: str) -> tuple[Quantization, Source]:
    return scheme(name), Source(name, "gguf", "hardpoint", "0", "default")


def build_backend(
    dtype: torch.dtype,
    block_size: int,
    kind: type[AttentionBackend] = TorchAttention,
    cache_dtype: str = "auto",
) -> AttentionBackend:
    """Build an attention backend."""
    return kind(
        AttentionContext(
            name=kind.__module__.rpartition(".")[2],
            options=kind.Options(),
            device=torch.device("cpu"),
            dtype=dtype,
            block_size=block_size,
            cache_dtype=cache_dtype,
        )
    )


class Runner:
    """Runs a model with an attention backend."""

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype,
        num_blocks: int = 256,
        block_size: int = 16,
        attention: type[AttentionBackend] = TorchAttention,
    ) -> None:
        self.model = model
        self.backend = build_backend(dtype, block_size, attention)
        self.specs = model.kv_specs()
        self.caches = [self.backend.allocate(spec, num_blocks) for spec in self.specs]
        self.states = SequenceStates(model)
        self.blocks = SequenceBlocks(num_blocks, block_size, torch.device("cpu"), shuffled=True)

    def hidden(
        self,
        batch: Sequence[tuple[str, Sequence[int]]],
        *,
        hidden: torch.Tensor | None = None,
        routed_experts: torch.Tensor | None = None,
        needed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step of (sequence, tokens) and return the hidden states of all tokens."""
        counts = [(name, len(tokens)) for name, tokens in batch]
        step = self.blocks.step(counts)
        ends = zip(counts, step.seq_lens.tolist(), strict=True)
        positions = torch.cat([torch.arange(end - count, end) for (_, count), end in ends])
        plan = self.backend.plan(step)
        tokens = torch.tensor([token for _, part in batch for token in part])
        return self.model.forward(
            ForwardBatch(
                token_ids=tokens,
                positions=positions,
                attend=partial(self._attend, plan),
                hidden=hidden,
                routed_experts=routed_experts,
                recur=self.states.of_step(counts),
                needed=needed,
            )
        )

    def logits(self, batch: Sequence[tuple[str, Sequence[int]]]) -> torch.Tensor:
        """Run one step and return float32 logits of all tokens."""
        return self.model.compute_logits(self.hidden(batch)).float()

    def last(self, batch: Sequence[tuple[str, Sequence[int]]]) -> torch.Tensor:
        """Run one step and return float32 logits of each sequence's last token."""
        ends = torch.tensor([len(tokens) for _, tokens in batch]).cumsum(0) - 1
        return self.model.compute_logits(self.hidden(batch)[ends]).float()

    def _attend(
        self,
        plan: object,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if angles is not None:
            for x in (q, k):
                self.model.context.ops.rotate(x[..., : angles.shape[1]], angles)
        return self.backend.attend(self.specs[layer], self.caches[layer], plan, q, k, v)
