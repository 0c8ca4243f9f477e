"""A trace as a table and as a page, in which hostile texts stay texts."""

from __future__ import annotations

import html.parser
import re

import msgspec
import pytest
from support.browser import new_page, running_browser

from hardpoint.toolkit.trace import (
    Candidate,
    Change,
    CompletionTrace,
    Draw,
    StepTrace,
    TokenChange,
    TokenTrace,
    Trace,
)

HOSTILE = "</code><script>alert(1)</script>\x1b[31m\u202e"


def token(position, text="a", **fields):
    candidates = [
        Candidate(
            token_id=5,
            text=text,
            logit=2.0,
            logits=[2.0, 4.0],
            probability=0.9,
            noise=0.5,
        ),
        Candidate(token_id=6, text="b", logit=3.0, logits=[3.0, None], probability=0.0),
    ]
    changes = [
        Change(
            phase="bias",
            plugin="acme",
            package="acme-bias 1.2",
            num_changed=1,
            num_left=10,
            tokens=[TokenChange(token_id=7, text="c", before=1.0, after=-1.0)],
        ),
        Change(
            phase="truncate",
            plugin="top_k",
            num_changed=10,
            num_removed=9,
            num_left=1,
            log_total=4.0,
            tokens=[TokenChange(token_id=6, text="b", before=3.0, after=None)],
        ),
    ]
    defaults = {
        **{"step": position + 1, "token_id": 5, "text": text, "rank": 2, "log_total": 3.5},
        **{"candidates": candidates, "changes": changes},
        "draw": Draw(sampler="default", greedy=False, seed=8),
    }
    return TokenTrace(position=position, **(defaults | fields))


def completion(*tokens, **fields):
    defaults = {"index": 0, "text": "aa", "token_ids": [5] * len(tokens), "finish_reason": "length"}
    return CompletionTrace(tokens=list(tokens), **(defaults | fields))


def test_a_table_has_who_changed_what():
    text = Trace(prompt="p", num_prompt_tokens=1, completions=[completion(token(0))]).table()
    assert text.splitlines()[:1] == ["prompt, 1 token: p"]
    assert "completion 0, 1 token, finish reason length: aa" in text
    assert 'position 0: "a", step 1, number 2 of the model' in text
    assert re.search(r'>  "a"  +2\.000 +2\.000 +4\.000 +22\.31% +90\.00%  \+0\.500', text)
    assert re.search(r'"b" +3\.000 +3\.000 +-inf', text)
    assert 'bias: acme (acme-bias 1.2) changed 1 logit\n      "c" 1.000 → -1.000' in text
    assert "truncate: top_k removed 9 of 10 tokens, 1 left, changed 1 logit" in text
    assert "default drew with seed 8: the largest sum of logit and noise" in text


def test_a_narrow_table_keeps_the_model_and_the_end():
    text = Trace(completions=[completion(token(0))]).table(50)
    assert "(too narrow for acme)" in text
    assert "model" in text
    assert "top_k" in text


def test_drafts_and_errors():
    accepted, rejected = token(0, draft=5), token(1, draft=6)
    none = token(2, token_id=None, text=None, rank=None)
    text = Trace(completions=[completion(accepted, rejected, none, error="acme failed")]).table()
    assert "its draft was accepted" in text
    assert "its draft, token 6, was rejected" in text
    assert "position 2: none" in text
    assert "no token was chosen" in text
    assert "error: acme failed" in text
    greedy = token(0, draw=Draw(sampler="default", greedy=True))
    assert "default took the likeliest" in Trace(completions=[completion(greedy)]).table()


def test_like_steps_are_one_line():
    first = StepTrace(step=1, num_requests=1, num_tokens=7, num_cached=4, num_computed=4)
    others = [
        StepTrace(step=step, num_requests=3, num_tokens=1, num_computed=step + 9)
        for step in (2, 3, 4)
    ]
    waited = StepTrace(step=5, num_steps=3, num_requests=2, waits_for="slot", reason="no slot")
    again = StepTrace(
        step=8, num_requests=2, num_tokens=3, num_computed=8, is_preempted=True, is_resumed=True
    )
    drafted = StepTrace(
        step=9, num_requests=1, num_tokens=3, num_computed=11, drafts=[1, 2], num_accepted=1
    )
    lost = StepTrace(step=10, num_requests=1, num_tokens=1, num_computed=14, is_lost=True)
    steps = [first, *others, waited, again, drafted, lost]
    lines = Trace(completions=[completion(steps=steps)]).table().splitlines()
    assert lines[3:] == [
        "step 1: 7 tokens planned, 4 were computed before, 4 of them from the cache, "
        "0 other requests in the batch",
        "steps 2 to 4: 1 token in each, 11 were computed before, 2 other requests in the batch",
        "steps 5 to 7: waited: no slot, 2 other requests in the batch",
        "step 8: preempted before, admitted again, 3 tokens planned, 8 were computed before, "
        "1 other request in the batch",
        "step 9: 3 tokens planned, 11 were computed before, 1 of 2 drafts accepted, "
        "0 other requests in the batch",
        "step 10: 1 token planned, 14 were computed before, not executed, planned again, "
        "0 other requests in the batch",
    ]


def test_hostile_texts_stay_texts():
    trace = Trace(prompt=HOSTILE, completions=[completion(token(0, HOSTILE), text=HOSTILE)])
    table = trace.table()
    assert "\x1b" not in table
    assert "\u202e" not in table
    assert r"\u001b[31m" in table
    elements = Elements()
    elements.feed(trace.html())
    assert "script" not in elements.tags
    assert not elements.addresses
    assert msgspec.json.decode(trace.json(), type=Trace) == trace


class Elements(html.parser.HTMLParser):
    """Collects the tags of a page, and its links to other pages and resources."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "action") and not value.startswith("#"):
                self.addresses.append(value)


@pytest.mark.nightly
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page(tmp_path, width, dark):
    trace = Trace(prompt=HOSTILE, completions=[completion(token(0, HOSTILE), token(1))])
    page = tmp_path / "trace.html"
    page.write_text(trace.html(), encoding="utf-8")
    with (
        running_browser() as browser,
        new_page(browser, page.as_uri(), width=width, height=800, dark=dark) as tab,
    ):
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        colours = tab.evaluate(
            "(({color, backgroundColor}) => [color, backgroundColor])"
            "(getComputedStyle(document.body))"
        )
        text, ground = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in colours)
        assert (text > ground) == dark
        assert abs(text - ground) > 450
        second = "document.getElementById('c0p1')"
        assert not tab.evaluate(f"{second}.open")
        tab.evaluate(f"{second}.querySelector('summary').focus()")
        tab.press("Enter", "\r")
        tab.wait_for(f"{second}.open")
        assert "acme" in tab.text("#c0p1")
        assert tab.problems() == []
        assert tab.requested() == [page.as_uri()]
