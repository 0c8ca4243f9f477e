"""Bodies that are large in one place: for each route and field, a name, a text, depth and items."""

import functools
import json
import time

import msgspec

MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": [MESSAGE], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/responses/compact": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/conversations": {"items": [MESSAGE]},
    "/v1/messages": {"model": "m", "messages": [MESSAGE], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "m", "messages": [MESSAGE]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/embeddings": {"input": "a"},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "a"},
}
"""A small valid body of each route."""

_VALUE = "<value>"
"""Stands for a large value in the text of a body."""

DEPTH = 25
MOST_ITEMS = 1_000_000  # `server.limits.items` is a little more, and a bracket is 8 items

SAMPLES = {
    "messages": [MESSAGE],
    "tools": [TOOL],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "structured_outputs": {"json": {}},
    "plugin_args": {"p": {}},
    "metadata": {"k": "v"},
    "stream_options": {"include_usage": True},
    "sampling_params": {"max_tokens": 1},
    "content": [{"type": "text", "text": "a"}],
    "input": [MESSAGE],
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
"""Values with parts, into which large ones are put as well."""


def large_values(size):
    """Return the large values of about `size` bytes, by description."""
    text, count = "x" * size, min(size // 8, MOST_ITEMS)
    deep = "[" * DEPTH + "]" * DEPTH
    return {
        "text": text,
        "text of line ends": "\n" * (size // 2),
        "text of letters beyond ASCII": "é" * (size // 2),
        "text of colons": "a: " * (size // 3),
        "name": {text: 1},
        "deep": json.loads(f"[{','.join([deep] * min(size // len(deep), MOST_ITEMS // 240))}]"),
        "numbers": [1234567] * count,
        "texts": ["ab"] * count,
        "names": {f"k{i}": 1 for i in range(count)},
        "tables": [{}] * (count // 9),
    }


@functools.cache
def large_texts(size):
    """Return the JSON of `large_values`.

    Encoded once: most of the time would be spent on that, and on collections with the values.
    """
    return {label: json.dumps(value) for label, value in large_values(size).items()}


@functools.cache
def parse_seconds(label, size):
    """Return the processor time in which Python's parser reads one of these texts."""
    begun = time.process_time()
    json.loads(large_texts(size)[label])
    return time.process_time() - begun


def places(type_, base):
    """Yield the paths of a type's fields, and of their parts."""
    for field in msgspec.structs.fields(type_):
        yield (field.encode_name,)
        value = base.get(field.encode_name, SAMPLES.get(field.encode_name))
        yield from _inside((field.encode_name,), value)


def _inside(path, value):
    if isinstance(value, list | dict):
        steps = [0] if isinstance(value, list) else list(value)
        for step in steps:
            yield (*path, step)
            yield from _inside((*path, step), value[step])
        if isinstance(value, dict):
            yield (*path, "unknown")


def body_with(base, path, value):
    """Return a body that has a value at a path."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        return [body_with(base[0] if base else None, rest, value)]
    base = base if isinstance(base, dict) else {}
    inner = base.get(step, SAMPLES.get(step))
    return {**base, step: body_with(inner, rest, value)}


def large_bodies(path, type_, size, *, inner=True):
    """Yield a name and the JSON of a body for each large value in each place of a route's body.

    Args:
        inner: whether in parts of fields, too.
    """
    base = BODIES.get(path, {})
    texts = large_texts(size)
    for label in ("name", "names"):  # of fields of the body itself
        yield label, f"{json.dumps(base)[:-1]}, {texts[label][1:]}".encode()
    for place in places(type_, base):
        if len(place) > 1 and not inner:
            continue
        around = json.dumps(body_with(base, place, _VALUE))
        for label, text in texts.items():
            body = around.replace(json.dumps(_VALUE), text)
            yield f"{label} at {'.'.join(map(str, place))}", body.encode()
