"""The adapter and adapted classes keep the rules of their kinds; broken processors do not."""

import os

import foreign
import pytest
from hardpoint_vllm import VLLM
from hardpoint_vllm.stand_ins import stand_ins
from hypothesis import strategies as st

from hardpoint.plugins.component import Source
from hardpoint.testing import (
    ComponentAdapterSuite,
    IOProcessorSuite,
    LogitsProcessorSuite,
    OutputParserSuite,
    OutputSample,
    StatSinkSuite,
)

with stand_ins():
    import vllm_connecting
    import vllm_parsing
    import vllm_serving

pytest_plugins = ["hardpoint.testing"]


def adapted(target):
    """Return the component that the adapter makes of an object."""
    return VLLM.adapt(target, Source.of_module("thing", "elsewhere:Thing", "a test"))


def component(target, **options):
    """Return the component that the loader makes of a logits processor."""
    made = adapted(target)
    return made.configured(made.Options(**options))


class TestVLLM(ComponentAdapterSuite):
    adapter = VLLM
    targets = [
        foreign.MinP,
        foreign.OneToken,
        foreign.SlotToken,
        foreign.forcing,
        foreign.Stepping,
        foreign.two_parameters,
        foreign.boost,
        vllm_parsing.Pipes,
        vllm_parsing.Arrows,
        vllm_serving.Numbers,
        vllm_serving.LatencyLogger,
        vllm_connecting.FolderConnector,
    ]
    refused = [
        foreign.TwoArguments,
        foreign.OldApply,
        foreign.four_parameters,
        vllm_parsing.WithoutMethod,
        vllm_serving.WithoutParsing,
        vllm_serving.Unfinished,
        vllm_connecting.NeedsPool,
        vllm_connecting.Unfinished,
    ]
    modules = ["vllm", "vllm.config", "vllm.v1.sample.logits_processor"]


def with_extra(name, values):
    return st.builds(lambda value: {"extra_args": {name: value}}, values)


TARGETS = with_extra("target_token", st.integers(14, 120))


class TestV0Factory(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.forcing, phase="force")
    arguments = with_extra("token", st.integers(0, 120))


class TestV0Class(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.Stepping, phase="force")
    arguments = with_extra("token", st.integers(0, 120))


class TestV0Callable(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.two_parameters)
    arguments = st.just({})


class TestV1Tokens(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.OneToken)
    arguments = TARGETS


class TestV1Invariant(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.MinP)
    arguments = with_extra("min_p", st.floats(0.01, 0.9))


class TestV1WithState(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.Sums)
    arguments = with_extra("on", st.just(True))


class TestV2Tokens(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.SlotToken)
    arguments = TARGETS


class TestV2History(LogitsProcessorSuite):
    examples = 0.3
    processor = component(foreign.Echo)
    arguments = st.just({})


class TestReasoning(OutputParserSuite):
    parser = adapted(vllm_parsing.Pipes)
    samples = [
        OutputSample("I think.||Yes.", "I think.", "Yes."),
        OutputSample("Yes.", content="Yes."),
    ]


class TestCalls(OutputParserSuite):
    parser = adapted(vllm_parsing.Arrows)
    samples = [
        OutputSample(
            'Wait.->now{"city": "Rome"}',
            content="Wait.",
            calls=[("now", {"city": "Rome"})],
            tools={"now": {"type": "object"}},
        ),
        OutputSample("Yes.", content="Yes."),
        OutputSample('->later{"a": 1}', content='->later{"a": 1}', malformed=True),
    ]


@pytest.mark.parametrize(
    ("target", "arguments", "test", "pattern"),
    [
        (foreign.CountsCalls, with_extra("on", st.just(True)), "pure", "differ"),
        (
            foreign.Locked,
            with_extra("on", st.just(True)),
            "drafts",
            "give the class a __deepcopy",
        ),
        (foreign.OldSlots, TARGETS, "history", "differ"),
        (foreign.RowsAsSlots, TARGETS, "history", "differ"),
    ],
)
def test_the_suite_names_what_is_wrong(target, arguments, test, pattern):
    suite = type("Suite", (LogitsProcessorSuite,), {})
    suite.processor, suite.arguments = component(target), arguments
    suite.examples = 1 / float(os.environ.get("HARDPOINT_EXAMPLES", "1"))
    with pytest.raises(pytest.fail.Exception, match=pattern):
        getattr(suite(), f"test_{test}")()


class TestNumbers(IOProcessorSuite):
    processor = adapted(vllm_serving.Numbers)
    options = {"pooler": "mean"}
    samples = [{"rows": [[20], [30, 40]]}, {"rows": [[50, 60, 70]]}]
    refused = [{"rows": 3}, {"row": []}]


class TestAsyncNumbers(IOProcessorSuite):
    processor = adapted(vllm_serving.AsyncNumbers)
    samples = [{"rows": [[20], [30, 40]]}, {"rows": [[50, 60, 70]]}]


class TestLatencyLogger(StatSinkSuite):
    sink = adapted(vllm_serving.LatencyLogger)
