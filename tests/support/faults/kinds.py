"""How the plugins of each kind are configured and used, and which of their methods misbehave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardpoint import RequestOutputKind, SamplingParams
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from support.core.scripted_connector import Script, use
from support.faults import plugins
from support.faults.plugins import NAME, USE

Request = tuple[str, Any, SamplingParams, RequestExtras]
Action = Callable[[LLMEngine], Any]


def request(name: str, prompt: Any = "say abc", *, extras: Any = None, **fields: Any) -> Request:
    """Return a request of four tokens."""
    defaults = {"temperature": 0.0, "max_tokens": 4, "output_kind": RequestOutputKind.FINAL_ONLY}
    return name, prompt, SamplingParams(**{**defaults, **fields}), extras or RequestExtras()


BOTH = (request("bad", plugin_args={NAME: {}}), request("good"))
PLAIN = (request("bad"),)
LONG = tuple(request(f"long-{n}", [n] * 24, max_tokens=8, ignore_eos=True) for n in range(4))
GROWING = tuple(request(f"long-{n}", [n] * 5, max_tokens=24, ignore_eos=True) for n in range(3))
SMALL = {"kv_cache": {"block_size": 4, "num_blocks": 20}, "max_model_len": 64}
FEW_BLOCKS = {"kv_cache": {"block_size": 4, "num_blocks": 10}, "max_model_len": 36}


@dataclass(frozen=True)
class Setup:
    """How some methods of a kind's plugins are made to misbehave.

    Attributes:
        kind: kind of the plugins.
        base: what works.
        methods: methods that misbehave; `State.feed` is that of the objects of `base.State`.
        void: those of them that return nothing, so that None is right.
        config: further configuration.
        requests: to run.
        again: what is run after them, in a second round.
        actions: control calls that follow, by name.
        more: further misbehaviours by method: name -> a function in its place.
        model: "scripted" or "llama".
        tick: seconds by which each reading advances the clock.
        before: is called before each case.
        late: methods that misbehave from the end of the start on, too.
        messages: messages of a chat, instead of requests.
        variant: name of the configuration, in the name of the misbehaviour.
    """

    kind: str
    base: type
    methods: Sequence[str]
    void: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    requests: Sequence[Request] = PLAIN
    again: Sequence[Request] = ()
    actions: Mapping[str, Action] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Callable[..., Any]]] = field(default_factory=dict)
    model: str = "scripted"
    tick: float = 1e-6
    before: Callable[[], Any] = lambda: None
    late: Sequence[str] = ()
    messages: Sequence[Mapping[str, str]] = ()
    variant: str = ""


def utility(name: str, *args: Any) -> Action:
    """Return the action that calls a utility."""
    return lambda engine: engine.call_utility(name, *args)


ENABLED = {"plugins": {"enable": [USE]}}


def another(engine: LLMEngine) -> None:
    """Run one more request."""
    engine.add_request(*request("another", [9] * 24))
    for _ in range(100):
        if not engine.has_unfinished_requests():
            return
        for output in engine.step():
            if output.outputs[0].error is not None:
                raise RuntimeError(output.outputs[0].error)
    raise TimeoutError("the request does not end")


ASLEEP = {"sleep": utility("sleep", 2), "wake_up": utility("wake_up"), "another": another}
RESET = {"reset_prefix_cache": utility("reset_prefix_cache")}

VOID = {"start_row", "advance_rows", "update_state"}
LOGITS = [
    Setup(
        "logits_processors",
        base,
        [*methods, "close"],
        void=[*sorted(VOID.intersection(methods)), "close"],
        config=ENABLED,
        requests=BOTH,
        more=more,
    )
    for base, methods, more in (
        (
            plugins.Dense,
            ["__init__", "prepare", "uses", "start", "advance", "apply"],
            {"apply": {"cuts the rows": plugins.cut_row}},
        ),
        (plugins.Observing, ["observe", "start"], {}),
        (plugins.Sparse, ["edits"], {}),
        (plugins.Whole, ["uses", "update_state", "apply"], {}),
        (plugins.OnDevice, ["device_state", "start_row", "advance_rows"], {}),
    )
]
SAMPLERS = [
    Setup(
        "samplers",
        plugins.Greedy,
        ["__init__", "prepare", "sample", "close"],
        void=["close"],
        config={"sampler": {"use": USE}},
        requests=BOTH,
        more={"sample": {"leaves the vocabulary": plugins.cut_vocabulary}},
    )
]
SCHEDULERS = [
    Setup(
        "schedulers",
        plugins.Scheduling,
        [
            "__init__",
            "add_request",
            "schedule",
            "update",
            "finish_requests",
            "num_unfinished_requests",
            "has_requests",
            "stats",
            "live_requests",
            "set_policy",
            "set_pause",
            "reset_prefix_cache",
            "close",
        ],
        void=["add_request", "set_policy", "set_pause", "reset_prefix_cache", "close"],
        config={"scheduler": {"use": USE}, "stats": {"sinks": ["log"]}},
        actions={
            "scheduler_stats": utility("scheduler_stats"),
            "live_requests": utility("live_requests"),
            "set_policy": lambda engine: engine.set_policy("priority"),
            **RESET,
            "add": lambda engine: engine.add_request(*request("late")),
            "abort": lambda engine: engine.abort_requests(["late"]),
            "pause": utility("pause"),
        },
    ),
    Setup(
        "schedulers",
        plugins.Scheduling,
        ["why_waiting"],
        config={"scheduler": {"use": USE}},
        actions={
            "add": lambda engine: engine.add_request(*request("late")),
            "why_waiting": lambda engine: engine.why_waiting("late"),
        },
    ),
]
POLICIES = [
    Setup(
        "scheduling_policies",
        plugins.Policy,
        [
            "__init__",
            "prepare",
            "key",
            "group",
            "group_key",
            "admit",
            "victim",
            "added",
            "scheduled",
            "preempted",
            "finished",
            "export_state",
            "import_state",
            "close",
        ],
        void=["added", "scheduled", "preempted", "finished", "import_state", "close"],
        config={"scheduler": {"policy": USE}, **FEW_BLOCKS},
        requests=(*GROWING, BOTH[0]),
        actions={"set_policy": lambda engine: engine.set_policy(USE)},
    )
]
EVICTION = [
    Setup(
        "eviction_policies",
        plugins.Eviction,
        ["__init__", "released", "taken", "dropped", "evict", "close"],
        void=["released", "taken", "dropped", "close"],
        config={**SMALL, "kv_cache": {**SMALL["kv_cache"], "eviction": USE}},
        requests=LONG,
        again=LONG[2:],
        actions=RESET,
    )
]
PUBLISHERS = [
    Setup(
        "kv_event_publishers",
        plugins.Publisher,
        ["__init__", "publish", "close"],
        void=["publish", "close"],
        config={"kv_events": {"publishers": [USE]}, **SMALL},
        requests=LONG[:1],
    )
]
CONNECTORS = [
    Setup(
        "kv_connectors",
        plugins.Connector,
        [
            "__init__",
            "scheduler_half",
            "worker_half",
            *(
                f"Scheduler.{name}"
                for name in (
                    "check_request",
                    "get_num_new_matched_tokens",
                    "update_state_after_alloc",
                    "build_connector_meta",
                    "request_finished",
                    "load_ended",
                    "set_handshakes",
                    "close",
                )
            ),
            *(
                f"Worker.{name}"
                for name in (
                    "register_kv_caches",
                    "start_load_kv",
                    "wait_for_layer_load",
                    "save_kv_layer",
                    "wait_for_save",
                    "get_finished",
                    "load_errors",
                    "take_message",
                    "handshake",
                    "stats",
                    "close",
                )
            ),
            "close",
        ],
        void=[
            "Scheduler.check_request",
            "Scheduler.update_state_after_alloc",
            "Scheduler.load_ended",
            "Scheduler.set_handshakes",
            "Scheduler.close",
            "Worker.register_kv_caches",
            "Worker.start_load_kv",
            "Worker.wait_for_layer_load",
            "Worker.save_kv_layer",
            "Worker.wait_for_save",
            "Worker.take_message",
            "Worker.handshake",
            "Worker.stats",
            "Worker.close",
            "close",
        ],
        config={"kv_connector": {"use": USE}, **SMALL},
        requests=LONG[:1],
        again=LONG[:1],
        tick=0.05,
        before=lambda: use(Script()),
    ),
    Setup(
        "kv_connectors",
        plugins.Connector,
        ["Worker.register_kv_caches", "Worker.handshake", "Scheduler.set_handshakes"],
        void=["Worker.register_kv_caches", "Worker.handshake", "Scheduler.set_handshakes"],
        late=["Worker.register_kv_caches", "Worker.handshake", "Scheduler.set_handshakes"],
        config={"kv_connector": {"use": USE}, **SMALL},
        actions=ASLEEP,
        tick=0.05,
        variant="and sleep",
        before=lambda: use(Script()),
    ),
    Setup(
        "kv_connectors",
        plugins.Connector,
        ["Worker.release_kv_caches", "Worker.register_kv_caches"],
        void=["Worker.release_kv_caches", "Worker.register_kv_caches"],
        late=["Worker.register_kv_caches"],
        config={"kv_connector": {"use": USE}, **SMALL},
        actions={**ASLEEP, "sleep": utility("sleep", 1)},
        tick=0.05,
        variant="and light sleep",
        before=lambda: use(Script()),
    ),
    Setup(
        "kv_connectors",
        plugins.Connector,
        ["Worker.wait_for_layer_load"],
        void=["Worker.wait_for_layer_load"],
        config={"kv_connector": {"use": USE}, **SMALL},
        requests=LONG[:1],
        again=LONG[:1],
        tick=0.05,
        variant="in the step",
        before=lambda: use(Script(asynchronous=False)),
    ),
]
STORES = [
    Setup(
        "kv_stores",
        plugins.Store,
        ["__init__", "lookup", "store", "load", "used_bytes", "drain", "close"],
        void=["drain", "close"],
        config={"kv_connector": {"stores": [USE]}, **SMALL},
        requests=LONG[:1],
        again=LONG[:1],
    )
]
EXECUTORS = [
    Setup(
        "executors",
        plugins.InProcess,
        [
            "__init__",
            "start",
            "max_concurrent_batches",
            "initialize_cache",
            "execute_model",
            "sample_tokens",
            "collective_rpc",
            "on_failure",
            "close",
        ],
        void=["initialize_cache", "on_failure", "close"],
        config={"executor": {"use": USE}},
        actions={"plugin_meters": utility("plugin_meters")},
    ),
    Setup(
        "executors",
        plugins.InProcess,
        ["collective_rpc"],
        config={"executor": {"use": USE}},
        actions=ASLEEP,
        variant="and sleep",
    ),
]
COMMUNICATORS = [
    Setup(
        "communicators",
        plugins.Communicating,
        ["__init__", "describe", "all_reduce", "all_gather", "close"],
        void=["close"],
        config={
            "executor": {"use": "acme_executors:ThreadExecutor"},
            "parallel": {"tensor": 2, "communicator": USE},
        },
        late=["all_reduce", "all_gather"],
    )
]
MODELS = [
    Setup(
        "models",
        plugins.Scripted,
        [
            "__init__",
            "weight_shapes",
            "weight_cuts",
            "load_weights",
            "kv_specs",
            "forward",
            "compute_logits",
            "routed_experts",
            "packed_weights",
            "close",
        ],
        void=["load_weights", "routed_experts", "packed_weights", "close"],
        late=["forward", "compute_logits"],
    )
]
LOADERS = [
    Setup(
        "loaders",
        plugins.Loader,
        ["__init__", "architecture", "config", "weights", "formats", "fingerprint", "close"],
        void=["architecture", "fingerprint", "close"],
        config={"plugins": {"enable": [USE]}, "load": {"use": NAME}},
        model="llama",
    ),
    Setup(
        "loaders",
        plugins.Loader,
        ["config", "weights"],
        late=["config", "weights"],
        config={"plugins": {"enable": [USE]}, "load": {"use": NAME}},
        actions=ASLEEP,
        variant="and sleep",
        model="llama",
    ),
    Setup(
        "loaders",
        plugins.Loader,
        ["content_hash"],
        config={
            "plugins": {"enable": [USE]},
            "load": {"use": NAME},
            "kv_connector": {"stores": ["memory"]},
        },
    ),
]
QUANTIZATIONS = [
    Setup(
        "quantizations",
        plugins.FewBits,
        ["__init__", "quantize", "stored_bytes", "alignment", "close"],
        void=["stored_bytes", "alignment", "close"],
        config={"plugins": {"enable": [USE]}, "quantization": {"use": NAME}},
        model="llama",
    )
]
ATTENTION = [
    Setup(
        "attention_backends",
        plugins.Attention,
        ["__init__", "describe", "bytes_per_block", "allocate", "plan", "attend", "close"],
        void=["close"],
        config={"attention": {"use": USE}},
    ),
    Setup(
        "attention_backends",
        plugins.Attention,
        ["block_views"],
        config={"attention": {"use": USE}, "kv_connector": {"stores": ["memory"]}, **SMALL},
    ),
]
OPS = [
    Setup(
        "ops",
        plugins.Operations,
        ["__init__", "describe", "draw", "edit", "divide", "keep_top_k", "close"],
        void=["edit", "divide", "keep_top_k", "close"],
        config={"ops": {"use": USE}},
        requests=(
            request("bad"),
            request("other", temperature=0.7, seed=1, top_k=5, logit_bias={65: 1.0}),
        ),
    ),
    Setup("ops", plugins.Operations, ["argmax"], config={"ops": {"use": USE}}),
    Setup(
        "ops",
        plugins.Operations,
        ["pack", "linear", "gather_rows", "rms_norm", "add_rms_norm", "rotate", "silu_and_mul"],
        void=["rotate"],
        late=["gather_rows", "add_rms_norm"],
        config={"ops": {"use": USE}},
        model="llama",
    ),
]
TOKENIZERS = [
    Setup(
        "tokenizers",
        plugins.ByteTokens,
        [
            "__init__",
            "vocab_size",
            "eos_token_ids",
            "special_tokens",
            "chat_template",
            "vocabulary",
            "encode",
            "decode",
            "decode_stream",
            "Stream.step",
            "close",
        ],
        void=["chat_template", "Stream.step", "close"],
        config={"tokenizer": {"use": USE}},
        requests=(request("bad", bad_words=["x"], logprobs=1), request("ids", [1, 2, 3])),
    ),
    Setup(
        "tokenizers",
        plugins.ByteTokens,
        ["apply_chat_template"],
        config={"tokenizer": {"use": USE}},
        messages=({"role": "user", "content": "hi"},),
    ),
]
AS_GRAMMAR = {"structured": {"regex": "aa", "backend": NAME}}
GRAMMARS = [
    Setup(
        "grammars",
        plugins.Grammar,
        ["__init__", "compile", "State.fill_bitmask", "State.advance", "State.fork", "close"],
        void=["close"],
        config=ENABLED,
        requests=(request("bad", **AS_GRAMMAR), request("good")),
    )
]
TOOL = RequestExtras(tools={"f": {"type": "object"}})
PARSERS = [
    Setup(
        kind,
        base,
        [
            "__init__",
            "prepare",
            "markers",
            "token_ids",
            "open",
            "State.feed",
            "State.finish",
            "close",
        ],
        void=["close"],
        config={**ENABLED, table: {"parser": NAME}},
        requests=(
            request("bad", extras=TOOL, plugin_args={NAME: {}}),
            request("good", extras=TOOL),
        ),
    )
    for kind, base, table, tools in (
        ("reasoning_parsers", plugins.Reasoning, "reasoning", None),
        ("tool_parsers", plugins.Tools, "tools", TOOL),
    )
]
SINKS = [
    Setup(
        "stat_sinks",
        plugins.Sink,
        ["__init__", "record", "report", "exposition", "close"],
        void=["record", "report", "close"],
        config={"stats": {"sinks": [USE]}},
        actions={"metrics": lambda engine: engine.metrics()},
    )
]
HOOKS = [
    Setup(
        "hooks",
        plugins.Hooks,
        [
            "engine_started",
            "engine_closing",
            "step_planned",
            "request_received",
            "request_finished",
        ],
        void=[
            "engine_started",
            "engine_closing",
            "step_planned",
            "request_received",
            "request_finished",
        ],
        config=ENABLED,
    ),
]
ENDS = {"plugins": {"on_error": {NAME: "engine"}}}
ENDING = [
    replace(setup, methods=methods, config={**setup.config, **ENDS}, variant="on_error = engine")
    for setup, methods in (
        (POLICIES[0], ["key", "victim", "finished"]),
        (EVICTION[0], ["released", "evict"]),
        (PUBLISHERS[0], ["publish", "close"]),
        (CONNECTORS[0], ["Scheduler.get_num_new_matched_tokens", "Worker.start_load_kv"]),
        (STORES[0], ["lookup", "store"]),
        (SINKS[0], ["record", "report", "exposition", "close"]),
        (replace(LOGITS[0], config={}), ["start", "apply"]),
        (replace(HOOKS[0], config={}), ["step_planned"]),
    )
]
for index in (-2, -1):  # those that `plugins.enable` names
    ENDING[index] = replace(
        ENDING[index], config={"plugins": {**ENABLED["plugins"], **ENDS["plugins"]}}
    )
SETUPS = [
    *LOGITS,
    *SAMPLERS,
    *SCHEDULERS,
    *POLICIES,
    *EVICTION,
    *PUBLISHERS,
    *CONNECTORS,
    *STORES,
    *EXECUTORS,
    *COMMUNICATORS,
    *MODELS,
    *LOADERS,
    *QUANTIZATIONS,
    *ATTENTION,
    *OPS,
    *TOKENIZERS,
    *GRAMMARS,
    *PARSERS,
    *SINKS,
    *HOOKS,
    *ENDING,
]
