"""The built-in drafting heads pass the conformance suite, with random weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from support.builtins.model_harness import build_model
from support.searching import kit_examples

from hardpoint.builtin_plugins.models.heads.eagle3 import Eagle3Head
from hardpoint.builtin_plugins.models.heads.mtp import Qwen3NextMTP
from hardpoint.builtin_plugins.speculators.eagle3 import Eagle3
from hardpoint.builtin_plugins.speculators.mtp import MTP
from hardpoint.plugins import ModelConfig
from hardpoint.plugins.step_part.worker import DraftingHead
from hardpoint.testing import SpeculatorSuite

VOCAB, HIDDEN, DRAFT_VOCAB = 131, 16, 40
FIELDS = {
    **{"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB},
    **{"draft_vocab_size": DRAFT_VOCAB, "num_experts": 0, "head_dim": 4},
    "partial_rotary_factor": 0.5,
}


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Loader:
    """Has the vocabulary of drafts: every third token."""

    def __init__(self, architecture):
        self.architecture = architecture

    def config(self):
        return SimpleNamespace(architecture=self.architecture, hf={"num_hidden_layers": 8})

    def weights(self, shapes):
        assert dict(shapes) == {"d2t": (DRAFT_VOCAB,)}
        yield "d2t", 2 * torch.arange(DRAFT_VOCAB)


class HeadSuite(SpeculatorSuite):
    """Runs a head with random weights."""

    examples = kit_examples(0.1)
    budget_us_per_request = None  # it takes what the head takes

    def context(self):
        table = random(VOCAB, HIDDEN, seed=1)
        model = SimpleNamespace(
            embed=lambda ids: table[ids], compute_logits=lambda hidden: hidden @ table.T
        )
        loaded = SimpleNamespace(model=model, loader=Loader("Qwen3NextForCausalLM"))
        return {"open_head": self.open_head, "loaded": loaded, "max_step_tokens": 64}

    def open_head(self, model, architecture=""):
        kind = Qwen3NextMTP if architecture else Eagle3Head
        config = ModelConfig(
            architecture=architecture, hf=FIELDS, vocab_size=VOCAB, max_position_embeddings=1 << 16
        )
        head = build_model(kind, config, dtype=torch.float32, max_model_len=1 << 16)
        shapes = head.weight_shapes()
        head.load_weights(
            (name, random(*shape, seed=seed) * (0.3 if len(shape) == 2 else 1.0))
            for seed, (name, shape) in enumerate(shapes.items())
        )
        return DraftingHead(head, Loader(architecture), 0)


class TestMTP(HeadSuite):
    speculator = MTP


class TestEagle3(HeadSuite):
    speculator = Eagle3
    options = {"model": "head"}
    hidden_parts = 3
