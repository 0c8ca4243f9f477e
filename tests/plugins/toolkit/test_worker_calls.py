"""Serialized calls of workers: round trips, and error messages for garbage."""

from __future__ import annotations

import inspect
import typing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.plugins import (
    ConfigError,
    EngineCoreRequest,
    Executor,
    GrammarBitmask,
    HardpointError,
    ModelError,
    ModelRunnerOutput,
    NewRequest,
    RequestFault,
    SamplingParams,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.executor import Worker
from hardpoint.plugins.params import RequestOutputKind
from hardpoint.plugins.requests import LoRARequest, TokenLogprobs
from hardpoint.plugins.requests.plan import CachedRequests, SampledTokens
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.toolkit.workers.calls import WorkerServer, decode_result, encode_call

METHODS = [name for name in vars(Worker) if not name.startswith("_")]

ids = st.text(min_size=1, max_size=8)
numbers = st.integers(0, 2**40)
counts = st.integers(0, 300)
reals = st.floats(allow_nan=False)
tokens = st.lists(st.integers(-1, 2**31), max_size=40)
vocabulary = st.lists(st.integers(0, 2**31 - 1), max_size=40)
names = st.frozensets(ids, max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | reals | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ids, inner, max_size=3),
    max_leaves=6,
)
arrays = st.builds(
    lambda rows, columns, kind: np.arange(rows * columns).astype(kind).reshape(rows, columns),
    st.integers(0, 4),
    st.integers(0, 5),
    st.sampled_from(["int32", "int64", "float32", "uint8", "bool"]),
)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 50),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 100),
    min_tokens=counts,
    stop=st.lists(ids, max_size=2),
    stop_token_ids=vocabulary,
    ignore_eos=st.booleans(),
    logprobs=st.none() | counts,
    prompt_logprobs=st.none() | counts,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(ids, max_size=2),
    allowed_token_ids=st.none() | st.lists(counts, min_size=1, max_size=3),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    detokenize=st.booleans(),
    output_kind=st.sampled_from(list(RequestOutputKind)),
    thinking_token_budget=st.none() | counts,
    reasoning_parser=st.none() | ids,
    tool_parser=st.none() | ids,
    structured=st.none() | st.builds(StructuredOutputs, regex=ids),
    plugin_args=st.dictionaries(ids, st.dictionaries(ids, plain, max_size=2), max_size=2),
)
requests = st.builds(
    EngineCoreRequest,
    request_id=ids,
    prompt_token_ids=tokens,
    params=params,
    eos_token_ids=tokens,
    plugin_args=st.dictionaries(ids, st.dictionaries(ids, plain, max_size=2), max_size=2),
    priority=st.integers(-5, 5),
    tags=st.dictionaries(ids, ids, max_size=2),
    lora=st.none() | st.builds(LoRARequest, name=ids, id=counts),
    kv_transfer_params=st.none() | st.dictionaries(ids, plain, max_size=2),
)
block_ids = st.lists(tokens, min_size=1, max_size=2)
new_requests = st.builds(
    NewRequest,
    source=requests,
    output_token_ids=tokens,
    block_ids=block_ids,
    num_computed_tokens=counts,
    resumed=st.booleans(),
)
plans = st.builds(
    SchedulerOutput,
    step=counts,
    new_requests=st.lists(new_requests, max_size=2),
    cached_requests=st.builds(
        CachedRequests,
        request_ids=st.lists(ids, max_size=3),
        num_computed_tokens=tokens,
        new_block_ids=st.dictionaries(ids, block_ids, max_size=2),
    ),
    num_scheduled_tokens=st.dictionaries(ids, counts, max_size=3),
    total_num_scheduled_tokens=counts,
    draft_token_ids=st.dictionaries(ids, tokens, max_size=2),
    encoder_inputs=st.dictionaries(ids, tokens, max_size=2),
    freed_encoder_inputs=st.lists(ids, max_size=2),
    structured_request_ids=st.dictionaries(ids, counts, max_size=2),
    preempted_request_ids=names,
    finished_request_ids=names,
    sampled=st.lists(
        st.builds(SampledTokens, step=counts, token_ids=st.dictionaries(ids, tokens, max_size=2)),
        max_size=2,
    ),
    kv_connector_metadata=plain,
)
bitmasks = st.builds(GrammarBitmask, request_ids=st.lists(ids, max_size=3), bitmask=arrays)
logprobs = st.builds(TokenLogprobs, token_ids=tokens, logprobs=st.lists(reals), rank=counts)
outputs = st.builds(
    ModelRunnerOutput,
    sampled_token_ids=st.dictionaries(ids, tokens, max_size=3),
    logprobs=st.dictionaries(ids, st.lists(logprobs, max_size=2), max_size=2),
    prompt_logprobs=st.dictionaries(ids, st.lists(st.none() | logprobs, max_size=3), max_size=2),
    faults=st.dictionaries(
        ids, st.builds(RequestFault, message=ids, plugin=st.none() | ids), max_size=2
    ),
    kv_loaded=names,
    kv_saved=names,
    invalid_block_ids=st.frozensets(counts, max_size=3),
    num_nans_in_logits=st.dictionaries(ids, counts, max_size=2),
    pooler_output=st.dictionaries(ids, arrays, max_size=2),
    routed_experts=st.dictionaries(ids, arrays, max_size=2),
    part_reports=st.dictionaries(
        ids, st.dictionaries(counts, st.binary(max_size=4), max_size=2), max_size=2
    ),
    part_faults=st.dictionaries(ids, ids, max_size=2),
)
VALUES = {
    SchedulerOutput: plans,
    GrammarBitmask: bitmasks,
    ModelRunnerOutput: outputs,
    WorkerInfo: st.builds(
        WorkerInfo,
        bytes_per_block=numbers,
        available_bytes=numbers,
        cache_share=reals,
        sleep_levels=st.tuples(counts, counts),
        windows=st.tuples(st.none() | counts, st.none() | counts),
        has_states=st.booleans(),
        bytes_per_state=numbers,
    ),
    LoRARequest: st.builds(LoRARequest, name=ids, id=counts),
    PluginMeter: st.builds(PluginMeter, steps=counts, seconds=reals),
    int: counts,
    str: ids,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    typing.Any: counts | ids,
}


def values(annotation):
    """Return a strategy for the values of an annotation of a Worker's method."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None:
            return VALUES[annotation]
        case origin if origin is dict:
            return st.dictionaries(*map(values, arguments), max_size=3)
        case origin if origin is tuple:
            return st.tuples(*map(values, arguments))
        case origin if origin is set:
            return st.sets(values(arguments[0]), max_size=3)
        case origin if getattr(origin, "__name__", "") == "Sequence":
            return st.lists(values(arguments[0]), max_size=3)
        case _:
            return st.one_of([values(argument) for argument in arguments])


class Recording:
    """A worker that keeps and returns its arguments."""

    def __init__(self, result=None, error=None):
        self.result, self.error = result, error
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            if self.error is not None:
                raise self.error
            return self.result

        return call


def same(first, other):
    """Return whether two values are equal, arrays by dtype and elements."""
    if isinstance(first, np.ndarray):
        return first.dtype == other.dtype and np.array_equal(first, other)
    if isinstance(first, msgspec.Struct):
        fields = first.__struct_fields__
        return all(same(getattr(first, field), getattr(other, field)) for field in fields)
    if isinstance(first, ModelRunnerOutput):
        return all(same(getattr(first, n), getattr(other, n)) for n in ModelRunnerOutput.__slots__)
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(same(first[key], other[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(same, first, other))
    return type(first) is type(other) and first == other


def answer(method, args=(), result=None, error=None):
    """Return the result of a call, over bytes, and the worker."""
    worker = Recording(result, error)
    answered = WorkerServer(worker).run(encode_call(method, args))
    return decode_result(method, answered, "rank 1"), worker


SAMPLING = {"sample_tokens", "begin_sampling"}
"""The first sends no plan; the second is for executors in this process."""


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SAMPLING])
def test_arguments_and_results_of_every_method(method):
    hints = typing.get_type_hints(getattr(Worker, method))
    returned = hints.pop("return")
    if method == "abort":
        assert returned is type(None)

    @settings(max_examples=25)
    @given(args=st.tuples(*map(values, hints.values())), result=values(returned))
    def check(args, result):
        got, worker = answer(method, args, result)
        assert same(result, got)
        ((name, received),) = worker.calls
        assert name == method
        assert same(args, received)

    check()


@settings(max_examples=25)
@given(plan=plans, bitmask=st.none() | bitmasks, result=outputs, drafts=st.lists(counts))
def test_sampling_sends_no_plan_again(plan, bitmask, result, drafts):
    worker = Recording()
    server = WorkerServer(worker)
    executed = server.run(encode_call("execute_model", (plan,)))
    assert decode_result("execute_model", executed, "rank 0") is None
    worker.result = result
    later = msgspec.structs.replace(plan, draft_token_ids={"a": drafts})
    call = encode_call("sample_tokens", (later, bitmask))
    assert same(result, decode_result("sample_tokens", server.run(call), "rank 0"))
    received_plan, received_bitmask = worker.calls[1][1]
    assert same(later, received_plan)
    assert same(bitmask, received_bitmask)
    small = encode_call("sample_tokens", (SchedulerOutput(step=plan.step), None))
    assert len(small) < 60


def begun(worker):
    """Return a server that has run step 3, and the result of its sampling call."""
    server = WorkerServer(worker)
    server.run(encode_call("execute_model", (SchedulerOutput(step=3),)))
    return server, server.begin(encode_call("sample_tokens", (SchedulerOutput(step=3), None)))


def test_tokens_on_the_device_give_a_late_result():
    moments = [False, True]
    output = ModelRunnerOutput(sampled_token_ids={"a": [4]})
    worker = Recording()
    worker.begin_sampling = lambda *_: Executor.LateOutput(lambda: moments.pop(0), lambda: output)
    server, late = begun(worker)
    assert [late.is_ready(), late.is_ready()] == [False, True]
    assert decode_result("sample_tokens", late.read(), "rank 0") == output
    step, other = encode_call("execute_model", (SchedulerOutput(),)), encode_call("idle")
    assert [server.can_overlap(call) for call in (step, other)] == [True, False]


def test_an_error_of_late_tokens_is_the_result_of_their_call():
    def fail():
        raise HardpointError("the device failed")

    worker = Recording()
    worker.begin_sampling = lambda *_: Executor.LateOutput(lambda: True, fail)
    _, late = begun(worker)
    with pytest.raises(HardpointError, match="^the device failed"):
        decode_result("sample_tokens", late.read(), "rank 0")


def test_a_worker_without_late_outputs_samples_at_once():
    output = ModelRunnerOutput(sampled_token_ids={"a": [4]})
    worker = Recording(output)
    worker.begin_sampling = worker.sample_tokens
    _, result = begun(worker)
    assert decode_result("sample_tokens", result, "rank 0") == output


def test_a_step_is_sampled_once():
    server = WorkerServer(Recording())
    sampling = encode_call("sample_tokens", (SchedulerOutput(step=7), None))
    with pytest.raises(HardpointError, match="^sample_tokens: the model did not run step 7"):
        decode_result("sample_tokens", server.run(sampling), "rank 0")


def test_a_plan_of_many_requests_is_small():
    many = [f"request-{index}" for index in range(256)]
    plan = SchedulerOutput(
        cached_requests=CachedRequests(many, list(range(256)), {}),
        num_scheduled_tokens=dict.fromkeys(many, 1),
        total_num_scheduled_tokens=256,
    )
    assert len(encode_call("execute_model", (plan,))) < 32 * 256


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "execute_model: cannot be sent .*: a torch.Tensor is no plain data"),
        (print, "a builtins.builtin_function_or_method is no plain data"),
        (2**70, "execute_model: cannot be sent"),
        (np.array([object()]), "execute_model: cannot be sent .*: an array of object is no plain"),
    ],
)
def test_what_is_no_plain_data_is_refused(value, message):
    plan = SchedulerOutput(kv_connector_metadata={"x": [value]})
    with pytest.raises(HardpointError, match=message):
        encode_call("execute_model", (plan,))
    worker = Recording(ModelRunnerOutput(pooler_output={"a": value}))
    result = WorkerServer(worker).run(encode_call("execute_model", (SchedulerOutput(),)))
    with pytest.raises(HardpointError, match=message):
        decode_result("execute_model", result, "rank 0")


class OwnError(ModelError):
    """Of a package that the engine's process may not have."""


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (ConfigError("device: wrong"), ConfigError, "device: wrong"),
        (OwnError("mine"), ModelError, "mine"),
        (NotImplementedError("no drafts"), NotImplementedError, "no drafts"),
        (MemoryError("too much"), MemoryError, "too much"),
        (KeyError("name"), KeyError, "'name'"),
        (OSError(2, "not there"), FileNotFoundError, "[Errno 2] not there"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), HardpointError, "UnicodeDecodeError: 'u"),
        (torch.OutOfMemoryError("full"), HardpointError, "OutOfMemoryError: full"),
    ],
)
def test_an_error_keeps_class_message_notes_and_traceback(error, cls, text):
    error.add_note("and a note")
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the class is compared
        answer("load_model", error=error)
    assert type(raised.value) is cls
    assert text in str(raised.value)
    first, where = raised.value.__notes__
    assert first == "and a note"
    assert where.startswith("In rank 1:\nTraceback (most recent call last):")
    assert "in call\n    raise self.error" in where


@pytest.mark.parametrize("method", ["__class__", "mro", "_abc_impl", "no_method", ""])
def test_only_methods_of_workers_are_called(method):
    worker = Recording()
    server = WorkerServer(worker)
    result = server.run(msgspec.msgpack.encode((method, [])))
    with pytest.raises(HardpointError, match=f"method: '{method}' is none of Worker"):
        decode_result("load_model", result, "rank 0")
    assert not worker.calls


BYTES = st.binary(max_size=60) | plain.map(msgspec.msgpack.encode)


@given(data=BYTES | st.tuples(st.sampled_from(METHODS), plain).map(msgspec.msgpack.encode))
def test_a_damaged_call_is_an_error_of_hardpoint(data):
    result = WorkerServer(Recording()).run(data)
    try:
        decode_result("abort", result, "rank 0")
    except HardpointError as error:
        assert ": " in str(error)  # noqa: PT017 - others are not caught


@given(data=BYTES | st.tuples(plain, plain).map(msgspec.msgpack.encode))
@pytest.mark.parametrize("method", ["execute_model", "load_model", "plugin_meters"])
def test_a_damaged_result_is_an_error_of_hardpoint(data, method):
    try:
        decode_result(method, data, "rank 0")
    except HardpointError as error:
        assert str(error).startswith(f"{method}: the message cannot be read: ")  # noqa: PT017


@given(
    types=st.lists(ids | st.sampled_from(["builtins:print", "builtins:x", "builtins:SystemExit"])),
    message=st.text(max_size=9),
)
def test_a_failure_of_unknown_classes_is_an_error_of_hardpoint(types, message):
    data = msgspec.msgpack.encode(((types, message, [], ""), None))
    with pytest.raises(HardpointError):
        decode_result("load_model", data, "rank 0")


@pytest.mark.parametrize(
    "header",
    [("|O", [1], b"12345678"), ("<i4", [2**40], b"1234"), ("<i4", [-2], b"1234"), ("no", [1], b"")],
)
def test_a_damaged_array_is_an_error_of_hardpoint(header):
    array = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(header))
    result = msgspec.msgpack.encode((None, {"pooler_output": {"a": array}}))
    with pytest.raises(HardpointError, match="^execute_model: the message cannot be read: "):
        decode_result("execute_model", result, "rank 0")


def test_all_methods_are_looked_at():
    assert len(METHODS) >= 15
    assert all(inspect.isfunction(vars(Worker)[name]) for name in METHODS)
