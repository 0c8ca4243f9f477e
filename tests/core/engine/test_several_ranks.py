"""The ranks that do not sample get the tokens with later plans, and have them in time."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from support.core.engine_harness import Rig, ScriptedExecutor, expected

from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.plugins import EngineConfig, LogitsRequest
from hardpoint.plugins.config.engine import ParallelConfig

TWO_RANKS = EngineConfig(parallel=ParallelConfig(tensor=2))
BLOCK = 4


class FollowedExecutor(ScriptedExecutor):
    """Has a second rank, which knows the plans alone; its input must be that of the first one."""

    def __init__(self, depth=1, *, late=False):
        super().__init__(depth, late=late)
        self.follower = InputBatch(max_num_seqs=8, max_model_len=200, block_size=BLOCK)
        self.interrupts = random.Random(0)
        self.interrupt_share = 0.0

    def _compute(self, plan):
        batch = self.follower
        batch.remove(plan.finished_request_ids)
        batch.remove(plan.preempted_request_ids)
        for sampled in plan.sampled:
            batch.append_sampled(sampled)
        for name, block_ids in plan.cached_requests.new_block_ids.items():
            batch.extend_blocks(name, block_ids)
        for new in plan.new_requests:
            source, outputs = new.source, list(new.output_token_ids)
            request = LogitsRequest(
                source.request_id, source.prompt_token_ids, outputs, source.params, ()
            )
            batch.add(request, outputs, new.block_ids, new.num_computed_tokens, plan.step)
        batch.settle()
        if plan.num_scheduled_tokens:
            self._check_input(plan)
        return super()._compute(plan)

    def execute_model(self, plan):
        """Run the step; maybe interrupted before any rank got the plan, or after all did."""
        if self.interrupts.random() < self.interrupt_share:
            if self.interrupts.random() < 0.5:
                self._compute(plan)
            raise KeyboardInterrupt
        return super().execute_model(plan)

    def _check_input(self, plan):
        """The follower reads the tokens that the first rank has at these positions."""
        first = dict(self.rows)
        for new in plan.new_requests:
            first[new.source.request_id] = [*new.source.prompt_token_ids, *new.output_token_ids]
        step = self.follower.prepare(plan.num_scheduled_tokens, torch.device("cpu"))
        starts = step.query_starts
        for index, request in enumerate(step.requests):
            positions = step.positions[starts[index] : starts[index + 1]].tolist()
            tokens = step.token_ids[starts[index] : starts[index + 1]].tolist()
            assert tokens == [first[request.request_id][place] for place in positions]
            ends = positions[-1] + 1 == len(first[request.request_id])
            assert bool(step.samples[index]) == ends, "both ranks sample, or neither"


def followed(depth=1, *, blocks=64, **limits):
    late = depth > 1
    executor = FollowedExecutor(depth, late=late)
    executor.patient = late
    return Rig(executor, blocks=blocks, config=TWO_RANKS, asynchronous=False, **limits)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_step_samples_comes_with_a_later_plan(depth):
    rig = followed(depth)
    for name in "abc":
        rig.add(name, max_tokens=6)
    rig.run()
    assert rig.tokens == {name: expected([1, 2, 3], 6) for name in "abc"}


def test_requests_under_way_are_not_planned_again_before_their_tokens_are_known():
    rig = followed(2)
    rig.add("a", max_tokens=8)
    rig.step()
    rig.add("b", max_tokens=8)
    rig.step()
    planned = [sorted(plan.num_scheduled_tokens) for plan, _ in rig.executor.sampled.values()]
    assert planned == [["a"], ["b"]]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_history(depth):
    """Joins, aborts and preemptions; few blocks, so that requests are preempted while under way."""
    for seed in range(60):
        draw = random.Random(seed)
        rig = followed(
            depth,
            blocks=draw.randint(6, 12),
            max_num_batched_tokens=draw.randint(3, 10),
            max_num_seqs=draw.randint(3, 6),
        )
        wanted = {}
        for index in range(draw.randint(3, 8)):
            name, count = f"r{index}", draw.randint(1, 12)
            prompt = list(range(10 * index, 10 * index + draw.randint(1, 8)))
            wanted[name] = expected(prompt, count)
            rig.add(name, prompt=prompt, max_tokens=count)
            for _ in range(draw.randint(0, 3)):
                rig.step()
            if draw.random() < 0.1:
                victim = draw.choice(sorted(wanted))
                rig.take(rig.core.abort_requests([victim]))
                del wanted[victim]
        rig.run()
        assert {name: rig.tokens[name] for name in wanted} == wanted, f"seed {seed}"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_interrupts_lose_no_token(depth):
    """Sampled tokens reach the other ranks once, also if a plan is lost on its way to them."""
    for seed in range(40):
        draw = random.Random(seed)
        rig = followed(depth, blocks=draw.randint(8, 20), max_num_batched_tokens=12)
        rig.executor.interrupts, rig.executor.interrupt_share = draw, 0.15
        wanted = {}
        for index in range(5):
            prompt, count = list(range(10 * index, 10 * index + draw.randint(1, 8))), 9
            wanted[f"r{index}"] = expected(prompt, count)
            rig.add(f"r{index}", prompt=prompt, max_tokens=count)
        for _ in range(400):
            if not rig.core.has_requests():
                break
            with contextlib.suppress(KeyboardInterrupt):
                rig.step()
        assert rig.tokens == wanted, f"seed {seed}"
