"""Reasoning, content and tool calls of outputs, through an engine."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from support.internals import parsers_of
from support.plugins.arguments import Tagged

from hardpoint import RequestError, RequestOutputKind, SamplingParams
from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.json_sections import Hermes
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.errors import ConfigError, PluginError
from hardpoint.plugins import hookimpl
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_engine, write_scripted_model
from hardpoint.toolkit.parsing.completion_parts import CompletionParts

HERE = __name__
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
BAD = '<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>'
REPLIES = {
    "why": "<think>Hm, é.</think>Because.",
    "call": f"<think>I add.</think>Wait. {CALL}{CALL}",
    "bad": f"<think>I add.</think>Wait. {BAD} Done.",
    "open<think>": "Hm.</think>Because.",
    "plain": "Hello.",
}
HARMONY = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)
PARSERS = {"reasoning": {"parser": "think_tags"}, "tools": {"parser": "hermes"}}
TOOLS = RequestExtras(tools={"add": {"type": "object"}})
KINDS = list(RequestOutputKind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("m"), REPLIES)


@pytest.fixture
def open_engine(folder):
    opened = []

    def open_it(extra=None, model=folder):
        opened.append(scripted_engine(model, PARSERS if extra is None else extra))
        return opened[-1]

    yield open_it
    for engine in opened:
        engine.close()


def completions(engine, prompt, extras=TOOLS, kind=RequestOutputKind.FINAL_ONLY, **fields):
    """Return the outputs of a request, each of one completion."""
    fields = {"max_tokens": 200, "temperature": 0.0} | fields
    engine.add_request("r", prompt, SamplingParams(output_kind=kind, **fields), extras)
    found = []
    while engine.has_unfinished_requests():
        found += [c for output in engine.step() for c in output.outputs]
    return found


def joined(outputs, kind):
    """Return reasoning, content and (name, arguments) of each call."""
    if kind is not RequestOutputKind.DELTA:
        last = outputs[-1]
        calls = [(c.name, c.arguments) for c in last.tool_calls or ()]
        return last.reasoning, last.content, calls
    calls: list[list[str]] = []
    for output in outputs:
        for call in output.tool_calls or ():
            if call.index == len(calls):
                assert call.id
                calls.append([call.name, ""])
            else:
                assert (call.id, call.name) == (None, None)
            calls[call.index][1] += call.arguments
    reasoning, content = ("".join(getattr(o, name) or "" for o in outputs) for name in PARTS)
    return reasoning or None, content or None, [tuple(call) for call in calls]


PARTS = ("reasoning", "content")
ARGUMENTS = '{"a": 1, "b": [2]}'


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("why", ("Hm, é.", "Because.", [])),
        ("call", ("I add.", "Wait. ", [("add", ARGUMENTS)] * 2)),
        ("open<think>", ("Hm.", "Because.", [])),
        ("plain", (None, "Hello.", [])),
    ],
)
def test_the_parts_of_an_output(open_engine, prompt, parts, kind):
    outputs = completions(open_engine(), prompt, kind=kind)
    assert joined(outputs, kind) == parts
    assert outputs[-1].finish_reason == ("tool_calls" if parts[2] else "stop")
    assert outputs[-1].warning is None
    for output in outputs:
        assert output.tool_calls is None or output.tool_calls


@pytest.mark.parametrize("in_process", [True, False])
def test_several_completions(open_engine, in_process):
    engine = open_engine(PARSERS | {"engine": {"in_process": in_process}})
    (first, second) = completions(engine, "call", n=2)
    assert joined([first], None) == joined([second], None) == (
        "I add.", "Wait. ", [("add", ARGUMENTS)] * 2
    )  # fmt: skip
    ids = {call.id for c in (first, second) for call in c.tool_calls}
    assert len(ids) == 4


def test_without_tools_a_call_is_content(open_engine):
    (output,) = completions(open_engine(), "call", RequestExtras())
    assert (output.reasoning, output.content) == ("I add.", f"Wait. {CALL}{CALL}")
    assert (output.tool_calls, output.finish_reason) == (None, "stop")


def test_without_parsers_the_text_is_content(open_engine):
    (output,) = completions(open_engine({}), "call", RequestExtras())
    assert output.content == output.text == REPLIES["call"]
    assert output.reasoning is output.tool_calls is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_malformed_call_is_content_with_a_warning(open_engine, kind):
    outputs = completions(open_engine(), "bad", kind=kind)
    reasoning, content, calls = joined(outputs, kind)
    assert (reasoning, content) == ("I add.", f"Wait. {BAD} Done.")
    assert outputs[-1].finish_reason == "stop"
    warning = "a call is malformed: expected true, false or null"
    if kind is RequestOutputKind.DELTA:
        warning += "; void are the calls begun with index 0"
    assert outputs[-1].warning == warning
    assert list(outputs[-1].void_calls) == [0] * (kind is RequestOutputKind.DELTA)
    if kind is not RequestOutputKind.DELTA:  # what was streamed cannot be taken back
        assert calls == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_after_the_first_one_are_left_out_if_one_is_allowed(open_engine, kind, parallel):
    extras = RequestExtras(tools=TOOLS.tools, calls=CallRules(parallel=parallel))
    outputs = completions(open_engine(), "call", extras, kind)
    calls = [("add", ARGUMENTS)] * (1 + parallel)
    assert joined(outputs, kind) == ("I add.", "Wait. ", calls)
    assert outputs[-1].finish_reason == "tool_calls"


def test_the_warning_names_a_call_that_was_shown_before_it_broke():
    parts = CompletionParts(delta=True)
    parts.add([ToolCallBegin("add", "1"), ToolCallArguments('{"a": ')])
    assert parts.pop()[2][0].arguments == '{"a": '
    parts.add([MalformedText("tru", "no JSON")])
    assert parts.pop() == (None, "tru", None)
    assert parts.warning == "no JSON; void are the calls begun with index 0"
    assert parts.void_calls == [0]


def test_all_warnings_of_an_answer_are_kept():
    parts = CompletionParts(delta=True)
    for reason in ("no JSON", "no name", "no JSON"):
        parts.add([MalformedText("x", reason)])
    parts.add([ToolCallBegin("add", "1"), MalformedText("tru", "no end")])
    parts.warn("the output ended inside the reasoning")
    assert parts.warning == "no JSON; no name; no end; the output ended inside the reasoning"


def test_very_many_warnings_are_counted():
    parts = CompletionParts(delta=False)
    parts.add(MalformedText("x", f"reason {number}") for number in range(100))
    assert parts.warning is not None
    assert parts.warning.startswith("reason 0; reason 1; ")
    assert parts.warning.endswith("; reason 15; 84 more")


def call_of(name):
    return [ToolCallBegin(name, name), ToolCallArguments("{}"), ToolCallEnd()]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("piecewise", [True, False])
@pytest.mark.parametrize(
    ("events", "content", "places"),
    [
        ([ReasoningText("Hm"), ContentText("\n"), ContentText("\nSo")], "\n\nSo", []),
        ([ReasoningText("Hm"), ContentText("\n\n")], "\n\n", []),
        (
            [
                *(ReasoningText("Hm"), ContentText("\n\n"), *call_of("a"), ContentText("\n")),
                *(*call_of("b"), ContentText("\n")),
            ],
            None,
            [0, 0],
        ),
        (
            [
                *(ContentText("One"), ContentText("\n"), *call_of("a"), ContentText(" ")),
                *(ContentText("two"), *call_of("b"), ContentText("\n"), ContentText("three\n")),
            ],
            "One\n two\nthree\n",
            [4, 8],
        ),
        (
            [ContentText(" "), MalformedText("<call>", "no JSON"), ContentText(" ")],
            " <call> ",
            [],
        ),
    ],
    ids=["between", "alone", "around calls", "of content", "malformed"],
)
def test_white_space_next_to_calls_is_no_content(events, content, places, piecewise, delta):
    parts = CompletionParts(delta=delta)
    shown = []
    for event in events:
        parts.add([event])
        if piecewise:
            shown.append(parts.pop())
    parts.finish()
    shown.append(parts.pop())
    if not delta:
        shown = shown[-1:]
    found, before = "", {}
    for _, text, calls in shown:
        for call in calls or ():
            before.setdefault(call.index, len(found) + call.content_before)
        found += text or ""
    assert (found or None, list(before.values())) == (content, places)


@pytest.mark.timing
def test_white_space_that_waits_takes_no_more_time_than_content():
    def seconds(text):
        parts = CompletionParts(delta=True)
        began = time.perf_counter()
        for _ in range(100_000):
            parts.add([ContentText(text)])
        parts.finish()
        took = time.perf_counter() - began
        assert parts.pop()[1] == text * 100_000
        return took

    assert seconds("\n") < 10 * seconds("x")


def test_an_extra_call_that_is_malformed_is_left_out_too():
    call = [ToolCallBegin("add", "1"), ToolCallArguments("{}"), ToolCallEnd()]
    bad = [ToolCallBegin("add", "2"), MalformedText("{tru", "no JSON"), ContentText("Done.")]
    parts = CompletionParts(delta=True, parallel=False)
    parts.add([*call, *bad])
    _, content, calls = parts.pop()
    assert [call.id for call in calls] == ["1"]
    assert (content, parts.warning) == ("Done.", None)


def test_an_answer_that_is_cut_while_it_thinks_has_a_warning(open_engine):
    (output,) = completions(open_engine(), "why", max_tokens=12)
    assert (output.reasoning, output.content) == ("Hm, \ufffd", None)
    assert output.finish_reason == "length"
    assert output.warning == "the output ended inside the reasoning"


def test_a_call_that_is_cut_is_no_call(open_engine):
    (output,) = completions(open_engine(), "call", max_tokens=60)
    assert output.tool_calls is None
    assert output.finish_reason == "length"
    assert output.content == output.text.partition("</think>")[2]
    assert output.warning == "a call is malformed: the output ended inside it"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_stop_string_ends_the_parts(open_engine, kind):
    outputs = completions(open_engine(), "why", kind=kind, stop=["caus"])
    assert joined(outputs, kind) == ("Hm, é.", "Be", [])


def test_an_aborted_request_keeps_its_parts(open_engine):
    engine = open_engine()
    params = SamplingParams(max_tokens=200, temperature=0.0)
    engine.add_request("r", "why", params, TOOLS)
    for _ in range(12):
        outputs = engine.step()
    engine.abort_requests(["r"])
    outputs = engine.step() or outputs
    assert outputs[-1].outputs[0].reasoning


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    special = (*Harmony.required_tokens, "<|constrain|>", "<|return|>")
    folder = tmp_path_factory.mktemp("m")
    return write_scripted_model(folder, {"h": HARMONY}, special_tokens=special)


class TestSpecialTokens:
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("skip", [True, False])
    def test_they_are_markers_whether_the_text_has_them_or_not(
        self, open_engine, model, kind, skip
    ):
        engine = open_engine(
            {"reasoning": {"parser": "harmony"}, "tools": {"parser": "harmony"}}, model
        )
        outputs = completions(engine, "h", kind=kind, skip_special_tokens=skip)
        assert joined(outputs, kind) == ("I add.", None, [("add", '{"a": 1}')])
        assert outputs[-1].finish_reason == "tool_calls"
        text = (
            "".join(o.text for o in outputs)
            if kind is RequestOutputKind.DELTA
            else outputs[-1].text
        )
        assert ("<|channel|>" in text) is not skip

    def test_a_marker_may_be_the_stop_token(self, open_engine, model):
        engine = open_engine({"tools": {"parser": "harmony"}}, model)
        tokenizer = engine.parts.tokenizer
        stop = [tokenizer.special_tokens["<|call|>"]]
        (output,) = completions(engine, "h", stop_token_ids=stop)
        assert json.loads(output.tool_calls[0].arguments) == {"a": 1}
        assert (output.finish_reason, output.stop_reason) == ("tool_calls", stop[0])

    def test_one_role_alone(self, open_engine, model):
        (output,) = completions(
            open_engine({"reasoning": {"parser": "harmony"}}, model), "h", RequestExtras()
        )
        assert (output.reasoning, output.tool_calls) == ("I add.", None)
        assert output.content == 'assistantcommentary to=functions.add json{"a": 1}'
        (output,) = completions(open_engine({"tools": {"parser": "harmony"}}, model), "h")
        assert (output.reasoning, output.content) == (None, "I add.")
        assert output.tool_calls[0].name == "add"

    def test_a_tokenizer_that_lacks_them_is_refused(self, open_engine):
        with pytest.raises(ConfigError, match=r"plugin\.harmony: the format needs special tokens"):
            open_engine({"tools": {"parser": "harmony"}})


class Raising(Hermes):
    """Fails in the middle of some outputs."""

    contract = 1

    def open(self, request):
        state = super().open(request)
        feed = state.feed

        def failing(text):
            if "Wait" in text or "Because" in text:
                raise KeyError("lost")
            return feed(text)

        state.feed = failing
        return state


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_parser_that_fails_ends_its_request_alone(open_engine, kind):
    raising = {"enable": [{"use": f"{HERE}:Raising", "name": "raising"}]}
    engine = open_engine(PARSERS | {"plugins": raising, "tools": {"parser": "raising"}})
    params = SamplingParams(max_tokens=200, temperature=0.0, output_kind=kind)
    engine.add_request("fine", "plain", params, TOOLS)
    engine.add_request("bad", "why", params, TOOLS)
    ends, texts = {}, {"fine": "", "bad": ""}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion,) = output.outputs
            is_delta = kind is RequestOutputKind.DELTA
            before = texts[output.request_id] if is_delta else ""
            texts[output.request_id] = before + completion.text
            ends[output.request_id] = completion
    assert (ends["fine"].finish_reason, texts["fine"]) == ("stop", "Hello.")
    if kind is RequestOutputKind.FINAL_ONLY:
        assert ends["bad"].finish_reason == "error"
        assert "plugin 'raising'" in ends["bad"].error
        assert "its feed failed: KeyError: 'lost'" in ends["bad"].error
        assert texts["bad"] == REPLIES["why"]
        assert engine.health().faults == {"raising": 1}


class Roleless(ThinkTags):
    contract = 1
    roles = ()


@pytest.mark.parametrize(
    ("table", "use", "words"),
    [
        ("reasoning", f"{HERE}:Raising", "no component 'raising' is enabled"),
        ("tools", f"{HERE}:Roleless", "its roles must be some of reasoning, tools, got ()"),
    ],
)
def test_a_class_serves_its_roles(open_engine, table, use, words):
    name = "raising" if "Raising" in use else "roleless"
    with pytest.raises(PluginError) as error:
        open_engine({"plugins": {"enable": [use]}, table: {"parser": name}})
    assert words in str(error.value)


def test_parsers_of_one_request_are_closed_with_it(open_engine):
    chosen = {"plugins": {"enable": ["support.plugins.arguments:Tagged"]}}
    engine = open_engine(chosen | {"reasoning": {"parser": "tagged"}})
    arguments = {"tagged": {"tag": "think"}}
    (output,) = completions(engine, "why", RequestExtras(), plugin_args=arguments)
    assert output.reasoning == "Hm, é."
    assert len(Tagged.OPEN) == 1
    params = SamplingParams(plugin_args=arguments, n=2)
    for _ in range(2):
        engine.add_request("r", "why", params)
        assert len(Tagged.OPEN) == 2  # its completions share it
        engine.abort_requests(["r"])
        engine.step()
        assert len(Tagged.OPEN) == 1
    structured = StructuredOutputs(json={}, backend="none")
    params = SamplingParams(plugin_args=arguments, structured=structured)
    with pytest.raises(RequestError, match="structured.backend: expected an enabled"):
        engine.add_request("r", "why", params)
    assert len(Tagged.OPEN) == 1


class Hook:
    contract = 1
    does = staticmethod(lambda request: None)

    @hookimpl
    def request_received(self, request):
        type(self).does(request)


def retag(request):
    request.plugin_args["reasoning_parsers/tagged"]["tag"] = "idea"


def refuse(request):
    retag(request)
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("does", "made", "kept"),
    [
        (lambda request: None, ["think"], 1),
        (retag, ["think", "idea", "idea"], 2),
        (refuse, ["think"], 0),
    ],
)
def test_a_hook_has_parsers_made_anew_only_if_it_changes_them(
    open_engine, monkeypatch, does, made, kept
):
    enabled = {"plugins": {"enable": ["support.plugins.arguments:Tagged", f"{HERE}:Hook"]}}
    engine = open_engine(enabled | {"reasoning": {"parser": "tagged"}})
    monkeypatch.setattr(Hook, "does", staticmethod(does))
    tags, make = [], Tagged.__init__

    def noted(parser, context):
        make(parser, context)
        tags.append(parser.arguments.tag)

    monkeypatch.setattr(Tagged, "__init__", noted)
    params = SamplingParams(plugin_args={"tagged": {"tag": "think"}}, n=2)
    with contextlib.nullcontext() if kept else pytest.raises(RequestError, match="not today"):
        engine.add_request("r", "why", params)
    assert (tags, len(Tagged.OPEN)) == (made, 1 + kept)
    engine.abort_requests(["r"])
    assert len(Tagged.OPEN) == 1


TEMPLATES = {
    "qwen3": (
        '<tool_call>{"name": ..., "arguments": ...}</tool_call> <think></think>',
        "think_tags",
        "hermes",
    ),
    "qwen3_coder": ("<tool_call><function=f><parameter=p>", None, "qwen3_coder"),
    "granite_3_3": ("<|tool_call|> <think></think> <response></response>", "granite", "granite"),
    "glm": ("<tool_call>{name}<arg_key> <think></think>", "think_tags", None),
    "none": ("{{ messages }}", None, None),
    "gpt_oss": ("<|channel|><|message|><|call|>", None, None),  # the tokenizer lacks them
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_chat_template_shows_the_format(tmp_path, open_engine, caplog, name):
    template, reasoning, tools = TEMPLATES[name]
    folder = write_scripted_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{# " + template + " #}")
    with caplog.at_level("INFO", logger="hardpoint"):
        parsers = parsers_of(open_engine({}, folder))
    assert parsers == list(dict.fromkeys(filter(None, (reasoning, tools))))
    found = [reasoning, tools]
    lines = [f"_parsers: {name}, for the model's chat template shows" for name in found if name]
    assert all(line in caplog.text for line in lines)
    assert ("is left out: plugin.harmony: the format needs" in caplog.text) == (name == "gpt_oss")
    off = {"reasoning": {"parser": "none"}, "tools": {"parser": "none"}}
    assert parsers_of(open_engine(off, folder)) == []


def test_a_request_chooses_its_parsers(open_engine):
    engine = open_engine({"reasoning": {"parser": "think_tags"}})
    reply = REPLIES["call"]
    output = completions(engine, "call", tool_parser="hermes")[-1]
    assert joined([output], None)[0] == "I add."
    assert [call.name for call in output.tool_calls] == ["add", "add"]
    output = completions(engine, "call", tool_parser="hermes", reasoning_parser="none")[-1]
    assert (output.reasoning, len(output.tool_calls)) == (None, 2)
    extras = RequestExtras()
    for chosen in ({"reasoning_parser": "none"}, {"reasoning_parser": "seed_oss"}):
        output = completions(engine, "call", extras, **chosen)[-1]
        assert (output.reasoning, output.content) == (None, reply)
    output = completions(engine, "call", extras)[-1]
    assert output.reasoning == "I add."


def test_a_request_chooses_among_enabled_parsers(open_engine):
    engine = open_engine({})
    for field in ("reasoning_parser", "tool_parser"):
        message = rf'{field}: expected "none" or an enabled parser \(.*granite.*\), got \'graniet\''
        with pytest.raises(RequestError, match=message):
            completions(engine, "call", RequestExtras(), **{field: "graniet"})
    with pytest.raises(RequestError, match="harmony.*lacks"):
        completions(engine, "call", RequestExtras(), reasoning_parser="harmony")
    with pytest.raises(RequestError, match="tools: no parser finds calls"):
        completions(engine, "call", tool_parser="none")


def test_one_class_of_both_roles_is_one_parser(open_engine):
    engine = open_engine({"reasoning": {"parser": "granite"}})
    output = completions(engine, "call", tool_parser="granite")[-1]
    assert (output.reasoning, len(output.tool_calls)) == ("I add.", 2)


def test_markers_that_are_no_special_tokens_are_logged(open_engine, caplog):
    with caplog.at_level("INFO", logger="hardpoint"):
        open_engine()
    assert (
        "reasoning_parsers: think_tags: '<think>', '</think>': no special tokens of" in caplog.text
    )


def test_parsers_need_a_step_part_that_drives_them(open_engine):
    off = {"plugins": {"disable": ["output_parsing"]}}
    words = r"tools\.parser: expected an enabled step part .* none"
    with pytest.raises(ConfigError, match=words):
        open_engine({**off, "tools": {"parser": "hermes"}})
    engine = open_engine(off)
    for field in ("reasoning_parser", "tool_parser"):
        words = f'{field}: expected "none", because no enabled step part drives {field}s, got'
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", "plain", SamplingParams(**{field: "hermes"}))
    with pytest.raises(RequestError, match="tools: no parser finds calls"):
        engine.add_request("r", "plain", SamplingParams(), TOOLS)
