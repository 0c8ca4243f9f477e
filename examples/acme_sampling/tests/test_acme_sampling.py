"""The package's own tests: they need hardpoint's contract and nothing of its engine."""

import logging

import pytest
import torch
from acme_sampling import TopA
from acme_sampling.audit import Audit

from hardpoint.plugins import (
    CompletionOutput,
    LogitsContext,
    PrepareContext,
    RequestOutput,
    SamplingParams,
)


class OneRow:
    """Rows of a single request."""

    def __init__(self, a):
        self.a = a

    def tensor(self, name):
        return torch.tensor([[getattr(self, name)]])


def top_a(vocab_size):
    context = LogitsContext(
        name="top_a",
        options=TopA.Options(),
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        max_num_seqs=1,
    )
    return TopA(context)


@pytest.mark.parametrize(("a", "kept"), [(0.1, 4), (0.5, 3), (1.0, 2)])
def test_keeps_what_reaches_a_times_the_square(a, kept):
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])  # limits 0.025, 0.125, 0.25
    result = top_a(4).apply(probs.log(), OneRow(a))
    assert (result > -torch.inf).sum() == kept


def test_the_likeliest_token_stays():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    assert top_a(100).apply(logits, OneRow(1.0)).argmax() == logits.argmax()


def test_the_operators_limit_is_kept():
    context = PrepareContext(
        options=TopA.Options(max_a=0.2),
        params=SamplingParams(),
        prompt_token_ids=[1],
        stop_token_ids=[],
        vocab_size=4,
        tokenizer=None,
    )
    assert TopA.prepare(TopA.Arguments(a=0.2), context).a == 0.2
    with pytest.raises(ValueError, match=r"a: expected at most 0\.2, got 0\.3"):
        TopA.prepare(TopA.Arguments(a=0.3), context)


def test_audit_counts_completions_by_reason(caplog):
    audit = Audit()
    for reason in ("stop", "length", "stop"):
        done = CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason)
        audit.request_finished(
            RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=[1], outputs=[done], finished=True
            )
        )
    with caplog.at_level(logging.INFO, logger="acme_audit"):
        audit.engine_closing()
    assert caplog.messages == ["finished: length 1, stop 2"]
