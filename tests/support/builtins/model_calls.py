"""Calls of tools as models write them, by the output parser of their format."""

# ruff: noqa: RUF001 - the markers of DeepSeek are written so

from __future__ import annotations

import json
import re

from hardpoint.builtin_plugins.parsers.gemma import Gemma
from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.headed_calls import (
    DeepSeekV3,
    DeepSeekV31,
    Granite32,
    GraniteParser,
    KimiK2,
    MistralParser,
)
from hardpoint.builtin_plugins.parsers.json_calls import Json, Llama3Json
from hardpoint.builtin_plugins.parsers.json_sections import (
    Cohere,
    Ernie45,
    Hermes,
    Hunyuan,
    Jamba,
    Longcat,
    MiniMax,
    Nemotron,
    Phi4Mini,
)
from hardpoint.builtin_plugins.parsers.python_calls import (
    Lfm2,
    Llama4Pythonic,
    Olmo3Parser,
    Pythonic,
)
from hardpoint.builtin_plugins.parsers.xml_calls import (
    DeepSeekV32,
    Glm45,
    MiniMaxM2,
    Qwen3Coder,
    SeedOss,
    Step3,
)
from hardpoint.plugins import OutputParserContext
from hardpoint.testing.scripted_tokenizer import ByteTokenizer
from hardpoint.typed import prepared_type

STEP = (
    *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>"),
    *("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
)
GLM = tuple(f"<{end}{tag}>" for tag in ("tool_call", "arg_key", "arg_value") for end in ("", "/"))
SINGULAR = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")


class JsonAfterText(Json):
    """With calls behind other text."""

    contract = 1

    class Options(Json.Options):
        after_text: bool = True


PARSERS = {
    "hermes": (Hermes, ()),
    "hermes, special": (Hermes, ("<tool_call>", "</tool_call>")),
    "json": (Json, ()),
    "json behind text": (JsonAfterText, ()),
    "llama3_json": (Llama3Json, ("<|python_tag|>",)),
    "llama3_json, text": (Llama3Json, ()),
    "mistral": (MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")),
    "mistral, old": (MistralParser, ("[TOOL_CALLS]",)),
    "granite": (GraniteParser, ()),
    "granite_3_2": (Granite32, ("<|tool_call|>",)),
    "kimi_k2": (KimiK2, KimiK2.required_tokens),
    "kimi_k2, singular": (KimiK2, (*KimiK2.required_tokens, *SINGULAR)),
    "deepseek_v3": (DeepSeekV3, DeepSeekV3.required_tokens),
    "deepseek_v3_1": (DeepSeekV31, DeepSeekV31.required_tokens),
    "gemma": (Gemma, Gemma.required_tokens),
    "harmony": (Harmony, (*Harmony.required_tokens, "<|return|>", "<|constrain|>")),
    "qwen3_coder": (Qwen3Coder, ()),
    "qwen3_coder, special": (Qwen3Coder, ("<tool_call>", "</tool_call>")),
    "seed_oss": (SeedOss, ("<seed:think>", "</seed:think>", "<seed:tool_call>")),
    "minimax_m2": (MiniMaxM2, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "deepseek_v3_2": (DeepSeekV32, ()),
    "step3": (Step3, STEP),
    "glm45": (Glm45, ()),
    "glm45, special": (Glm45, GLM),
    "ernie45": (Ernie45, ()),
    "hunyuan_a13b": (Hunyuan, ()),
    "jamba": (Jamba, ()),
    "longcat": (Longcat, ()),
    "minimax": (MiniMax, ()),
    "nemotron": (Nemotron, ()),
    "phi4_mini": (Phi4Mini, ("<|tool_call|>", "<|/tool_call|>")),
    "cohere": (Cohere, (*Cohere.required_tokens, "<|START_RESPONSE|>")),
    "lfm2": (Lfm2, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": (Olmo3Parser, ()),
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

FOOD = {"what": "soup [1], {2}", "size": "small", "name": "Bob"}
IN_JSON = json.dumps(FOOD)
IN_PYTHON = 'order_food(what="soup [1], {2}", size=\'small\', name="Bob")'
IN_GEMMA = 'call:order_food{what:<|"|>soup [1], {2}<|"|>,size:<|"|>small<|"|>,name:<|"|>Bob<|"|>}'
HERMES = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ORDER_CALL = f'{{"name": "order_food", "arguments": {IN_JSON}}}'
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
)
QWEN = (
    "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=order_food>\n"
    "<parameter=what>\nsoup [1], {2}\n</parameter>\n<parameter=size>\nsmall\n</parameter>\n"
    "<parameter=name>\nBob\n</parameter>\n</function>\n</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
    "<function=order_food>\n<parameter=what>soup [1], {2}</parameter>\n"
    "<parameter=size>small</parameter>\n<parameter=name>Bob</parameter>\n</function>\n"
    "</seed:tool_call>"
)
TAGS = (
    '<invoke name="now">\n</invoke>\n<invoke name="order_food">\n'
    '<parameter name="what">soup [1], {2}</parameter>\n'
    '<parameter name="size">small</parameter>\n'
    '<parameter name="name">Bob</parameter>\n</invoke>\n'
)
STEP_HEAD = "<｜tool_call_begin｜>function<｜tool_sep｜>"
STEP_CALLS = TAGS.replace("<invoke", STEP_HEAD + "<invoke").replace(
    "</invoke>", "</invoke><｜tool_call_end｜>"
)
FOOD_IN_GLM = "".join(
    f"<arg_key>{key}</arg_key>#<arg_value>{value}</arg_value>#" for key, value in FOOD.items()
)
GLM_CALLS = f"<tool_call>now#</tool_call>\n<tool_call>order_food#{FOOD_IN_GLM}</tool_call>"
LIST = f'[{{"name": "now", "arguments": {{}}}}, {ORDER_CALL}]'
COHERE = (
    '[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n    '
    f'{{"tool_call_id": "1", "tool_name": "order_food", "parameters": {IN_JSON}}}\n]'
)
# parser, calls of `now` and `order_food` as the model writes them, text that may come before
USUAL = [
    ("hermes", f"{HERMES}\n<tool_call>\n{ORDER_CALL}\n</tool_call>", "Hi"),
    ("hermes, special", f"{HERMES}\n<tool_call>\n{ORDER_CALL}\n</tool_call>", "Hi"),
    ("json", f'[{{"name": "now", "arguments": {{}}}}, {ORDER_CALL}]', "\n"),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "now", "parameters": {{}}}}; '
        f'{{"name": "order_food", "parameters": {IN_JSON}}}',
        "",
    ),
    ("mistral", f"[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]order_food[ARGS]{IN_JSON}", "Hi"),
    ("mistral, old", f'[TOOL_CALLS] [{{"name": "now", "arguments": {{}}}}, {ORDER_CALL}]', "Hi"),
    ("granite", f'<|tool_call|>[{{"name": "now", "arguments": {{}}}}, {ORDER_CALL}]', "Hi"),
    ("granite", f"{HERMES}\n<tool_call>\n{ORDER_CALL}\n</tool_call>", "Hi"),
    ("granite_3_2", f'<|tool_call|>[{{"name": "now", "arguments": {{}}}}, {ORDER_CALL}]', "Hi"),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI.format('now', 0, '{}')}"
        f"{KIMI.format('order_food', 11, IN_JSON)}<|tool_calls_section_end|>",
        "Hi",
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK[0].format('now', '{}')}\n"
        f"{DEEPSEEK[0].format('order_food', IN_JSON)}<｜tool▁calls▁end｜>",
        "Hi",
    ),
    (
        "deepseek_v3_1",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK[1].format('now', '{}')}"
        f"{DEEPSEEK[1].format('order_food', IN_JSON)}<｜tool▁calls▁end｜>",
        "Hi",
    ),
    (
        "gemma",
        f"<|tool_call>call:now{{}}<tool_call|><|tool_call>{IN_GEMMA}<tool_call|>",
        "Hi",
    ),
    ("qwen3_coder", QWEN, "Hi"),
    ("seed_oss", SEED, "Hi"),
    ("minimax_m2", f"<minimax:tool_call>\n{TAGS}</minimax:tool_call>", "Hi"),
    (
        "deepseek_v3_2",
        re.sub(
            "<(/?)(?=[fip])",
            r"<\1｜DSML｜",
            f"<function_calls>\n{TAGS}</function_calls>".replace(
                '">s', '" string="true">s'
            ).replace('">B', '" string="true">B'),
        ),
        "Hi",
    ),
    (
        "step3",
        "<｜tool_calls_begin｜>\n"
        + re.sub("<(/?)(?=[ip])", r"<\1steptml:", STEP_CALLS)
        + "<｜tool_calls_end｜>",
        "Hi",
    ),
    ("glm45", GLM_CALLS.replace("#", "\n"), "Hi"),
    ("glm45", GLM_CALLS.replace("#", ""), "Hi"),
    ("glm45, special", GLM_CALLS.replace("#", ""), "Hi"),
    ("ernie45", f"{HERMES}\n<tool_call>\n{ORDER_CALL}\n</tool_call>", "Hi"),
    ("hunyuan_a13b", f"<tool_calls>{LIST}</tool_calls>", "Hi"),
    ("jamba", f"<tool_calls>{LIST}</tool_calls>", "Hi"),
    (
        "minimax",
        f'<tool_calls>\n{{"name": "now", "arguments": {{}}}}\n{ORDER_CALL}\n</tool_calls>',
        "Hi",
    ),
    ("nemotron", f"<TOOLCALL>{LIST}</TOOLCALL>", "Hi"),
    ("phi4_mini", f"functools{LIST}", "Hi"),
    ("phi4_mini", f"<|tool_call|>{LIST}<|/tool_call|>", "Hi"),
    ("cohere", f"<|START_ACTION|>{COHERE}<|END_ACTION|>", "Hi"),
    ("olmo3", f"<function_calls>\nnow()\n{IN_PYTHON}\n</function_calls>", "Hi"),
    ("lfm2", f"<|tool_call_start|>[now(), {IN_PYTHON}]<|tool_call_end|>", ""),
    ("pythonic", f"[now(), {IN_PYTHON}]", " "),
    ("llama4_pythonic", f"<|python_start|>[now(), {IN_PYTHON}]<|python_end|>", ""),
    ("llama4_pythonic", f"[now(), {IN_PYTHON}]", ""),
]


def make(parser_type, special):
    """Return a parser and its tokenizer, which has these special tokens."""
    tokenizer = ByteTokenizer(special)
    context = OutputParserContext(
        name="calls",
        options=parser_type.Options(),
        tokenizer=tokenizer,
        arguments=prepared_type(parser_type)(),
    )
    return parser_type(context), tokenizer
