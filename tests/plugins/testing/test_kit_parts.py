"""The kit's own tools: snapshots, detection of host syncs, logits and histories."""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.broken import processors as broken

from hardpoint.plugins import Move, SamplingParams
from hardpoint.testing.logits import histories as logits_histories
from hardpoint.testing.logits.batch import BatchFixture, difference, make_logits
from hardpoint.testing.logits.host_sync import META, HostSyncError, UndecidableError, no_values
from hardpoint.testing.logits.subject import RequestRejectedError, Subject
from hardpoint.testing.snapshots import count_elements, snapshot


class Slotted:
    __slots__ = ("__secret", "open")

    def __init__(self, secret):
        self.__secret = secret
        self.open = 1


@dataclass
class Plain:
    value: object


class Pair(NamedTuple):
    one: object
    two: object


class TestSnapshot:
    @pytest.mark.parametrize(
        "make",
        [
            lambda n: n,
            lambda n: [1, {n: "x"}],
            lambda n: {3, n + 10},
            lambda n: deque([n]),
            lambda n: Counts({n: 2}),
            lambda n: torch.tensor([0.0, n]),
            lambda n: np.arange(3) + n,
            lambda n: Slotted(n),
            lambda n: Plain({"a": [Plain(n)]}),
            lambda n: Pair(0, n),
            lambda n: SamplingParams(seed=n),
            lambda n: np.random.default_rng(n),
        ],
    )
    def test_snapshots_are_equal_exactly_for_equal_contents(self, make):
        assert snapshot(make(1)) == snapshot(make(1))
        assert snapshot(make(1)) != snapshot(make(2))

    def test_a_snapshot_does_not_change_with_the_original(self):
        state = Plain([torch.zeros(2)])
        before = snapshot(state)
        state.value[0] += 1
        assert snapshot(state) != before

    def test_cyclic_objects_have_snapshots(self):
        loop = [1]
        loop.append(loop)
        assert snapshot(loop) == snapshot(loop)

    def test_types_and_shapes_count(self):
        assert snapshot(1) != snapshot(1.0)
        assert snapshot(torch.zeros(2, 3)) != snapshot(torch.zeros(3, 2))


class TestCountElements:
    @pytest.mark.parametrize(
        "make",
        [lambda n: list(range(n)), lambda n: {i: i for i in range(n)}, lambda n: np.zeros(n),
         lambda n: Plain({"t": torch.zeros(n)}), lambda n: [[i] for i in range(n)]],
    )  # fmt: skip
    def test_larger_objects_count_more(self, make):
        assert count_elements(make(1000)) - count_elements(make(500)) >= 500

    def test_shared_objects_count_once(self):
        part = list(range(1000))
        assert count_elements([part, part]) < 1100


LOGITS = torch.empty(3, 7, device=META)


class TestNoValues:
    @pytest.mark.parametrize(
        ("reads", "pattern"),
        [
            (lambda x: x.max().item(), r"\.item\(\)"),
            (lambda x: float(x[0, 0]), r"float\(\)"),
            (lambda x: 1 if x[0, 0] > 0 else 2, r"`if`"),
            (lambda x: x.tolist(), r"\.tolist\(\)"),
            (lambda x: x.cpu(), r"\.cpu\(\)"),
            (lambda x: x.numpy(), r"numpy\(\)"),
            (lambda x: (x > 0).nonzero(), r"nonzero\(\)"),
            (lambda x: x[x > 0], "mask of booleans"),
            (lambda x: torch.unique(x), r"unique\(\)"),
            (lambda x: torch.equal(x, x), r"torch\.equal"),
            (lambda x: x + torch.zeros(3, 7), "mixes a tensor on the host"),
        ],
    )
    def test_reads_of_values_are_named(self, reads, pattern):
        with pytest.raises(HostSyncError, match=pattern), no_values():
            reads(LOGITS)

    @pytest.mark.parametrize(
        "works",
        [
            lambda x: x.softmax(-1).amax(-1, keepdim=True),
            lambda x: x.masked_fill(x < x.topk(2).values[:, 1:], -torch.inf),
            lambda x: x.sort(descending=True).values.cumsum(-1),
            lambda x: torch.where(x > 0, x, 0.0) + torch.tensor([1.0], device=META),
            lambda x: x.scatter_add(1, torch.tensor([[1]]).to(META), x),
        ],
    )
    def test_code_without_reads_runs(self, works):
        with no_values():
            works(LOGITS)

    def test_other_errors_are_undecidable(self):
        with pytest.raises(UndecidableError, match="ZeroDivisionError"), no_values():
            1 / 0  # noqa: B018


def subject(cls=broken.Bias):
    return Subject(cls, "bias", {}, 131, (2, 5))


class TestHistories:
    @pytest.mark.nightly
    def test_drawn_histories_have_every_change_of_a_batch(self, monkeypatch):
        """Count events over many cases, so that a change of the strategies cannot lose some."""
        seen = Counts()

        class Watcher(broken.BatchBias):
            def update_state(self, update):
                if update is None:
                    seen["nothing"] += 1
                    return
                seen["removed"] += len(update.removed)
                seen["added"] += len(update.added)
                seen["one-way"] += sum(m.direction is Move.UNIDIRECTIONAL for m in update.moved)
                seen["back with outputs"] += sum(
                    len(a.output_token_ids) > len(a.prompt_token_ids) + 8 for a in update.added
                )
                seen["full"] += update.batch_size == 8
                seen["empty"] += update.batch_size == 0

        watched = subject(Watcher)
        monkeypatch.setattr(logits_histories, "run_alone", lambda *_: None)
        monkeypatch.setattr(logits_histories, "difference", lambda *_: None)
        arguments = st.builds(broken.Bias.Arguments, by=st.floats(-5, 5))

        @seed(1)
        @settings(
            max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(
            cases=st.lists(watched.cases(arguments), min_size=1, max_size=4),
            history=logits_histories.steps(),
        )
        def run(cases, history):
            seen["bystanders"] += any(not case.uses for case in cases)
            seen["greedy"] += any(case.params.greedy for case in cases)
            seen["paused"] += any(step.skipped_rows for step in history)
            logits_histories.check_history(watched, cases, history)

        run()
        floor = {
            "one-way": 50,
            "removed": 50,
            "added": 500,
            "nothing": 100,
            "full": 20,
            "empty": 20,
        }
        floor |= {"bystanders": 20, "greedy": 20, "paused": 20, "back with outputs": 5}
        assert {change: n for change, n in floor.items() if seen[change] < n} == {}, seen


class TestLogits:
    def test_equal_seeds_give_equal_logits(self):
        assert torch.equal(make_logits(3, 2, 50), make_logits(3, 2, 50))
        assert not torch.equal(make_logits(3, 2, 50), make_logits(4, 2, 50))

    def test_each_kind_has_its_values(self):
        made = {
            kind: make_logits(1, 4, 100, kind)
            for kind in ("plain", "ties", "masked", "flat", "huge", "survivor")
        }
        assert len(made["ties"].unique()) <= 9
        assert len(made["flat"].unique()) == 1
        assert made["huge"].abs().amax() > 1e20
        assert made["huge"].isfinite().all()
        assert ((made["survivor"] > -torch.inf).sum(-1) == 1).all()
        left = (made["masked"] > -torch.inf).sum(-1)
        assert ((left > 40) & (left < 90)).all()

    def test_a_difference_names_the_token(self):
        row = torch.zeros(5)
        assert difference(row, row.clone()) is None
        other = row.clone()
        other[3] = 2
        assert difference(other, row) == (
            "1 of 5 logits differ, the first at token 3: 2 instead of 0"
        )
        assert "mere rounding" in difference(row + 1e-7, row)
        nan = torch.full((5,), torch.nan)
        assert difference(nan, nan.clone()) is None


class TestSubject:
    def test_a_rejected_request_is_no_violation(self):
        with pytest.raises(RequestRejectedError, match="by: not today"):
            subject(broken.RejectsAll).case({"by": 1.0}, SamplingParams())

    def test_a_request_without_arguments_does_not_use_it(self):
        assert not subject().case(None, SamplingParams()).uses

    def test_a_processor_without_arguments_is_used_by_every_request(self):
        assert subject(broken.DropsTies).case(None, SamplingParams()).uses

    def test_swaps_change_rows_and_nothing_else(self):
        mine = subject()
        cases = [mine.case({"by": float(by)}, SamplingParams()) for by in (1, 2, 3)]
        batch = BatchFixture(mine, cases)
        batch.swap(0, 2)
        assert [request.row for request in batch.requests] == [2, 1, 0]
        assert batch.process(torch.zeros(3, 131))[:, 0].tolist() == [1, 2, 3]


class CachesByVersion(broken.Bias):
    """Correct: rebuilds its column when the rows change."""

    cached = (None, None)

    def apply(self, logits, rows):
        if self.cached[0] != rows.version:
            self.cached = (rows.version, rows.tensor("by"))
        logits[:, :1] += self.cached[1]
        return logits


def test_rows_run_one_by_one_equal_those_of_the_batch():
    mine = subject(CachesByVersion)
    cases = [mine.case({"by": float(by)}, SamplingParams()) for by in (1, 2, 3)]
    batch = BatchFixture(mine, cases)
    assert batch.process_row_by_row(torch.zeros(3, 131))[:, 0].tolist() == [1, 2, 3]
    assert batch.process(torch.zeros(3, 131))[:, 0].tolist() == [1, 2, 3]
