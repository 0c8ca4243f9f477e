"""Grammars of tool calls: whatever they allow, the same parser finds as calls that fit."""

# ruff: noqa: RUF001 - the markers of DeepSeek are written so

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.builtin_plugins.parsers.gemma import Gemma
from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.headed_calls import (
    DeepSeekV3,
    DeepSeekV31,
    Granite,
    Granite32,
    KimiK2,
    Mistral,
)
from hardpoint.builtin_plugins.parsers.json_calls import Hermes, Json, Llama3Json
from hardpoint.builtin_plugins.parsers.python_calls import Llama4Pythonic, Pythonic
from hardpoint.builtin_plugins.parsers.xml_calls import Qwen3Coder, SeedOss
from hardpoint.plugins import OutputParserContext, ParserRequest
from hardpoint.plugins.arguments import prepared_type
from hardpoint.plugins.grammars import GrammarContext, Vocabulary
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    join_events,
)
from hardpoint.plugins.structured import (
    AnyText,
    ConstString,
    JsonSchema,
    Regex,
    SpecialToken,
    StructuralTag,
    StructuredOutputs,
    Tag,
    TriggeredTags,
    walk_formats,
)
from hardpoint.testing.text.output_parser_suite import ByteTokenizer

PARSERS = {
    "hermes": (Hermes, ()),
    "hermes, special": (Hermes, ("<tool_call>", "</tool_call>")),
    "json": (Json, ()),
    "llama3_json": (Llama3Json, ("<|python_tag|>",)),
    "llama3_json, text": (Llama3Json, ()),
    "mistral": (Mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")),
    "mistral, old": (Mistral, ("[TOOL_CALLS]",)),
    "granite": (Granite, ()),
    "granite_3_2": (Granite32, ("<|tool_call|>",)),
    "kimi_k2": (KimiK2, KimiK2.required_tokens),
    "deepseek_v3": (DeepSeekV3, DeepSeekV3.required_tokens),
    "deepseek_v3_1": (DeepSeekV31, DeepSeekV31.required_tokens),
    "gemma": (Gemma, Gemma.required_tokens),
    "harmony": (Harmony, (*Harmony.required_tokens, "<|return|>", "<|constrain|>")),
    "qwen3_coder": (Qwen3Coder, ()),
    "qwen3_coder, special": (Qwen3Coder, ("<tool_call>", "</tool_call>")),
    "seed_oss": (SeedOss, ("<seed:think>", "</seed:think>", "<seed:tool_call>")),
    "pythonic": (Pythonic, ()),
    "llama4_pythonic": (Llama4Pythonic, ("<|python_start|>", "<|python_end|>")),
    "llama4_pythonic, text": (Llama4Pythonic, ()),
}
ORDER = {
    "type": "object",
    "title": "Order",
    "properties": {
        "what": {"type": "string", "description": "of it"},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "size": {"type": "string", "enum": ["small", 'it\'s "x"\n', "großé", "5", "null"]},
        "note": {"type": ["string", "null"], "default": None},
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
    },
    "required": ["what", "size", "name"],
}
NESTED = {
    "$defs": {
        "Color": {"enum": ["red", "blue"], "type": "string"},
        "Point": {
            "type": "object",
            "properties": {
                "x": {"type": "number"},
                "label": {"type": "string"},
                "color": {"$ref": "#/$defs/Color"},
            },
            "required": ["x", "label"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "color": {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"},
        "fast": {"type": "boolean"},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "level": {"const": 3},
        "extra": {"type": "object"},
    },
    "required": ["at", "tags", "fast"],
}
TOOLS = {
    "order": {"order_food": ORDER},
    "nested": {"draw": NESTED},
    "two": {"now": {"type": "object", "properties": {}}, "order_food": ORDER},
    "no schema": {"now": {}},
}
# What texts are likely to get wrong, where a grammar lets them.
TRICKS = (
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "<|python_start|>["),
    *("</parameter>", "\n</function>", "\n<parameter=x>", "</function>", "<seed:tool_call>"),
    *("[now(", '{"name": ', "\n", "\n\n", '\\"', "\\n", "\\", "'", '"', "{", "[", "é", "🙂", "5"),
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
)


def make(parser_type, special):
    tokenizer = ByteTokenizer(special)
    context = OutputParserContext(
        name="calls",
        options=parser_type.Options(),
        tokenizer=tokenizer,
        arguments=prepared_type(parser_type)(),
    )
    return parser_type(context), tokenizer


def compiled(format, tokenizer):
    bytes_of = [bytes([i]) for i in range(256)] + [t.encode() for t in tokenizer.special_tokens]
    special = tuple(range(256, len(bytes_of)))
    vocabulary = Vocabulary(tokens=tuple(bytes_of), special=special)
    context = GrammarContext(
        name="llguidance",
        options=LLGuidance.Options(),
        vocabulary=vocabulary,
        vocab_size=len(bytes_of),
    )
    tag = StructuralTag(format=format)
    checked = StructuredOutputs.checked(StructuredOutputs(structural_tag=tag))
    return LLGuidance(context).compile(checked)


def advanced(state, token_ids):
    """Return the state after tokens; None if they are not allowed."""
    after = state.fork()
    return after if all(map(after.advance, token_ids)) else None


def walk(start, chosen, tokenizer, longest):
    """Return the tokens of a random text of a grammar; it ends soon after `longest` of them."""
    state, ids = start.fork(), []
    words = -(-tokenizer.vocab_size // 32)
    encode = tokenizer.encode
    while len(ids) < longest + 4000:
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
            elif chosen.random() < 0.5:
                tried = [encode(chosen.choice(TRICKS)), *([[t] for t in special])]
            step = next((one for one in tried if advanced(state, one)), step)
        for token in step:
            assert state.advance(token)
        ids += step
    raise AssertionError(f"no end of {bytes(t for t in ids if t < 256)!r}")


def parsed(parser, tokenizer, ids, tools):
    """Return calls, content, and the text of the tokens."""
    texts = {token: text for text, token in tokenizer.special_tokens.items()}
    state = parser.open(ParserRequest(tools=tools))
    events, text, run = [], "", b""
    for token in [*ids, None]:
        if token is not None and token < 256:
            run += bytes([token])
            continue
        events += state.feed(run.decode()) if run else []
        text += run.decode()
        run = b""
        if token in parser.token_ids:
            events += state.feed_token(token, texts[token])
        elif token is not None:
            events += state.feed(texts[token])
        text += texts.get(token, "")
    events = join_events([*events, *state.finish()])
    calls, content = [], ""
    for event in events:
        match event:
            case ToolCallBegin(name, _):
                calls.append([name, ""])
            case ToolCallArguments(part):
                calls[-1][1] += part
            case ContentText(part):
                content += part
            case MalformedText(part, reason):
                raise AssertionError(f"{text!r}: {reason}")
            case ReasoningText():
                raise AssertionError(f"{text!r}: reasoning")
    return calls, content, text


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("parser", PARSERS)
def test_every_text_is_parsed_to_calls_that_fit(parser, tools, parallel):
    schemas = TOOLS[tools]
    subject, tokenizer = make(*PARSERS[parser])
    chosen = random.Random(f"{parser} {tools} {parallel}")
    for required in (True, False):
        format = subject.call_format(schemas, required=required, parallel=parallel)
        start = compiled(format, tokenizer)
        for _ in range(WALKS):
            ids = walk(start, chosen, tokenizer, 100)
            calls, content, text = parsed(subject, tokenizer, ids, schemas)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[name])
            assert not required or (calls and not content.strip()), text
            assert parallel or len(calls) <= 1, text


WALKS = 40
