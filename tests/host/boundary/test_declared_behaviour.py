"""Calls follow the declarations of the contract, in all kinds, for built-ins and strangers."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
import torch
from support.plugins.io_processors import Nearest
from support.plugins.policies import LOAD, request

import hardpoint
from hardpoint.builtin_plugins.adapters.folder import Folder
from hardpoint.builtin_plugins.balancers.round_robin import RoundRobin
from hardpoint.builtin_plugins.kv_cache.events import NullPublisher
from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.builtin_plugins.policies import Fair
from hardpoint.builtin_plugins.speculators.ngram import NGram
from hardpoint.builtin_plugins.stats.log import LogSink
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.calls.adapter_resolvers import guarded_resolver
from hardpoint.calls.io_processors import guarded_processor
from hardpoint.errors import HardpointError, PluginFaultError, RequestError
from hardpoint.host.boundary import activity
from hardpoint.host.boundary import guard as guard_module
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import boundary_of, checked, guard
from hardpoint.host.boundary.kv_cache import KVEventFanout
from hardpoint.host.boundary.policy import guarded_policy
from hardpoint.host.boundary.text_guards import guarded_parser, guarded_tokenizer
from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins import (
    AdapterResolver,
    BalancerContext,
    DraftRequest,
    EvictionContext,
    EvictionPolicy,
    IOProcessor,
    KVEventPublisher,
    LoadBalancer,
    OutputParser,
    PolicyContext,
    PublisherContext,
    Request,
    SamplingParams,
    SchedulingPolicy,
    Speculator,
    SpeculatorContext,
    StatSink,
    StatSinkContext,
    Tokenizer,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.behaviour import behaviour_of
from hardpoint.plugins.worker_half import AllocatedCache
from hardpoint.testing import ScriptedEngines, scripted_request

A, B = request("a", arrival=1.0), request("b", arrival=2.0)
D = DraftRequest("d", [1], [2], SamplingParams(), None, limit=4)
R, VIEWS = scripted_request("r", [1, 2]), ScriptedEngines(3).views
CACHE = AllocatedCache(None, 4, 16, 1, 1 << 20, group_of=(0,), windows=(None,))
for one in (0, 0, 2):
    VIEWS[one].in_flight += 1
SECONDS = 0.5
KINDS_OF = {
    "scheduling_policies": SchedulingPolicy,
    "eviction_policies": EvictionPolicy,
    "stat_sinks": StatSink,
    "kv_event_publishers": KVEventPublisher,
    "speculators": Speculator,
    "balancers": LoadBalancer,
}
# kind, method, arguments, the call in messages, a wrong value and its message, what decides
CALLS = [
    ("scheduling_policies", "key", (A,), "key() of request 'a'", None, "has no order", None),
    ("scheduling_policies", "group", (A,), "group() of request 'a'", [], "expected some", None),
    ("scheduling_policies", "group_key", ("g", 0.0), "group_key() of group 'g'", 1j, "order", None),
    ("scheduling_policies", "admit", (A, LOAD), "admit() of request 'a'", "", "expected No", None),
    ("scheduling_policies", "victim", ([A, B], LOAD), "victim()", A, "which is not running", B),
    ("scheduling_policies", "added", (A,), "added() of request 'a'", ..., "", None),
    ("scheduling_policies", "scheduled", (A, 1), "scheduled() of request 'a'", ..., "", None),
    ("scheduling_policies", "preempted", (A,), "preempted() of request 'a'", ..., "", None),
    ("scheduling_policies", "finished", (A,), "finished() of request 'a'", ..., "", None),
    ("eviction_policies", "released", ((1,),), "released() of 1 block", ..., "", None),
    ("eviction_policies", "taken", ((1, 2),), "taken() of 2 blocks", ..., "", None),
    ("eviction_policies", "dropped", ((1,),), "dropped() of 1 block", ..., "", None),
    ("eviction_policies", "evict", (2,), "evict(2)", None, "not iterable", None),
    ("stat_sinks", "record", (None,), "record()", ..., "", None),
    ("stat_sinks", "report", (), "report()", ..., "", None),
    ("stat_sinks", "exposition", (None,), "exposition()", 1, "expected a str", ""),
    ("stat_sinks", "close", (), "close()", ..., "", None),
    ("kv_event_publishers", "publish", (None,), "publish()", ..., "", None),
    ("kv_event_publishers", "close", (), "close()", ..., "", None),
    ("speculators", "propose", ((D,), 4), "propose()", 7, "expected token ids for each", [[]]),
    ("speculators", "verified", (D, [1], 0), "verified() of request 'd'", ..., "", None),
    ("speculators", "cache_allocated", (CACHE,), "cache_allocated()", ..., "", None),
    ("speculators", "cache_released", (), "cache_released()", ..., "", None),
    ("balancers", "choose", (R, VIEWS), "choose() of request 'r'", 3, "an index of engines, f", 1),
    ("speculators", "ended", (D,), "ended() of request 'd'", ..., "", None),
]  # fmt: skip
CONTEXTS = {
    "balancers": (BalancerContext, {"num_engines": 3, "clock": None}),
    "scheduling_policies": (PolicyContext, {}),
    "eviction_policies": (EvictionContext, {"blocks": None, "history": None, "clock": None}),
    "stat_sinks": (StatSinkContext, {"clock": None, "model": "m"}),
    "kv_event_publishers": (PublisherContext, {}),
    "speculators": (
        SpeculatorContext,
        dict.fromkeys(
            [
                "device",
                "vocab_size",
                "hidden_size",
                "max_num_seqs",
                "max_model_len",
                "num_draft_tokens",
            ]
        ),
    ),
}
BUILT_IN = {
    "scheduling_policies": Fair,
    "eviction_policies": LeastRecentlyUsed,
    "stat_sinks": LogSink,
    "kv_event_publishers": NullPublisher,
    "speculators": NGram,
    "balancers": RoundRobin,
}
cases = pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]}-{case[1]}")


class Guarded:
    """A guarded plugin of which one method does something else, and the books of its faults."""

    def __init__(self, case, does, *, built_in=False, ends_engine=()):
        kind, method, self.arguments, *_ = case
        interface = KINDS_OF[kind]
        base = BUILT_IN[kind] if built_in else interface
        others = {n: lambda *_: 0.0 for n in interface.__abstractmethods__} if not built_in else {}
        cls = type("Odd", (base,), {"contract": 1, **others, method: does})
        cls.__abstractmethods__ = frozenset()
        context, fields = CONTEXTS[kind]
        component = cls.__new__(cls)
        component.context = context(name="odd", options=None, **fields)
        component.name, component.options = "odd", None
        origin = ("hardpoint", "0.1.0") if built_in else ("acme", "1.0")
        source = Source("odd", "acme:Odd", *origin, "default")
        self.faults = StepFaults(ends_engine, slow_seconds=SECONDS)
        report, calls = self.faults.reporter(source), self.faults.calls(kind, source)
        if kind == "scheduling_policies":
            self.plugin = guarded_policy(component, report, calls)
        else:
            self.plugin = guard(component, kind, report, calls)
        self.method = method

    def call(self):
        return getattr(self.plugin, self.method)(*self.arguments)

    @property
    def message(self):
        """The message of the only fault, without the plugin's description."""
        (fault,) = self.faults.report().values()
        assert fault.count == 1
        return fault.message.partition("): ")[2] or fault.message.partition("default: ")[2]


def raising(error):
    def method(*_, **__):
        raise error

    return method


def answers(case, does):
    """Return the results and messages of a stranger's and a built-in's method; both agree."""
    found = []
    for built_in in (False, True):
        guarded = Guarded(case, does, built_in=built_in)
        result = guarded.call()
        found.append((result, guarded.message))
    assert found[0][1] == found[1][1]
    assert found[0][0] == found[1][0]
    return found[0]


def test_the_table_has_every_declared_method():
    declared = {
        (kind.name, name)
        for kind in KINDS.values()
        if kind.interface is not None
        for name in dir(kind.interface)
        if behaviour_of(kind.interface, name) is not None
    }
    # A parser of tools has the interface of one of reasoning.
    declared = {(k.replace("tool_", "reasoning_"), method) for k, method in declared}
    assert declared == {
        (kind, method) for kind, method, *_ in [*CALLS, *RAISING, *RETURNING_ANYTHING, *CHECKED]
    }


@cases
@pytest.mark.parametrize("error", [ValueError("oh"), KeyboardInterrupt("oh"), SystemExit(3)])
def test_it_raises(case, error):
    result, message = answers(case, raising(error))
    assert message == f"{case[3]} failed: {type(error).__name__}: {error}"
    if case[1] not in ("key", "group_key"):
        assert result == case[6]


@cases
def test_an_interrupt_of_the_user_passes(case):
    for built_in in (False, True):
        guarded = Guarded(case, lambda *_: signal.raise_signal(signal.SIGINT), built_in=built_in)
        with pytest.raises(KeyboardInterrupt):
            guarded.call()
        assert guarded.faults.report() == {}


@cases
def test_it_returns_something_else(case):
    if case[4] is ...:  # the result of a notification is not used
        guarded = Guarded(case, lambda *_: object())
        assert guarded.call() is None
        assert guarded.faults.report() == {}
        return
    result, message = answers(case, lambda *_: case[4])
    assert message.startswith(case[3])
    assert case[5] in message
    if case[1] not in ("key", "group_key"):
        assert result == case[6]


def writing(self, first=None, *_):
    """Write into what it was given: a request, several, or ids of blocks."""
    if isinstance(first, Request):
        first.request_id = "stolen"
    for one in first if isinstance(first, tuple) else ():
        if isinstance(one, Request):
            one.request_id = "stolen"
    first.clear()


@cases
def test_it_writes(case):
    """Nothing that it gets can be changed; trying to is a fault like any other."""
    result, message = answers(case, writing)
    assert message.startswith(f"{case[3]} failed: AttributeError: ")
    if case[1] not in ("key", "group_key"):
        assert result == case[6]
    assert (A.request_id, B.request_id) == ("a", "b")


@cases
def test_it_is_slow(case, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(guard_module.time, "perf_counter", lambda: now[0])

    def wait(*_):
        now[0] += 2 * SECONDS

    for built_in in (False, True):
        guarded = Guarded(case, wait, built_in=built_in)
        guarded.call()
        assert guarded.faults.slow()["odd"].count == 1


@cases
def test_it_ends_the_engine_where_it_is_configured(case):
    for built_in in (False, True):
        guarded = Guarded(case, raising(ValueError("oh")), built_in=built_in, ends_engine=["odd"])
        with pytest.raises(PluginFaultError, match=r"^plugin 'odd' .*failed: ValueError: oh$"):
            guarded.call()


# kind, method, arguments, a wrong value, start of the message; the call fails
RAISING = [
    ("tokenizers", "encode", ("x",), 1, "returned 1, expected token ids: TypeError: "),
    ("tokenizers", "encode_pair", ("x", "y"), 1, "returned 1, expected "),
    ("tokenizers", "decode", ([1],), b"x", "returned b'x', expected text"),
    ("tokenizers", "decode_stream", ([1],), None, "returned None, which has no step()"),
    ("tokenizers", "apply_chat_template", ([],), 1, "returned 1, expected text"),
    ("tokenizers", "vocabulary", (), [], "returned [], expected a Vocabulary"),
    ("tokenizers", "vocab_size", None, "9", "returned '9', expected a number of tokens"),
    ("tokenizers", "special_tokens", None, {"x": "y"}, "returned 'x': 'y', expected a token id"),
    ("tokenizers", "chat_template", None, 1, "returned 1, expected text"),
    (
        "tokenizers",
        "chat_templates",
        None,
        {"x": 1},
        "returned 'x': 1, expected a text by",
    ),
    ("tokenizers", "eos_token_ids", None, None, "returned None, expected token ids: TypeError: "),
    ("reasoning_parsers", "markers", (), (), "returned (), expected ReasoningMarkers"),
    ("reasoning_parsers", "token_ids", None, 1, "returned 1, expected token ids: TypeError: "),
    ("reasoning_parsers", "call_format", ({},), "x", "returned no Format: StructuralTag.format: "),
    (
        "adapter_resolvers",
        "resolve",
        ("x",),
        "y",
        "returned 'y', expected a Path, a LoRAReque",
    ),
    ("reasoning_parsers", "open", (None,), "x", "failed: AttributeError: 'str' object has no att"),
    ("io_processors", "pre_process", (None,), "y", "returned 'y', expected a list of pairs of a"),
    ("io_processors", "output_to_response", (None,), 1j, "returned 1j, which is no JSON: NotImpl"),
]
RETURNING_ANYTHING = [
    ("io_processors", "parse_request", (None,)),
    ("io_processors", "post_process", (None, [])),
]
"""Kind, method and arguments: no value is wrong."""
GUARDS = {
    "io_processors": (
        IOProcessor,
        Nearest,
        lambda processor, source, vocab_size: guarded_processor(processor, source),
    ),
    "adapter_resolvers": (
        AdapterResolver,
        Folder,
        lambda resolver, source, vocab_size: guarded_resolver(resolver, source),
    ),
    "tokenizers": (Tokenizer, TransformersTokenizer, guarded_tokenizer),
    "reasoning_parsers": (
        OutputParser,
        ThinkTags,
        functools.partial(guarded_parser, kind="reasoning_parsers"),
    ),
}


def named(case, does, *, built_in):
    """Return the guarded component of which one member does something else."""
    kind, member, arguments, *_ = case
    interface, own, guarded = GUARDS[kind]
    members = {"contract": 1, member: property(does) if arguments is None else does}
    cls = type("Odd", (own if built_in else interface,), members)
    cls.__abstractmethods__ = frozenset()
    odd = cls.__new__(cls)
    odd.context = PolicyContext(name="odd", options=None)
    source = Source("odd", "acme:Odd", "hardpoint" if built_in else "acme", "1.0", "default")
    return guarded(odd, source=source, vocab_size=9)


def use(component, case, **options):
    value = getattr(component, case[1])
    if case[1] == "call_format":
        options["required"] = True
    return value if case[2] is None else value(*case[2], **options)


def error_of(case, does):
    """Return the error of a method, which is the same for a stranger's plugin and a built-in."""
    found = []
    for built_in in (False, True):
        guarded = named(case, does, built_in=built_in)
        with pytest.raises((HardpointError, NotImplementedError)) as error:
            use(guarded, case)
        source = boundary_of(guarded).calls.source
        words = str(error.value).removeprefix(f"{source}: ")
        found.append((type(error.value), words.removeprefix("output parser 'odd': ")))
        if type(error.value) is PluginFaultError:
            assert error.value.plugin == "odd"  # health counts it under this name
    assert found[0] == found[1]
    return found[0]


def fault_class(case):
    declared = behaviour_of(GUARDS[case[0]][0], case[1])
    return RequestError if declared.refuses else PluginFaultError


named_cases = pytest.mark.parametrize("case", RAISING, ids=lambda case: f"{case[0]}-{case[1]}")
failing_cases = pytest.mark.parametrize(
    "case", [*RAISING, *RETURNING_ANYTHING], ids=lambda case: f"{case[0]}-{case[1]}"
)


@failing_cases
@pytest.mark.parametrize("error", [KeyError("oh"), KeyboardInterrupt("oh"), SystemExit(3)])
def test_it_raises_and_the_call_fails(case, error):
    expected = f"its {case[1]} failed: {type(error).__name__}: {error}"
    assert error_of(case, raising(error)) == (fault_class(case), expected)


@failing_cases
def test_it_raises_what_is_meant_for_the_caller(case):
    for error in (RequestError("no"), NotImplementedError("no")):
        cls, words = error_of(case, raising(error))
        passes = isinstance(error, behaviour_of(GUARDS[case[0]][0], case[1]).raises)
        assert cls is (type(error) if passes else fault_class(case))
        assert (words == "no") is passes


@failing_cases
def test_an_interrupt_of_the_user_passes_a_call_that_fails(case):
    for built_in in (False, True):
        interrupted = named(case, lambda *_, **__: signal.raise_signal(2), built_in=built_in)
        with pytest.raises(KeyboardInterrupt):
            use(interrupted, case)


@named_cases
def test_it_returns_something_else_and_the_call_fails(case):
    cls, message = error_of(case, lambda *_, **__: case[3])
    assert cls is fault_class(case)
    assert message.startswith(f"its {case[1]} {case[4]}")


@named_cases
def test_what_fails_late_is_a_fault_of_the_method_that_gave_it(case):
    """A value that fails when it is read: before anything of it reaches the engine."""

    class Unreadable:
        def __repr__(self):
            return "odd"

        def __getattr__(self, name):
            raise OSError("late")

        def __iter__(self):
            raise OSError("late")

    cls, message = error_of(case, lambda *_, **__: Unreadable())
    assert cls is fault_class(case)
    assert message.startswith(f"its {case[1]} ")


@failing_cases
def test_a_call_that_fails_is_timed(case, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(activity.time, "perf_counter", lambda: now[0])

    def wait(*_, **__):
        now[0] += 2 * SECONDS
        raise LookupError("oh")

    for built_in in (False, True):
        guarded = named(case, wait, built_in=built_in)
        with pytest.raises(HardpointError):
            use(guarded, case)
        assert boundary_of(guarded).calls.seconds == 2 * SECONDS


# kind, method, a wrong value, start of the message. The calls are written by hand: models,
# attention and samplers for their speed, the others since the consequence is that of their call.
CHECKED = [
    ("models", "weight_shapes", {"x": "y"}, "gave {'x': 'y'}, expected a shape per name"),
    ("models", "weight_cuts", {"x": 1}, "gave {'x': 1}, expected a Cut inside of the shape of ea"),
    ("models", "quantizable", "x", "gave 'x', expected names"),
    ("models", "kv_specs", [1], "gave [1], expected a list of KVSpec of whole numbers >= 1, a f"),
    ("models", "state_specs", [1], "gave [1], expected a list with a tuple of TensorSpec per lay"),
    ("models", "routed_experts", (1,), "gave (1,), expected layers and experts per token, or No"),
    ("models", "kv_variant", None, "gave None, expected a string"),
    ("attention_backends", "bytes_per_block", 0, "gave 0, expected an int >= 1"),
    ("poolers", "start", 7, "returned int, expected PromptPooler"),
    ("activation_taps", "sites", [], "gave [], expected TapSites, at least one, each once"),
    ("activation_taps", "cache_key", "a", "returned str, expected bytes"),
    ("quantizations", "quantize", 1, "gave 1, expected a QuantizedMatrix"),
    ("quantizations", "read", 1, "gave 1, expected a QuantizedMatrix"),
    ("quantizations", "alignment", 0, "gave 0, expected a whole number >= 1"),
    ("quantizations", "stored_bytes", -1, "gave -1, expected a number of bytes, or None"),
    ("loaders", "formats", [], "gave [], expected a WeightFormat per name"),
    ("samplers", "sample", None, "expected token ids int64 [2] on cpu, got None"),
    ("schedulers", "schedule", None, "returned NoneType, expected SchedulerOutput"),
    ("schedulers", "stats", None, "returned NoneType, expected SchedulerStats"),
    ("schedulers", "update", None, "returned NoneType, expected dict"),
    ("executors", "execute_model", None, "returned NoneType, expected Future"),
    ("grammars", "validate", 1, "returned 1, expected text or None"),
]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_result_is_checked_where_the_call_is_written_by_hand(case):
    kind, method, value, words = case
    arguments = (torch.zeros(2, 3),)
    with pytest.raises(PluginFaultError) as error:
        checked(value, KINDS[kind].interface, method, "plugin 'odd'", arguments=arguments)
    assert str(error.value).startswith(f"plugin 'odd': its {method} {words}")


class Late:
    """A value that fails when it is used, after the method has returned."""

    def __init__(self):
        self.used = 0

    def __lt__(self, other):
        self.used += 1
        if other is not self:
            raise OSError("late")
        return False


def test_what_fails_after_its_method_returned_is_a_fault_of_it_too():
    case = next(case for case in CALLS if case[1] == "key")
    guarded = Guarded(case, lambda self, request: Late())
    one, other = guarded.call(), guarded.plugin.key(B)
    assert one < other  # by arrival
    assert guarded.message == "key() of requests 'a' and 'b' do not compare: OSError: late"


def endless(self, count):
    yield 1
    raise OSError("late")


def test_what_fails_while_it_is_read_is_a_fault_of_its_method():
    case = next(case for case in CALLS if case[1] == "evict")
    assert answers(case, endless) == (None, "evict(2) failed: OSError: late")


def test_one_of_several_that_fails_keeps_nobody_from_being_called():
    case = next(case for case in CALLS if case[1] == "publish")
    called = []
    broken = Guarded(case, raising(ValueError("oh")))
    sound = Guarded(case, lambda self, batch: called.append(batch))
    parts = [
        (g.plugin.wrapped, g.plugin.boundary.report, g.plugin.boundary.calls)
        for g in (broken, sound)
    ]
    KVEventFanout(parts, lambda: 1.0).publish(["event"])
    assert [batch.events for batch in called] == [["event"]]
    assert broken.message == "publish() failed: ValueError: oh"


def test_where_it_matters_whose_a_plugin_is():
    """Each module here is named in the docstring of `is_third_party`."""
    root = Path(hardpoint.__file__).parent
    folders = ("host", "core", "builtin_plugins")
    asking = {
        f"{folder}/{path.relative_to(root / folder)}"
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if "is_third_party(" in path.read_text()
    }
    expected = {
        "host/boundary/activity.py",
        "host/boundary/plugin_health.py",
        "host/boundary/step_check.py",
        "core/frontend/frontend.py",
        "core/frontend/requests/submission.py",
        "core/frontend/engine_owner.py",
    }
    assert asking == expected | {"host/registry/discovery.py"}
