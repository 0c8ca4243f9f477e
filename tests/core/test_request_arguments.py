"""Arguments of requests for policies, samplers and reasoning parsers."""

from __future__ import annotations

import pytest
from support.driving import FINAL, run
from support.plugins.arguments import Tagged

from hardpoint import ConfigError, RequestError, SamplingParams
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing import scripted_engine

HERE = "support.plugins.arguments"
CHOSEN = {
    "scheduler": {"policy": f"{HERE}:Classes", "max_num_seqs": 1},
    "sampler": {"use": f"{HERE}:Rank"},
    "reasoning": {"parser": "tagged"},
    "plugins": {"enable": [f"{HERE}:Tagged"]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["in-process", "own-process"])
def engine(request, scripted):
    engine = scripted_engine(scripted, CHOSEN | {"engine": {"in_process": request.param}})
    yield engine
    engine.close()
    assert Tagged.OPEN == []


@pytest.fixture
def opened(scripted):
    """Open engines in this process; they are closed after the test."""
    engines = []

    def open_it(*, policy="Classes", **extra):
        extra = {"scheduler": {"policy": f"{HERE}:{policy}", "max_num_seqs": 1}} | extra
        engines.append(scripted_engine(scripted, extra))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.close()


def params(arguments=None, **fields):
    fields = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | fields
    return SamplingParams(**fields, plugin_args=arguments or {})


def order(engine):
    """Finish all requests; return their ids in the order of their ends."""
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    return ended


def refused(engine, arguments, **fields):
    with pytest.raises(RequestError) as error:
        engine.add_request("x", "x", params(arguments, **fields))
    return str(error.value)


def test_a_policy_reads_what_a_request_gives_or_the_defaults(engine):
    engine.call_utility("pause", "keep")  # until all have arrived
    engine.add_request("plain", "a", params())
    engine.add_request("heavy", "b", params({"classes": {"weight": 2}}))
    chat = {"scheduling_policies/classes": {"deadline_class": "chat"}}
    engine.add_request("chat", "c", params(chat, n=2))
    engine.call_utility("resume")
    ended = order(engine)
    assert ended[-2:] == ["heavy", "plain"]
    assert "chat" in ended[:2]
    assert engine.health().ok
    assert engine.health().fallbacks == {}


def tokens(engine, *ranks, **fields):
    """Return the tokens of one request for each rank, in a batch."""
    given = [{} if rank is None else {"rank": {"rank": rank}} for rank in ranks]
    jobs = [(str(i), "say abc", params(one, **fields)) for i, one in enumerate(given)]
    return [[completion[1] for completion in run(engine, jobs)[name][0]] for name, _, _ in jobs]


def test_a_sampler_gets_the_arguments_of_each_row(engine, opened):
    (none,), (first,), (third,) = tokens(engine, None, 0, 2)
    assert none == first != third
    assert tokens(engine, 2, n=2, **FINAL) == [[third, third]]
    many = opened(sampler=CHOSEN["sampler"], scheduler={"max_num_seqs": 3})
    assert tokens(many, None, 0, 2) == [[none], [first], [third]]


def test_a_sampler_gets_them_again_after_a_preemption(opened):
    sampler = CHOSEN["sampler"]
    ample = tokens(opened(sampler=sampler, scheduler={}), 0, 2, 3, max_tokens=40)
    tight = {"scheduler": {"max_num_seqs": 3}, "kv_cache": {"block_size": 4, "num_blocks": 18}}
    engine = opened(sampler=sampler, max_model_len=64, **tight)
    assert tokens(engine, 0, 2, 3, max_tokens=40) == ample
    assert engine.call_utility("scheduler_stats").num_preemptions > 0


def test_a_parser_gets_them_for_its_request_alone(engine):
    def ended(prompt, arguments=None):
        budget = {"thinking_token_budget": 0, "max_tokens": 8}
        (completion,) = run(engine, [("r", prompt, params(arguments, **budget))])["r"][0]
        return completion[2]

    assert ended("so <think>") == "</think>"
    assert not ended("so <hm>").startswith("</hm>")
    assert ended("so <hm>", {"tagged": {"tag": "hm"}}).startswith("</hm>")
    assert ended("so <think>") == "</think>"
    assert len(Tagged.OPEN) == 1


@pytest.mark.parametrize("name", ["tagged", "reasoning_parsers/tagged"])
def test_a_parser_that_a_request_chooses_gets_no_arguments(engine, name):
    words = refused(engine, {name: {"tag": "hm"}}, reasoning_parser="think_tags")
    assert words == (
        "plugin_args.tagged: expected none where reasoning_parser or tool_parser chooses a parser, "
        "which gets no arguments"
    )
    assert not engine.has_unfinished_requests()
    engine.add_request("r", "so <think>", params(reasoning_parser="think_tags"))
    assert order(engine) == ["r"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"classes": {"weight": 0}}, "plugin_args.classes.weight: expected a number > 0, got 0"),
        (
            {"scheduling_policies/classes": {"no": 0}},
            "plugin_args.scheduling_policies/classes.no: unknown field; known here: "
            "deadline_class, weight",
        ),
        ({"rank": {"rank": 10}}, "plugin_args.rank.rank: expected a whole number <= 9, got 10"),
        ({"tagged": {"tag": ""}}, "plugin_args.tagged.tag: expected a string of length >= 1"),
        (
            {"classes": {}, "scheduling_policies/classes": {}},
            "plugin_args.scheduling_policies/classes: given twice, here and by plugin_args.classes",
        ),
        ({"lru": {"a": 1}}, "plugin_args.lru: eviction_policies/lru takes no arguments"),
        (
            {"default": {}},
            "plugin_args.default: schedulers/default takes no arguments",
        ),
        (
            {"clases": {}},
            "plugin_args.clases: no enabled plugin of that name takes arguments "
            "(did you mean 'classes'?)",
        ),
        (
            {"bad_words": {"encoded": [[3]]}},
            "plugin_args.bad_words.encoded: unknown field; known here: bad_words, sequences",
        ),
        (
            {"thinking_budget": {"thinking_token_budget": 1, "closing": [3]}},
            "plugin_args.thinking_budget.closing: unknown field; known here: "
            "thinking_token_budget, start, end",
        ),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_its_path(engine, arguments, words):
    assert refused(engine, arguments).startswith(words)
    assert not engine.has_unfinished_requests()


def test_a_prebuilt_request_gives_arguments_as_a_caller_does(engine):
    def add(**plugin_args):
        fields = {"prompt_token_ids": [5], "params": params(), "plugin_args": plugin_args}
        engine.add_request("x", EngineCoreRequest(request_id="x", **fields))

    with pytest.raises(RequestError, match=r"^plugin_args\.bad_words\.encoded: unknown field"):
        add(bad_words={"encoded": [[3]]})
    add(rank={"rank": 1}, classes={"weight": 2})
    assert order(engine) == ["x"]


def test_a_name_of_two_components_needs_its_kind(opened):
    enable = [{"use": "support.plugins.slow:Slow", "name": "rank"}]
    engine = opened(sampler=CHOSEN["sampler"], plugins={"enable": enable})
    assert refused(engine, {"rank": {"rank": 1}}) == (
        "plugin_args.rank: could be logits_processors/rank or samplers/rank"
    )
    both = {"samplers/rank": {"rank": 1}, "logits_processors/rank": {"seconds": 0.0}}
    engine.add_request("x", "x", params(both))
    assert order(engine) == ["x"]


class TestLiveChange:
    def engine(self, opened, arguments, **extra):
        engine = opened(**extra)
        for name, given in arguments.items():
            engine.add_request(name, "x", params({"classes": given} if given else {}))
            if name == "a":
                engine.step()  # it runs, the others wait
        return engine

    def test_the_arguments_of_live_requests_become_those_of_the_new_policy(self, opened):
        weights = {"a": {"weight": 1}, "b": {}, "c": {"weight": 5}, "d": {"weight": 9}}
        engine = self.engine(opened, weights)
        engine.set_policy(f"{HERE}:ByWeight")
        engine.add_request("e", "x", params({"by_weight": {"weight": 7}}))
        assert refused(engine, {"by_weight": {"doubled": 7}}).endswith("known here: weight")
        assert refused(engine, {"classes": {"weight": 7}}).startswith(
            "plugin_args.classes: no enabled plugin of that name takes arguments"
        )
        engine.set_policy(f"{HERE}:Classes")
        engine.set_policy(f"{HERE}:ByWeight")
        assert order(engine) == ["a", "d", "e", "c", "b"]
        assert engine.health().fallbacks == {}

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (
                f"{HERE}:ByWeight",
                "scheduler.policy: request 'c' does not fit the new policy: "
                "plugin_args.by_weight.deadline_class: unknown field; known here: weight",
            ),
            (
                "fcfs",
                "scheduler.policy: request 'b' does not fit the new policy: plugin_args.fcfs: "
                "scheduling_policies/fcfs takes no arguments, got {'weight': 2.0}",
            ),
        ],
    )
    def test_one_that_does_not_fit_leaves_everything_as_it_is(self, opened, policy, words):
        given = {"a": {}, "b": {"weight": 2}, "c": {"deadline_class": "chat"}}
        engine = self.engine(opened, given)
        before = engine.parts.plugins.manifest
        with pytest.raises(ConfigError) as error:
            engine.set_policy(policy)
        assert str(error.value) == words
        assert engine.parts.plugins.manifest == before
        engine.add_request("d", "x", params({"classes": {"deadline_class": "chat", "weight": 2}}))
        assert order(engine) == ["a", "d", "c", "b"]
        engine.set_policy(policy)
        assert engine.health().fallbacks == {}

    def test_what_prepare_refuses_does_not_fit(self, opened):
        engine = self.engine(opened, {"a": {}, "b": {"weight": 200}})
        words = r"request 'b' does not fit .*: plugin_args\.by_weight: weight: expected at most 100"
        with pytest.raises(ConfigError, match=words):
            engine.set_policy(f"{HERE}:ByWeight")
        assert order(engine) == ["a", "b"]

    def test_an_error_after_the_conversion_restores_it(self, opened):
        engine = opened(policy="Exporting")
        for name, given in {"a": {}, "b": {}, "c": {"weight": 2}}.items():
            engine.add_request(name, "x", params({"exporting": given}))
            if name == "a":
                engine.step()
        with pytest.raises(PluginFaultError, match="no such state"):
            engine.set_policy(f"{HERE}:FailsOnImport")
        assert order(engine) == ["a", "c", "b"]
        assert engine.health().fallbacks == {}
