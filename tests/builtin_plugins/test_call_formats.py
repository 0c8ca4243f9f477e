"""Grammars of tool calls: whatever they allow, the same parser finds as calls that fit."""

# ruff: noqa: RUF001 - the markers of DeepSeek are written so

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
from support.builtins.model_calls import FOOD, IN_JSON, PARSERS, TOOLS, USUAL, make
from support.searching import searches_long

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.builtin_plugins.parsers.json_sections import Hermes
from hardpoint.plugins import OutputParserContext, ParserRequest
from hardpoint.plugins.grammars import GrammarContext
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from hardpoint.plugins.structured import (
    AnyTextFormat,
    ConstStringFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    StructuralTag,
    StructuredOutputs,
    TagFormat,
    TokenFormat,
    TriggeredTagsFormat,
    walk_formats,
)
from hardpoint.plugins.text.output_parser import join_events
from hardpoint.testing.scripted_tokenizer import ByteTokenizer

# What texts are likely to get wrong, where a grammar lets them.
TRICKS = (
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "<|python_start|>["),
    *("</parameter>", "\n</function>", "\n<parameter=x>", "</function>", "<seed:tool_call>"),
    *("[now(", "x [order_food(", '{"name": ', 'x {"name": "order_food"', "<function=order_food>"),
    *("<arg_key>", "</arg_value>", "<tool_calls>[", "functools[", "<function_calls>"),
    *('<invoke name="now">', "\n</invoke>", "<answer>", "</response>"),
    *("\n", "\n\n", '\\"', "\\n", "\\", "'", '"', "{", "[", "é", "🙂", "5"),
    *(
        "null",
        "true",
        " ",
        "\\u00",
        "\x1c{",
        "\u3000[",
        "```",
        "\n```",
        "[TOOL_CALLS]",
        ", ",
        "1e9",
    ),
)
CLOSERS = (
    '"',
    "'",
    "}",
    "]",
    ")",
    "\n</parameter>",
    "</parameter>",
    "\n</function>",
    "</function>",
    "</arg_value>",
    "</steptml:parameter>",
    "</｜DSML｜parameter>",
    "</｜DSML｜function_calls>",
    "</minimax:tool_call>",
)


def compiled(format, tokenizer):
    context = GrammarContext(
        name="llguidance",
        options=LLGuidance.Options(),
        vocabulary=tokenizer.vocabulary(),
        vocab_size=tokenizer.vocab_size,
    )
    tag = StructuralTag(format=format)
    checked = StructuredOutputs.checked(StructuredOutputs(structural_tag=tag))
    return LLGuidance(context).compile(checked)


def advanced(state, token_ids):
    """Return the state after tokens; None if they are not allowed."""
    after = state.fork()
    return after if all(map(after.advance, token_ids)) else None


def sequence(*parts):
    text = ConstStringFormat
    return SequenceFormat(elements=[text(value=x) if isinstance(x, str) else x for x in parts])


def regex(pattern):
    return RegexFormat(pattern=pattern)


def tagged(pattern):
    return TagFormat(begin="<a>", content=regex(pattern), end="</a>")


@pytest.mark.parametrize(
    ("format", "fits", "others"),
    [
        (tagged(".*"), ["<a>hello</a>", "<a></a>", "<a></</a>"], ["<a>x", "<a>x</a></a>"]),
        (tagged(r"[\s\S]{1,9}"), ["<a>x</a>", "<a></a></a>"], ["<a></a>", "<a>0123456789</a>"]),
        (
            TriggeredTagsFormat(triggers=["<a>"], tags=[tagged(".{1,5}")]),
            ["x", "x <a>y</a> z", "<a>y</a><a>z</a>"],
            ["<a></a>", "<a>y"],
        ),
        (sequence(regex("[a-z.]+"), ".com"), ["a.com", "a.b.com"], [".com", "a.com.", "a.co"]),
        (sequence(regex("[0-9]+"), regex("0")), ["10", "100"], ["0", "1", "101"]),
        (sequence(regex("a|ab"), regex("bc|c"), "."), ["abc.", "abbc."], ["ab.", "abcc."]),
        (
            sequence(OrFormat(elements=[regex(".+"), sequence("b", AnyTextFormat())]), "c", "."),
            ["ac.", "bc.", "b\n\nc."],
            ["c.", "a\nc.", "ac", "acc."],
        ),
        (sequence(OptionalFormat(content=regex("[a-z]+")), "ab"), ["ab", "aab"], ["a", "abb"]),
        (sequence(regex("a|abcd"), AnyTextFormat()), ["a", "abce"], ["", "b"]),
        (sequence(regex("a|abcd"), AnyTextFormat(), "."), ["a.", "abce."], [".", "ab", "a.."]),
    ],
)
def test_a_regular_expression_leaves_the_text_after_it(format, fits, others):
    tokenizer = ByteTokenizer([])
    start = compiled(format, tokenizer)
    for text in (*fits, *others):
        assert allows(start, tokenizer.encode(text), tokenizer) == (text in fits), text


def walk(start, chosen, tokenizer, longest):
    """Return the tokens of a random text of a grammar; it ends soon after `longest` of them."""
    state, ids = start.fork(), []
    words = -(-tokenizer.vocab_size // 32)
    encode = tokenizer.encode
    while len(ids) < longest + 20_000:
        row = np.zeros(words, np.int32)
        can_end = state.fill_bitmask(row)
        is_long = len(ids) > longest
        if can_end and (is_long or chosen.random() < 0.05):
            return ids
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            assert can_end
            return ids
        step = [chosen.choice(allowed)]
        if len(allowed) > 1:
            special = [token for token in allowed if token >= 256]
            tried = []
            if is_long:
                closers = chosen.sample(CLOSERS, len(CLOSERS))
                tried = [*([[special[-1]]] if special else []), *map(encode, closers)]
            elif special and chosen.random() < 0.1:
                tried = [[chosen.choice(special)]]
            elif chosen.random() < 0.5:
                tried = [encode(chosen.choice(TRICKS))]
            step = next((candidate for candidate in tried if advanced(state, candidate)), step)
        for token in step:
            assert state.advance(token)
        ids += step
    raise AssertionError(f"no end of {tokenizer.decode(ids)!r}")


def events_of(parser, tokenizer, ids, tools):
    """Return the events of an output, and its text."""
    texts = {token: text for text, token in tokenizer.special_tokens.items()}
    state = parser.open(ParserRequest(tools=tools))
    events, text, tokens = [], "", tokenizer.vocabulary().tokens
    for is_byte, run in itertools.groupby(ids, lambda token: token < 256):
        if is_byte:
            pieces = [b"".join(tokens[token] for token in run).decode()]
            events += state.feed(pieces[0])
        else:
            pieces = []
            for token in run:
                pieces.append(texts[token])
                is_marker = token in parser.token_ids
                events += (
                    state.feed_token(token, texts[token]) if is_marker else state.feed(texts[token])
                )
        text += "".join(pieces)
    return join_events([*events, *state.finish()]), text


def parsed(parser, tokenizer, ids, tools):
    """Return the calls and the content of tokens, and their text; expect no reasoning."""
    events, text = events_of(parser, tokenizer, ids, tools)
    calls, content = [], ""
    for event in events:
        assert not isinstance(event, ReasoningText), f"{text!r}: {event}"
        match event:
            case MalformedText(part, reason):  # an end tag in free text behind a call
                expected = f"there is {part} behind a call: a value of it may be cut"
                assert (part[:2], bool(calls), reason) == ("</", True, expected), (
                    f"{text!r}: {event}"
                )
                content += part
            case ToolCallBegin(name, _):
                calls.append([name, ""])
            case ToolCallArguments(part):
                calls[-1][1] += part
            case ContentText(part):
                content += part
    return calls, content, text


@pytest.mark.parametrize(("tools", "parallel"), [*((name, True) for name in TOOLS), ("two", False)])
@pytest.mark.parametrize("parser", PARSERS)
def test_every_text_is_parsed_to_calls_that_fit(parser, tools, parallel):
    schemas = TOOLS[tools]
    subject, tokenizer = make(*PARSERS[parser])
    chosen = random.Random(f"{parser} {tools} {parallel}")
    for required in (True, False):
        format = subject.call_format(schemas, required=required, parallel=parallel)
        start = compiled(format, tokenizer)
        for _ in range(40 if searches_long() else 1):
            ids = walk(start, chosen, tokenizer, 100)
            calls, content, text = parsed(subject, tokenizer, ids, schemas)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[name])
            assert not required or (calls and not content.strip()), text
            assert parallel or len(calls) <= 1, text


def allows(start, token_ids, tokenizer):
    """Return whether a text is complete in a grammar."""
    after = advanced(start, token_ids)
    row = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    return after is not None and after.fill_bitmask(row)


@pytest.mark.parametrize(("parser", "calls", "before"), USUAL, ids=[case[0] for case in USUAL])
def test_calls_as_the_model_writes_them_are_allowed(parser, calls, before):
    schemas = TOOLS["two"]
    subject, tokenizer = make(*PARSERS[parser])
    for required, text in ((True, calls), (False, before + calls), (False, "Hello, you.")):
        ids = tokenizer.encode(text)
        several = compiled(subject.call_format(schemas, required=required), tokenizer)
        assert allows(several, ids, tokenizer), text
        single = subject.call_format(schemas, required=required, parallel=False)
        assert allows(compiled(single, tokenizer), ids, tokenizer) == (calls not in text)
    read_calls, _, _ = parsed(subject, tokenizer, tokenizer.encode(calls), schemas)
    assert [(name, json.loads(text)) for name, text in read_calls] == [
        ("now", {}),
        ("order_food", FOOD),
    ]


class WithAddedTokens(ByteTokenizer):
    """Its tokens are added to the vocabulary, and not special, as `</tool_call>` of Qwen."""

    def vocabulary(self):
        return msgspec.structs.replace(super().vocabulary(), special=tuple(self.eos_token_ids))

    def decode(self, token_ids, *, skip_special_tokens=True):
        skipped = self.eos_token_ids if skip_special_tokens else ()
        visible = [token for token in token_ids if token not in skipped]
        return super().decode(visible, skip_special_tokens=False)


@pytest.mark.parametrize("tokenizer_type", [ByteTokenizer, WithAddedTokens])
def test_only_a_special_token_ends_a_string(tokenizer_type):
    tokenizer = tokenizer_type(["<tool_call>", "</tool_call>"])
    context = OutputParserContext(name="calls", options=Hermes.Options(), tokenizer=tokenizer)
    subject = Hermes(context)
    schemas = {"write": {"type": "object", "properties": {"a": {"type": "string"}}}}
    start = compiled(subject.call_format(schemas, required=True), tokenizer)
    text = """<tool_call>
{"name": "write", "arguments": {"a":"</tool_call>, <tool_call>."}}
</tool_call>"""
    ids, is_text = tokenizer.encode(text * 2), tokenizer_type is WithAddedTokens
    assert allows(start, tokenizer.encode(text), tokenizer) == is_text
    events, _ = events_of(subject, tokenizer, ids, schemas)
    assert any(isinstance(event, MalformedText) for event in events) != is_text
    if is_text:
        calls, _, _ = parsed(subject, tokenizer, ids, schemas)
        assert calls == [["write", '{"a":"</tool_call>, <tool_call>."}']] * 2


# parser, what comes before arguments behind other text, what follows, and arguments that fit
AFTER_TEXT = [
    ("llama3_json", '{"name": "now", "parameters": ', "}", None),
    ("llama3_json", '[{ "type": "function",\n"name" :"now", "parameters": ', "}]", None),
    ("json behind text", '{"name":"now","arguments": ', "}", None),
    ("pythonic", "[now(", ")]", None),
    ("pythonic", "[ now (", ")]", None),
    ("qwen3_coder", "<function=now>\n", "</function>\n", ""),
    ("qwen3_coder, special", "<function=now>\n", "</function>\n", ""),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>", "", "{}"),
    (
        "kimi_k2, singular",
        "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
        "",
        "{}",
    ),
]


@pytest.mark.parametrize(("parser", "before", "behind", "fitting"), AFTER_TEXT)
def test_the_grammar_has_no_other_calls_after_text(parser, before, behind, fitting):
    subject, tokenizer = make(*PARSERS[parser])
    schemas = {"now": {"type": "object", "additionalProperties": False}}
    start = compiled(subject.call_format(schemas, required=False), tokenizer)
    wrong = {"pythonic": "a=1", "qwen3_coder": "<parameter=a>\n1\n</parameter>\n"}
    arguments = wrong.get(parser.partition(",")[0], '{"a": 1}')
    text = f"So: {before}{arguments}{behind}"
    ends = "<|tool_call_end|>" if parser.startswith("kimi") else ""
    calls, _, _ = parsed(subject, tokenizer, tokenizer.encode(text + ends), schemas)
    assert [(name, json.loads(arguments_text)) for name, arguments_text in calls] == [
        ("now", {"a": 1})
    ]
    assert not allows(start, tokenizer.encode(text + ends), tokenizer)
    assert allows(start, tokenizer.encode("So: { [no( <func"), tokenizer)
    if fitting is not None:
        if "section" in before:
            ends += "<|tool_call_section_end|>"
        ids = tokenizer.encode(f"So: {before}{fitting}{behind}{ends}")
        assert allows(start, ids, tokenizer)


def test_harmony_has_a_call_or_a_final_message():
    subject, tokenizer = make(*PARSERS["harmony"])
    header = "<|channel|>commentary to=functions.order_food <|constrain|>json<|message|>"
    for required in (True, False):
        format = subject.call_format(TOOLS["two"], required=required)
        start = compiled(format, tokenizer)
        assert allows(start, tokenizer.encode(header + IN_JSON), tokenizer)
        final = tokenizer.encode("<|channel|>final<|message|>Hello")
        assert allows(start, final, tokenizer) == (not required)
        assert not allows(start, tokenizer.encode("Hello"), tokenizer)
    markers = subject.markers()
    assert tokenizer.decode(markers.message_prefix, skip_special_tokens=False) == (
        "<|start|>assistant"
    )
    assert tokenizer.decode(markers.content_prefix, skip_special_tokens=False) == (
        "<|channel|>final<|message|>"
    )


@pytest.mark.parametrize("parser", PARSERS)
def test_no_required_answer_is_text(parser):
    subject, tokenizer = make(*PARSERS[parser])
    start = compiled(subject.call_format(TOOLS["two"], required=True), tokenizer)
    for text in ("Hello", "", "{}", "[]", '{"name": "other", "arguments": {}}'):
        assert not allows(start, tokenizer.encode(text), tokenizer), text


@pytest.mark.parametrize("parser", PARSERS)
def test_markers_that_are_special_tokens_are_matched_by_id(parser):
    subject, tokenizer = make(*PARSERS[parser])
    for required in (True, False):
        tokens = set()
        for part in walk_formats(subject.call_format(TOOLS["two"], required=required)):
            ends = (part.begin, part.end) if isinstance(part, TagFormat) else (part,)
            tokens |= {end.token for end in ends if isinstance(end, TokenFormat)}
            texts = [end for end in ends if isinstance(end, str)]
            texts += [part.value] if hasattr(part, "value") else []
            assert not any(token in text for text in texts for token in tokenizer.special_tokens)
        assert tokens <= set(tokenizer.special_tokens.values())


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("name", ["a b", "", 'a"b', "a{", "x" * 257, "a>"])
def test_a_tool_whose_name_calls_cannot_have_is_refused(parser, name):
    subject, _ = make(*PARSERS[parser])
    with pytest.raises(ValueError, match=r"tool's name without white space.*got '"):
        subject.call_format({name: {}}, required=True)


def schema_of(**parameter):
    return {"f": {"type": "object", "properties": {"a": parameter}, "required": ["a"]}}


REFUSED = [
    ("pythonic", schema_of(type="array", uniqueItems=True), "'f'.*'uniqueItems'"),
    ("pythonic", schema_of(oneOf=[{"type": "null"}]), "'f'.*'oneOf'"),
    ("pythonic", schema_of(type="integer", minLength=1), "'f'.*'minLength'"),
    ("pythonic", schema_of(type="text"), "'f'.*'type: text'"),
    ("pythonic", {"f": {"type": "object", "minProperties": 1}}, "'f'.*'minProperties'"),
    ("pythonic", {"f": {"type": "array"}}, "schema of an object, got type 'array'"),
    ("pythonic", {"f": {"properties": {"class": {}}}}, "named by Python identifiers, got 'class'"),
    ("pythonic", {"f": {"properties": {"ﬁ": {}}}}, "named by Python identifiers, got 'ﬁ'"),
    ("pythonic", {"1f": {}}, "a tool named by a Python identifier, got '1f'"),
    ("llama4_pythonic", schema_of(**{"not": {}}), "'f'.*'not'"),
    ("gemma", schema_of(type="string", pattern="a+"), "'f'.*'pattern'"),
    ("gemma", {"f": {"properties": {"a b": {}}}}, "'f'.*got 'a b'"),
    ("qwen3_coder", schema_of(type="string", pattern="a+"), "'f'.*'pattern'"),
    ("qwen3_coder", schema_of(type=["string", "integer"], minimum=1), "'f'.*'minimum'"),
    ("qwen3_coder", schema_of(properties={}), "'f'.*'properties'"),
    ("qwen3_coder", {"f": {"properties": {"a>": {}}}}, "'f'.*got 'a>'"),
    ("seed_oss", schema_of(type="string", enum=["</parameter>"]), "'f'.*'</parameter>'"),
    ("minimax_m2", {"f": {"properties": {'a"': {}}}}, "'f'.*without angle brackets, quotes and"),
    ("glm45", schema_of(type="string", enum=["</arg_value>"]), "'f'.*'</arg_value>'"),
    ("json", {"f": {"type": "string"}}, "'f'.*schema of an object, got type 'string'"),
]


@pytest.mark.parametrize(("parser", "tools", "message"), REFUSED)
def test_a_schema_that_the_format_cannot_express_is_refused(parser, tools, message):
    subject, _ = make(*PARSERS[parser])
    for required in (True, False):
        with pytest.raises(ValueError, match=message):
            subject.call_format(tools, required=required)


SCHEMAS = [
    {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": ["string", "integer", "null"]},
    {"anyOf": [{"type": "string", "enum": ["a", "\n"]}, {"type": "null"}]},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"b": {"type": "string"}, "c": {}}, "required": ["c"]},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 1},
    {"enum": ["x", 1, None, True, [1, "y"], {"z": 0.5}]},
    {"const": "'\\\""},
    {"$ref": "#/$defs/Tree"},
    {},
]
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/Tree"}},
    "required": ["name"],
}


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize(
    "parser",
    ["gemma", "glm45", "glm45, special", "deepseek_v3_2", "pythonic", "qwen3_coder", "seed_oss"],
)
def test_values_that_are_no_json_fit_their_schema(parser, schema):
    tools = schema_of(**schema)
    tools["f"]["$defs"] = {"Tree": TREE}
    subject, tokenizer = make(*PARSERS[parser])
    start = compiled(subject.call_format(tools, required=True, parallel=False), tokenizer)
    chosen = random.Random(f"{parser} {schema}")
    for _ in range(40 if searches_long() else 2):
        calls, _, text = parsed(subject, tokenizer, walk(start, chosen, tokenizer, 60), tools)
        jsonschema.validate(json.loads(calls[0][1]), tools["f"])
        assert len(calls) == 1, text


def test_text_of_a_tag_may_have_other_tags():
    subject, tokenizer = make(*PARSERS["qwen3_coder"])
    tools = schema_of(type="string")
    start = compiled(subject.call_format(tools, required=True), tokenizer)
    call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in ("<p>\n</p>", "\n<param", "x</function>", "<parameter=a>x"):
        is_whole = text != "<parameter=a>x"  # which is a parameter at the beginning of a line
        assert allows(start, tokenizer.encode(call.format(text)), tokenizer) == is_whole, text


def test_a_tag_inside_a_string_of_a_list_does_not_end_the_value():
    subject, tokenizer = make(*PARSERS["seed_oss"])
    tools = schema_of(type="array", items={"type": "string"})
    value = '["</parameter>\\"", "b"]'
    text = (
        f"<seed:tool_call>\n<function=f>\n<parameter=a>{value}</parameter>\n</function>\n"
        "</seed:tool_call>"
    )
    start = compiled(subject.call_format(tools, required=True), tokenizer)
    assert allows(start, tokenizer.encode(text), tokenizer)
    calls, _, _ = parsed(subject, tokenizer, tokenizer.encode(text), tools)
    assert json.loads(calls[0][1]) == {"a": ['</parameter>"', "b"]}


def test_a_parameter_that_refers_to_a_string_is_a_string():
    subject, tokenizer = make(*PARSERS["qwen3_coder"])
    tools = {
        "f": {
            "$defs": {"Size": {"type": "string", "enum": ["5", "6"]}},
            "properties": {"a": {"$ref": "#/$defs/Size"}},
        }
    }
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    calls, _, _ = parsed(subject, tokenizer, tokenizer.encode(text), tools)
    assert json.loads(calls[0][1]) == {"a": "5"}
    assert allows(
        compiled(subject.call_format(tools, required=True), tokenizer),
        tokenizer.encode(text),
        tokenizer,
    )
