"""Reasoning, then an answer that a grammar constrains: with every parser, and in every order."""

from __future__ import annotations

import contextlib
import json

import pytest
from support.builtins.model_calls import FOOD, PARSERS, TOOLS, USUAL

from hardpoint import SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.plugins import RequestError
from hardpoint.testing import scripted_engine, write_scripted_model

THOUGHT = "So <b and </thin. {"
JSON = '{"size": 3, "é": [true]}'
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "é": {"type": "array"}},
    "required": ["size", "é"],
    "additionalProperties": False,
}
REASONING = {
    "think_tags": ("<think>", "</think>"),
    "granite": ("<think>", "</think>"),
    "granite_3_2": ("Here is my thought process:", "Here is my response:"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
SPECIAL = {name.partition(",")[0]: special for name, (_, special) in reversed(PARSERS.items())}
HARMONY_CALL = (
    f"<|channel|>commentary to=functions.order_food <|constrain|>json<|message|>{json.dumps(FOOD)}"
)


def output_of(folder, reply, config, extras=None, prompt="go", **fields):
    """Return the output of a request whose model wants to write a reply."""
    special = {*SPECIAL.get(config.get("reasoning", {}).get("parser"), ())}
    special |= {*SPECIAL.get(config.get("tools", {}).get("parser"), ())}
    model = write_scripted_model(
        folder, {prompt: reply}, special_tokens=sorted(special), max_position_embeddings=2048
    )
    with contextlib.closing(scripted_engine(model, config)) as engine:
        params = SamplingParams(max_tokens=900, temperature=0.0, **fields)
        engine.add_request("r", prompt, params, extras or RequestExtras())
        found = []
        while engine.has_unfinished_requests():
            found += [c for output in engine.step() for c in output.outputs]
    return found[-1]


@pytest.mark.parametrize("parser", REASONING)
@pytest.mark.parametrize("budget", [None, 900])
def test_the_answer_after_the_reasoning_is_json(tmp_path, parser, budget):
    start, end = REASONING[parser]
    config = {"reasoning": {"parser": parser}}
    structured = {"json": SCHEMA}
    output = output_of(
        tmp_path,
        f"{start}{THOUGHT}{end}{JSON}",
        config,
        structured=structured,
        thinking_token_budget=budget,
    )
    assert (output.reasoning, output.content) == (THOUGHT, JSON)
    assert (output.finish_reason, output.error) == ("stop", None)


@pytest.mark.parametrize("parser", REASONING)
def test_an_answer_without_reasoning_begins_at_once(tmp_path, parser):
    prefix = "<|channel|>final<|message|>" if parser == "harmony" else ""
    prompt = "<|start|>assistant" if parser == "harmony" else "go"
    config = {"reasoning": {"parser": parser}}
    structured = {"json": SCHEMA}
    output = output_of(tmp_path, prefix + JSON, config, prompt=prompt, structured=structured)
    assert (output.reasoning, output.content, output.finish_reason) == (None, JSON, "stop")


@pytest.mark.parametrize("parser", REASONING)
def test_what_the_model_wants_after_the_reasoning_is_overruled(tmp_path, parser):
    start, end = REASONING[parser]
    structured = {"choice": ["yes", "no"]}
    config = {"reasoning": {"parser": parser}}
    reply = f"{start}{THOUGHT}{end}Well, I think it is so."
    output = output_of(tmp_path, reply, config, structured=structured)
    assert output.reasoning == THOUGHT
    assert output.content in ("yes", "no")


@pytest.mark.parametrize("parser", ["think_tags", "mistral", "harmony"])
def test_a_thinking_budget_leads_to_the_answer(tmp_path, parser):
    start, _ = REASONING[parser]
    output = output_of(
        tmp_path,
        f"{start}{'hm, ' * 20}",
        {"reasoning": {"parser": parser}},
        structured={"choice": ["yes", "no"]},
        thinking_token_budget=30,
    )
    assert output.error is None
    assert output.reasoning == ("hm, " * 20)[:30]
    assert output.content in ("yes", "no")


def test_reasoning_does_not_end_the_output(tmp_path):
    """The model ends inside its reasoning; with a grammar, there is an answer still."""
    config = {"reasoning": {"parser": "think_tags"}}
    free = output_of(tmp_path, "<think>Hm", config)
    assert (free.reasoning, free.content) == ("Hm", None)
    output = output_of(tmp_path, "<think>Hm", config, structured={"choice": ["yes"]})
    assert output.reasoning.startswith("Hm")
    assert output.finish_reason == "length"


MAY_THINK = {"ernie45", "granite", "hunyuan_a13b"}
"""Parsers whose texts may begin with thinking, which a model can go on with up to its limit."""
ALWAYS_RUN = {"hermes", "qwen3_coder"}
ONE = [(parser, calls) for parser, calls, _ in USUAL if "," not in parser]


def one_of_many(parser, calls, always_run):
    """Return the parameters of a test for each parser; most of them run with --all."""
    marks = () if parser in always_run else pytest.mark.nightly
    return pytest.param(parser, calls, marks=marks)


@pytest.mark.parametrize(
    ("parser", "calls"),
    [one_of_many(*one, MAY_THINK | ALWAYS_RUN) for one in ONE],
    ids=[parser for parser, _ in ONE],
)
@pytest.mark.parametrize("strict", [[], ["order_food", "now"]])
def test_calls_that_are_required(tmp_path, parser, calls, strict):
    reasoning = parser if parser in REASONING else "think_tags"
    start, end = REASONING[reasoning]
    extras = RequestExtras(
        tools=TOOLS["two"], calls=CallRules(required=["now", "order_food"], strict=strict)
    )
    config = {"reasoning": {"parser": reasoning}, "tools": {"parser": parser}}
    output = output_of(tmp_path, f"{start}{THOUGHT}{end}{calls}", config, extras)
    assert (output.reasoning, output.finish_reason) == (THOUGHT, "tool_calls")
    assert not (output.content or "").strip()
    found = [(call.name, json.loads(call.arguments)) for call in output.tool_calls]
    assert found == [("now", {}), ("order_food", FOOD)]
    assert output.warning is output.error is None


@pytest.mark.parametrize("parser", sorted({parser for parser, _ in ONE} - MAY_THINK))
def test_a_call_that_is_required_is_there_whatever_the_model_wants(tmp_path, parser):
    extras = RequestExtras(
        tools={"now": {"type": "object", "properties": {}, "additionalProperties": False}},
        calls=CallRules(required=["now"], parallel=False),
    )
    config = {
        "reasoning": {"parser": "none"},
        "tools": {"parser": parser},
        "plugin": {"llguidance": {"max_whitespace": 0}},
    }
    output = output_of(tmp_path, "I do not call anything.", config, extras)
    assert output.finish_reason == "tool_calls", output
    assert [call.name for call in output.tool_calls] == ["now"]


def test_harmony_calls_after_its_reasoning(tmp_path):
    start, end = REASONING["harmony"]
    head = end.removesuffix("<|channel|>final<|message|>")
    extras = RequestExtras(
        tools=TOOLS["two"], calls=CallRules(required=["now", "order_food"], strict=[])
    )
    config = {"reasoning": {"parser": "harmony"}, "tools": {"parser": "harmony"}}
    output = output_of(tmp_path, f"{start}{THOUGHT}{head}{HARMONY_CALL}", config, extras)
    assert (output.reasoning, output.finish_reason) == (THOUGHT, "tool_calls")
    assert [json.loads(call.arguments) for call in output.tool_calls] == [FOOD]


@pytest.mark.parametrize(
    ("parser", "calls"),
    [one_of_many(*one, ALWAYS_RUN) for one in ONE],
    ids=[parser for parser, _ in ONE],
)
def test_strict_tools_leave_free_text_free(tmp_path, parser, calls):
    extras = RequestExtras(tools=TOOLS["two"], calls=CallRules(strict=["order_food"]))
    config = {"reasoning": {"parser": "none"}, "tools": {"parser": parser}}
    output = output_of(tmp_path, "Hello, you.", config, extras)
    assert (output.content, output.tool_calls, output.finish_reason) == (
        "Hello, you.",
        None,
        "stop",
    )
    output = output_of(tmp_path, calls, config, extras)
    assert [call.name for call in output.tool_calls] == ["now", "order_food"]


def test_a_form_of_the_text_is_none_of_a_required_call(tmp_path):
    extras = RequestExtras(tools=TOOLS["two"], calls=CallRules(required=["now"]))
    config = {"tools": {"parser": "hermes"}}
    output = output_of(tmp_path, "no call", config, extras, structured={"regex": "a"})
    assert output.tool_calls[0].name == "now"
    assert output.error is None


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}
FORMS = {
    "json": {"json": COLOUR},
    "lenient": {"json": {**COLOUR, "not": {"type": "null"}}, "lenient": True},
    "json_object": {"json_object": True},
    "regex": {"regex": r'\{"colour": "(red|blue)"\}'},
    "choice": {"choice": ['{"colour": "red"}', "green"]},
    "grammar": {"grammar": 'start: "{\\"colour\\": \\"red\\"}"'},
}


CALLS = dict(ONE)


@pytest.mark.parametrize(
    ("parser", "form", "strict"),
    [
        *(("hermes", form, []) for form in FORMS),
        ("hermes", "json", ["order_food", "now"]),
        ("qwen3_coder", "json", []),
        ("kimi_k2", "regex", []),
    ],
)
def test_a_form_of_the_text_leaves_calls(tmp_path, parser, form, strict):
    extras = RequestExtras(tools=TOOLS["two"], calls=CallRules(strict=strict) if strict else None)
    config = {"reasoning": {"parser": "none"}, "tools": {"parser": parser}}
    text = output_of(tmp_path, '{"colour": "red"}', config, extras, structured=FORMS[form])
    assert (text.content, text.tool_calls) == ('{"colour": "red"}', None)
    assert (text.finish_reason, text.warning, text.validation_error) == ("stop", None, None)
    called = output_of(tmp_path, CALLS[parser], config, extras, structured=FORMS[form])
    assert [call.name for call in called.tool_calls] == ["now", "order_food"]
    assert json.loads(called.tool_calls[1].arguments) == FOOD
    assert (called.finish_reason, called.validation_error) == ("tool_calls", None)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_calls_in_strings_of_an_answer_are_text(tmp_path, parser):
    schema = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}
    config = {"reasoning": {"parser": "none"}, "tools": {"parser": parser}}
    answer = json.dumps({"how": CALLS[parser]})
    extras = RequestExtras(tools=TOOLS["two"])
    output = output_of(tmp_path, answer, config, extras, structured={"json": schema})
    assert (output.content, output.tool_calls, output.finish_reason) == (answer, None, "stop")


def test_a_text_that_is_no_call_is_validated(tmp_path):
    texts = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"sizes": texts}}
    extras = RequestExtras(tools=TOOLS["two"])
    config = {"tools": {"parser": "hermes"}}
    lenient = {"json": schema, "lenient": True}
    output = output_of(tmp_path, '{"sizes": ["a", "a"]}', config, extras, structured=lenient)
    assert "['a', 'a'] has equal items" in output.validation_error


def test_tools_that_are_not_strict_may_have_what_a_strict_form_may_not(tmp_path):
    """As without the form: of their arguments, names and types are enforced at most."""
    loose = {"type": "object", "properties": {"n": {"type": "integer", "not": {}}}, "not": {}}
    extras = RequestExtras(tools={"loose": loose})
    config = {"tools": {"parser": "hermes"}}
    reply = '<tool_call>\n{"name": "loose", "arguments": {"n": 1}}\n</tool_call>'
    output = output_of(tmp_path, reply, config, extras, structured={"json": COLOUR})
    assert output.error is None
    assert [call.name for call in output.tool_calls] == ["loose"]


def test_calls_and_texts_of_harmony(tmp_path):
    start, end = REASONING["harmony"]
    config = {"reasoning": {"parser": "harmony"}, "tools": {"parser": "harmony"}}
    extras = RequestExtras(tools=TOOLS["two"])
    form = {"json": COLOUR}
    head = end.removesuffix("<|channel|>final<|message|>")
    reply = f"{start}{THOUGHT}{head}{HARMONY_CALL}"
    output = output_of(tmp_path, reply, config, extras, structured=form)
    assert [json.loads(call.arguments) for call in output.tool_calls] == [FOOD]
    reply = f'{start}{THOUGHT}{end}{{"colour": "red"}}'
    output = output_of(tmp_path, reply, config, extras, structured=form)
    assert (output.reasoning, output.content) == (THOUGHT, '{"colour": "red"}')


def test_a_call_of_a_model_whose_template_shows_no_tools(tmp_path):
    """A grammar makes it write one, in a format that any model can write."""
    extras = RequestExtras(
        tools={"now": {"type": "object", "properties": {}, "additionalProperties": False}},
        calls=CallRules(required=["now"], parallel=False),
    )
    output = output_of(tmp_path, "I call nothing.", {}, extras)
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == [("now", {})]
    assert output.finish_reason == "tool_calls"
    free = RequestExtras(tools=extras.tools)
    with pytest.raises(RequestError, match="tools: no parser finds calls"):
        output_of(tmp_path, "I call nothing.", {}, free)
    with pytest.raises(RequestError, match="tools: no parser finds calls"):
        output_of(tmp_path, "I call nothing.", {"tools": {"parser": "none"}}, extras)


def test_a_lenient_schema_is_validated_at_the_end(tmp_path):
    schema = {"type": "object", "not": {"patternProperties": {"^size": False}}}
    good, bad = '{"size": 1}', '{"a": 1}'
    output = output_of(tmp_path, good, {}, structured={"json": schema, "lenient": True})
    assert (output.content, output.validation_error) == (good, None)
    output = output_of(tmp_path, bad, {}, structured={"json": schema, "lenient": True})
    assert output.validation_error.startswith("$: \"{'a': 1} should not be valid under")
    output = output_of(tmp_path, bad, {}, structured={"json": schema})
    assert output.error == (
        "structured.json: llguidance: not: expected a schema of constants, types, limits and "
        "required properties, not the keyword patternProperties; with `lenient`, the grammar "
        "leaves it out, and the finished answer is validated against the whole schema"
    )


def test_an_answer_without_text_cannot_be_validated(tmp_path):
    structured = {"json": {"not": {}}, "lenient": True}
    with pytest.raises(RequestError, match="structured.lenient: answers are validated as text"):
        output_of(tmp_path, "", {}, structured=structured, detokenize=False)


def test_an_answer_that_is_json_is_no_call(tmp_path):
    reply = '{"name": "now", "arguments": {}}'
    extras = RequestExtras(tools=TOOLS["two"])
    config = {"tools": {"parser": "json"}}
    output = output_of(tmp_path, reply, config, extras, structured={"json_object": True})
    assert (output.content, output.tool_calls, output.warning) == (reply, None, None)
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("required", [None, ["loose", "exact"]])
def test_one_strict_tool_is_strict_among_others(tmp_path, required):
    loose = {"type": "object"}
    exact = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    extras = RequestExtras(
        tools={"loose": loose, "exact": exact}, calls=CallRules(required=required, strict=["exact"])
    )
    output = output_of(tmp_path, "x", {"tools": {"parser": "hermes"}}, extras)
    assert "properties.a.uniqueItems: expected items of an enum" in output.error


@pytest.mark.parametrize(
    ("tools", "calls", "message"),
    [
        (None, CallRules(required=["now"]), "calls: expected none without tools"),
        ({"now": {}}, CallRules(required=["later"]), "calls: expected names of tools, got 'later'"),
        ({"now": {}}, CallRules(strict=["later"]), "calls: expected names of tools, got 'later'"),
    ],
)
def test_rules_of_calls_are_of_tools(tmp_path, tools, calls, message):
    extras = RequestExtras(tools=tools, calls=calls)
    with pytest.raises(RequestError, match=message):
        output_of(tmp_path, "x", {"tools": {"parser": "hermes"}}, extras)
