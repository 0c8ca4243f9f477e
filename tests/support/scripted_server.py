"""A server with a real engine on the scripted model, which thinks and calls a tool."""

import contextlib
import json

from hardpoint import AsyncLLM
from hardpoint.testing import scripted_config, write_scripted_model

from .http_server import running

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
LENGTH = 1024
REPLIES = {
    "say abc": " abc abc abc",
    "emoji": "go 😀 on",
    "loop": "na" * 200,
    "user: hi\nassistant: ": "hello",
    "user: fox\nassistant: ": "the quick brown fox jumps",
    "user: think\nassistant: ": "<think>so it is</think>yes",
    "user: dream\nassistant: ": "<think>and so on and on",
    "user: go on\nassistant: one": " two three",
    f"tools: {json.dumps([WEATHER])}\nuser: weather\nassistant: ": "I look. " + CALL,
    f"tools: {json.dumps([WEATHER])}\nuser: twice\nassistant: ": CALL + CALL,
    f"tools: {json.dumps([WEATHER])}\nuser: hi\nassistant: ": "hello",
}


def server_config(folder, **tables):
    """Return the configuration of a server of the model that `write_model` wrote."""
    return scripted_config(
        folder,
        {
            "server": {"port": 0, "access_log": "off", "served_names": ["scripted", "other"]},
            "stats": {"sinks": []},
            "reasoning": {"parser": "think_tags"},
            "tools": {"parser": "hermes"},
            **tables,
        },
    )


def write_model(folder):
    """Write the model."""
    return write_scripted_model(
        folder, REPLIES, special_tokens=TAGS, max_position_embeddings=LENGTH
    )


@contextlib.contextmanager
def scripted_server(folder, **tables):
    """Run a server of the model, written into the folder, with tables of its configuration."""
    with running(AsyncLLM(config=server_config(write_model(folder), **tables))) as server:
        yield server


def user(text):
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]
