"""Costs of steps: a fit finds the cost behind the times, and its file is checked."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from hardpoint.plugins import ConfigError, StepCost
from hardpoint.simulation import Fleet, Segment, SimulatedRequest, read_cost, write_cost
from hardpoint.simulation.step_costs import TimedStep, fit_cost, residuals_of

FACTS = {
    "model": "m",
    "machine": "here",
    "hardpoint": "1",
    "made": "now",
    "max_model_len": 512,
    "num_blocks": 64,
    "block_size": 16,
}
LINEAR = StepCost(
    step=4.0,
    single_query=0.5,
    context_token=0.001,
    prompt=0.3,
    prompt_token=0.2,
    prompt_pair=0.0001,
    is_trained=True,
)


def steps_of(milliseconds, count=300):
    """Return steps of many sizes with times by a function."""
    chance = random.Random(3)
    steps = []
    for number in range(count):
        single = chance.choice([0, 1, 2, 4, 8, 16, 32]) if number % 3 else 1
        prompts = chance.choice([1, 2, 4]) if number % 3 == 0 or not single else 0
        tokens = sum(chance.choice([8, 16, 64, 128, 512]) for _ in range(prompts))
        work = {
            "single_queries": single,
            "context": sum(chance.randrange(1, 400) for _ in range(single)),
            "prompts": prompts,
            "prompt_tokens": tokens,
            "prompt_pairs": tokens * chance.randrange(1, 300) if prompts else 0,
        }
        steps.append(TimedStep(**work, milliseconds=milliseconds(chance, **work)))
    return steps


@pytest.fixture(scope="module")
def fitted():
    return fit_cost(steps_of(lambda _, **work: LINEAR.milliseconds(**work)), **FACTS)


class TestFit:
    def test_a_linear_cost_is_found(self, fitted):
        assert fitted.disturbed == 0
        for name in ("step", "single_query", "context_token", "prompt_token", "prompt_pair"):
            assert getattr(fitted.step_cost, name) == pytest.approx(getattr(LINEAR, name), rel=0.02)
        assert fitted.residuals["decode"].p95 < 0.01
        assert fitted.residuals["prompts"].p95 < 0.01

    def test_rows_that_cost_nothing_until_there_are_many(self):
        """A product of one row takes as long as one of eight; a line cannot describe that."""

        def milliseconds(_, *, single_queries, prompt_tokens, context, **rest):
            return 5.0 + 0.5 * max(0, single_queries + prompt_tokens - 8) + 0.001 * context

        steps = steps_of(milliseconds)
        cost = fit_cost(steps, **FACTS)
        assert cost.residuals["decode"].p50 < 0.02
        assert cost.residuals["step_cost"].p95 > 3 * cost.residuals["decode"].p95
        few = [step for step in steps if not step.prompts and step.single_queries <= 8]
        assert residuals_of(cost, few).p95 < 0.1

    def test_steps_that_neighbours_slowed_down_do_not_count(self, fitted):
        def disturbed(chance, **work):
            slow = chance.choice([1.0, 1.0, 1.7, 3.0, 4.0])
            return LINEAR.milliseconds(**work) * slow * chance.uniform(1.0, 1.03)

        cost = fit_cost(steps_of(disturbed, 1000), **FACTS)
        assert 0.5 < cost.disturbed < 0.7
        work = {"single_queries": 8, "context": 1600}
        assert cost.milliseconds(**work) == pytest.approx(LINEAR.milliseconds(**work), rel=0.05)
        work = {"prompts": 1, "prompt_tokens": 512, "prompt_pairs": 512 * 256}
        assert cost.milliseconds(**work) == pytest.approx(LINEAR.milliseconds(**work), rel=0.1)

    def test_more_tokens_never_take_less_time(self, fitted):
        times = [fitted.milliseconds(single_queries=n, context=100) for n in range(1, 600)]
        assert times == sorted(times)

    @pytest.mark.parametrize(("kind", "has_prompts"), [("without", True), ("with", False)])
    def test_both_kinds_of_steps_are_needed(self, kind, has_prompts):
        steps = steps_of(lambda _, **work: LINEAR.milliseconds(**work))
        some = [step for step in steps if bool(step.prompts) is has_prompts]
        with pytest.raises(ConfigError, match=f"expected some {kind} prompts, got none"):
            fit_cost(some, **FACTS)


class TestFile:
    def test_is_read_as_it_was_written(self, fitted, tmp_path):
        file = tmp_path / "cost.json"
        write_cost(fitted, file)
        assert read_cost(file) == fitted

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"format": "other"}, 'format: expected "hardpoint step cost", got .other'),
            ({"version": 2}, 'version: expected "1", got 2'),
            ({"num_blocks": 0}, "num_blocks: expected a whole number >= 1, got 0"),
            (
                {"tokens": []},
                r"tokens: expected points in ascending order, at least one, got .* \[\]",
            ),
            (
                {"tokens": [[4, 1.0], [2, 2.0]]},
                r"tokens: expected points in ascending order, .* \[4, 2\]",
            ),
            ({"tokens": [[2, 2.0], [4, 1.0]]}, "tokens: expected times that do not fall"),
            ({"single_query": -1.0}, "single_query: expected a number >= 0, got -1.0"),
            ({"step_cost": {}}, "step_cost: expected is_trained = true"),
            ({"speed": 3}, "speed: unknown field"),
        ],
    )
    def test_a_wrong_field_is_named(self, fitted, tmp_path, changes, message):
        file = tmp_path / "cost.json"
        file.write_text(json.dumps({**msgspec.to_builtins(fitted), **changes}))
        with pytest.raises(ConfigError, match=f"cost.json: {message}"):
            read_cost(file)

    @pytest.mark.parametrize("content", ["", "{", "[1", "\x00", "[" * 100_000])
    def test_what_is_no_json_is_refused(self, tmp_path, content):
        file = tmp_path / "cost.json"
        file.write_text(content)
        with pytest.raises(
            ConfigError, match="cost.json: expected a file of `hardpoint calibrate`"
        ):
            read_cost(file)

    def test_a_missing_one_is_made_by_calibrate(self, tmp_path):
        with pytest.raises(ConfigError, match="there is no such file; `hardpoint calibrate MODEL"):
            read_cost(tmp_path / "none.json")

    def test_a_fleet_takes_it(self, fitted):
        config = {"kv_cache": {"num_blocks": 64}}
        with Fleet(config, step_cost=fitted) as fleet:
            request = SimulatedRequest(at=0, prompt=(Segment(1, 16),), output=Segment(2, 3))
            report = fleet.run([request])
        first = fitted.milliseconds(prompts=1, prompt_tokens=16, prompt_pairs=128)
        assert report.ttft.p50 == pytest.approx(first / 1e3)
        further = [fitted.milliseconds(single_queries=1, context=n) for n in (17, 18)]
        assert report.tpot.p50 == pytest.approx(sum(further) / 2e3)
