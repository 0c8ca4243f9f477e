"""The kit is enabled by one line in a conftest, and never by installing it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from hypothesis import strategies as st
from support.broken.processors import Bias, MixesRows
from support.process.forked_python import forked_python

import hardpoint.testing
from hardpoint.host.registry.kinds import KINDS
from hardpoint.testing import LogitsProcessorSuite
from hardpoint.testing import suite as kit_suite
from hardpoint.testing.pytest_hooks import examples_scale, replay_line, search_seed
from hardpoint.testing.suite import ConformanceSuite, Search, Violation

TEST_FILE = """
from hypothesis import strategies as st
from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.testing import LogitsProcessorSuite


class Shy(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def apply(self, logits, rows):
        logits[:, :1] += rows.tensor("by").mean()
        return logits


class TestShy(LogitsProcessorSuite):
    processor = Shy
    arguments = st.builds(Shy.Arguments, by=st.floats(-5, 5))
"""


def run_pytest(folder, *arguments, fresh=False, **environment):
    """Return the output of pytest; a fresh one has not imported hypothesis before it begins."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", *arguments]
    inherited = {**os.environ}
    for name in ("PYTEST_CURRENT_TEST", "HARDPOINT_SEED"):
        inherited.pop(name, None)
    environment = {**inherited, **environment}
    if fresh:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    else:
        done = forked_python().run(command, folder, environment)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shy")
    (folder / "conftest.py").write_text('pytest_plugins = ["hardpoint.testing"]\n')
    (folder / "test_shy.py").write_text(TEST_FILE)
    return folder


@pytest.mark.nightly
def test_a_failure_is_replayed_by_the_command_that_it_prints(folder):
    output = run_pytest(folder, "-k", "test_advance", fresh=True)
    assert "hardpoint conformance suites: HARDPOINT_SEED not set, random" in output
    assert "test_shy.Shy breaks a rule." in output
    section = output.partition("hardpoint conformance: replay")[2]
    (seed, test) = re.search(r"^HARDPOINT_SEED=(\d+) pytest '(.*)'$", section, re.M).groups()
    assert test == "test_shy.py::TestShy::test_advance"
    again = run_pytest(folder, test, HARDPOINT_SEED=seed)
    assert f"hardpoint conformance suites: HARDPOINT_SEED {seed}" in again
    assert f"HARDPOINT_SEED={seed} pytest" in again
    assert "Already imported" not in output
    assert "Warning" not in output


def test_installing_enables_nothing(folder):
    assert not [e for e in entry_points(group="pytest11") if e.value.startswith("hardpoint")]
    output = run_pytest(folder, "--noconftest", "-k", "test_contract")
    assert "1 passed" in output
    assert "hardpoint conformance" not in output


@pytest.mark.nightly
def test_the_scripted_model_needs_neither_pytest_nor_hypothesis():
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from hardpoint.testing import write_scripted_model\n"
        "try: from hardpoint.testing import LogitsProcessorSuite\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert "pytest" in done.stdout


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_has_a_suite(kind):
    assert kind.suite in hardpoint.testing.__all__
    assert issubclass(getattr(hardpoint.testing, kind.suite), ConformanceSuite)


def test_unknown_names_are_rejected():
    with pytest.raises(AttributeError, match=r"'hardpoint\.testing' has no attribute 'Suit'"):
        hardpoint.testing.Suit  # noqa: B018


def test_a_seed_must_be_a_number(monkeypatch):
    monkeypatch.setenv("HARDPOINT_SEED", "lucky")
    with pytest.raises(ValueError, match="HARDPOINT_SEED: expected a whole number, got 'lucky'"):
        search_seed()


@pytest.mark.parametrize("value", ["many", "0", "inf"])
def test_the_scale_must_be_a_positive_number(monkeypatch, value):
    monkeypatch.setenv("HARDPOINT_EXAMPLES", value)
    message = f"HARDPOINT_EXAMPLES: expected a number > 0, got '{value}'"
    with pytest.raises(ValueError, match=message):
        examples_scale()


def test_the_environment_scales_the_number_of_cases(monkeypatch):
    monkeypatch.setenv("HARDPOINT_EXAMPLES", "0.5")
    tried = []

    class Counting(ConformanceSuite):
        def test_rule(self):
            self._search("rule", 8, lambda number: tried.append(number), number=st.integers())

    Counting().test_rule()
    assert len(tried) == 4
    assert replay_line(3).startswith("HARDPOINT_SEED=3 HARDPOINT_EXAMPLES=0.5 pytest ")


class Bent(LogitsProcessorSuite):
    processor = Bias

    def test_history(self):
        """Replaces a test of the suite."""


class Excused(LogitsProcessorSuite):
    processor = Bias

    @pytest.mark.xfail(reason="mixes rows on purpose")
    def test_history(self):
        super().test_history()


def test_replacing_a_test_fails_the_suite():
    with pytest.raises(
        pytest.fail.Exception, match=r"observed: Bent replaces test_history(?s:.)*xfail"
    ):
        Bent().test_contract()


def test_a_test_may_be_excused_with_a_reason():
    Excused().test_contract()


def test_a_violation_while_a_case_is_drawn_ends_the_search():
    drawn = []

    def draw(number):
        drawn.append(number)
        raise Violation(f"{number} is refused", "take it")

    failure = Search(100, seed=7).run(pytest.fail, number=st.integers().map(draw))
    assert failure.violation.observed == f"{drawn[0]} is refused"
    assert len(drawn) == 1


def test_the_same_seed_finds_the_same_case(monkeypatch):
    monkeypatch.setattr(
        kit_suite, "_SHRINKING_SECONDS", 60.0
    )  # time to shrink to the smallest case

    class Suite(ConformanceSuite):
        replay_seed = 7

        def _component(self):
            return MixesRows

        def test_rule(self):
            self._search("rule", 100, check, numbers=st.lists(st.integers()))

    def check(numbers):
        if sum(numbers) > 100:
            raise Violation(f"{numbers} are too many", "give fewer")

    messages = []
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception) as failure:
            Suite().test_rule()
        messages.append(str(failure.value))
    assert "replay: HARDPOINT_SEED=7 pytest" in messages[0]
    assert messages[0] == messages[1]
