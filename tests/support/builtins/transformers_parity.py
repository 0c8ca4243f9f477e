"""Models compared with transformers, with the same random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.plugins import Model, WeightLoader
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.model.rank_threads import run_ranks

from .model_harness import Runner, build_model, load_model, open_loader

Variant = tuple[Any, type[Model], Path]
"""A model of transformers, our class, and the folder of its weights."""

GENERATOR = torch.Generator().manual_seed(1)
TOKENS: list[int] = torch.randint(0, 97, (60,), generator=GENERATOR).tolist()
OTHERS: list[int] = torch.randint(0, 97, (40,), generator=GENERATOR).tolist()


@torch.inference_mode()
def check_logits_and_greedy_tokens(variant: Variant) -> None:
    """Compare logits and greedy tokens: alone, in a batch, and in chunks."""
    reference, kind, folder = variant
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.float32)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    others = reference(torch.tensor([OTHERS])).logits[0]
    alone = Runner(model, dtype=torch.float32, block_size=4).logits([("a", TOKENS)])
    assert (alone - expected).abs().max() < 1e-4
    runner = Runner(model, dtype=torch.float32, block_size=4)
    parts = [runner.logits([("a", TOKENS[:23])])]
    mixed = runner.logits([("a", TOKENS[23:50]), ("b", OTHERS)])
    parts += [mixed[:27], runner.logits([("a", TOKENS[50:])])]
    assert (torch.cat(parts) - expected).abs().max() < 1e-4
    assert (mixed[27:] - others).abs().max() < 1e-4
    histories = [[*TOKENS, int(expected[-1].argmax())], [*OTHERS, int(others[-1].argmax())]]
    for _ in range(8):
        logits = runner.logits([(name, h[-1:]) for name, h in zip("ab", histories, strict=True)])
        for history, token in zip(histories, logits.argmax(-1).tolist(), strict=True):
            history.append(token)
    for history, prompt in zip(histories, (TOKENS, OTHERS), strict=True):
        best = reference(torch.tensor([history[:-1]])).logits[0].argmax(-1)
        assert history[len(prompt) :] == best[len(prompt) - 1 :].tolist()


def _staged(
    kind: type[Model], loader: WeightLoader, communicator: Communicator, *, stages: int
) -> torch.Tensor:
    """Return the logits of TOKENS of a model cut into ranks and stages."""
    hidden = None
    with torch.inference_mode():
        for stage in range(stages):
            parallel = Parallel(communicator, stage, stages)
            model = build_model(kind, loader.config(), dtype=torch.float32, parallel=parallel)
            model.load_weights(loader.cut_weights(model.weight_shapes(), model.weight_cuts()))
            runner = Runner(model, dtype=torch.float32)
            hidden = runner.hidden([("a", TOKENS)], hidden=hidden)
        return model.compute_logits(hidden)


@torch.inference_mode()
def check_parts(variant: Variant, ranks: int, stages: int) -> None:
    """Compare the logits of a model cut into ranks and stages."""
    reference, kind, folder = variant
    loader = open_loader(SafetensorsLoader, folder)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    results = run_ranks(ranks, lambda rank: _staged(kind, loader, rank, stages=stages))
    for result in results:
        assert torch.equal(result, results[0])
        assert (result - expected).abs().max() < 1e-4
