"""The package's own tests: they need hardpoint's contract and nothing of its engine."""

import logging

import pytest
import torch
from acme_sampling import TopA
from acme_sampling.audit import Audit
from by_hand import Rows, build, prepare, request_of

from hardpoint.plugins import CompletionOutput, RequestOutput


def top_a(logits, a):
    processor = build(TopA, "top_a", logits.shape[1])
    return processor.apply(logits, Rows(processor, request_of(processor, a=a)))


@pytest.mark.parametrize(("a", "num_tokens"), [(0.1, 4), (0.5, 3), (1.0, 2)])
def test_keeps_what_reaches_a_times_the_square(a, num_tokens):
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])  # limits 0.025, 0.125, 0.25
    result = top_a(probs.log(), a)
    assert (result > -torch.inf).sum() == num_tokens


def test_the_likeliest_token_stays():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    assert top_a(logits, 1.0).argmax() == logits.argmax()


def test_the_operators_limit_is_kept():
    options = TopA.Options(max_a=0.2)
    assert prepare(TopA, TopA.Arguments(a=0.2), options=options).a == 0.2
    with pytest.raises(ValueError, match=r"a: expected at most 0\.2, got 0\.3"):
        prepare(TopA, TopA.Arguments(a=0.3), options=options)


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
