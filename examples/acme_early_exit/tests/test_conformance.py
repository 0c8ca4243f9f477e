"""The tap and the speculator pass the suites of the conformance kit."""

from __future__ import annotations

import torch
from acme_early_exit import ConfidenceExit, SelfSpeculation
from hypothesis import strategies as st

from hardpoint.testing import ActivationTapSuite, SpeculatorSuite

_LOGITS = 3 * torch.randn(997, 131, generator=torch.Generator().manual_seed(0))


class TestConfidenceExit(ActivationTapSuite):
    tap = ConfidenceExit
    arguments = st.builds(
        dict,
        layers=st.lists(st.integers(0, 3), min_size=1),
        threshold=st.sampled_from([0.0, 0.2, 0.5]),
    )


class FirstLayers:
    """Sequences with logits that depend on the last two tokens."""

    vocab_size, max_model_len, cache_bytes = 131, 1 << 20, 1

    def __init__(self, model, num_tokens, *, num_layers):
        self.texts = {}

    def extend(self, token_ids):
        rows = []
        for name, tokens in token_ids.items():
            text = self.texts.setdefault(name, [])
            text += tokens
            rows.append(_LOGITS[hash(tuple(text[-2:])) % len(_LOGITS)])
        return torch.stack(rows)

    def length(self, name):
        return len(self.texts.get(name, ()))

    def reserve(self, name, count):
        return True

    def cut(self, name, length):
        if not length:
            self.texts.pop(name, None)
        elif name in self.texts:
            del self.texts[name][length:]


class TestSelfSpeculation(SpeculatorSuite):
    speculator = SelfSpeculation
    options = {"num_layers": 1}
    budget_us_per_request = None  # it takes what the layers take
    num_uses = 100

    def context(self):
        return {"open_model": FirstLayers}
