"""Embeddings in the body of `/v1/completions`."""

from __future__ import annotations

import base64
import io
import math
import pickle
import re

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support.async_requests import config
from support.http_server import running

from hardpoint import AsyncLLM
from hardpoint.testing import write_scripted_model

PATH = "/v1/completions"
ON = {"plugin": {"prompt_embeddings": {"enabled": True, "max_bytes": 400}}}
IDS = [64, 65, 37, 66, 188]
ROWS = np.array([[token, token] for token in IDS], dtype=np.float32)


def engine(folder, *, allowed, **tables):
    limits = {"prompts": 8, "n": 8}
    server = {"port": 0, "prompt_embeds": allowed, "limits": limits}
    return AsyncLLM(config=config(write_scripted_model(folder), server=server, **tables))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    llm = engine(tmp_path_factory.mktemp("model"), allowed=True, **ON)
    with running(llm) as running_server:
        yield running_server
    llm.close()


def text(data):
    return base64.b64encode(data).decode()


def tensors(**named):
    return text(safetensors.torch.save({name: rows.clone() for name, rows in named.items()}))


def raw(rows, dtype="float32"):
    return {"data": text(rows.tobytes()), "dtype": dtype, "shape": list(rows.shape)}


TENSOR = torch.from_numpy(ROWS)
SAME = {
    "safetensors": tensors(prompt_embeds=TENSOR),
    "safetensors of bfloat16": tensors(prompt_embeds=TENSOR.to(torch.bfloat16)),
    "safetensors of float16": tensors(prompt_embeds=TENSOR.half()),
    "numbers": raw(ROWS),
    "numbers of float16": raw(ROWS.astype("<f2"), "float16"),
    "numbers of bfloat16": raw(TENSOR.to(torch.bfloat16).view(torch.int16).numpy(), "bfloat16"),
}


def body(**fields):
    return {"max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}


@pytest.fixture(scope="module")
def expected(server):
    return server.post(PATH, body(prompt=IDS)).json()["choices"][0]


@pytest.mark.parametrize("form", SAME)
def test_answers_are_those_of_ids(server, expected, form):
    answer = server.post(PATH, body(prompt_embeds=SAME[form])).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["prompt_token_ids"] == [None] * 5
    assert answer["usage"]["prompt_tokens"] == 5


def test_a_mixed_prompt_streamed_with_several_completions(server, expected):
    fields = {
        "prompt": [64, 0, 0, 66, 188],
        "prompt_is_token_ids": [True, False, False, True, True],
        "prompt_embeds": raw(ROWS[1:3]),
    }
    events = server.events(PATH, body(**fields, n=2, stream=True))
    tokens = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            tokens[choice["index"]] += choice.get("token_ids", [])
    assert tokens == dict.fromkeys((0, 1), expected["token_ids"])


def tokens_of(choices):
    return [(choice["index"], choice["token_ids"]) for choice in choices]


def test_several_in_one_request_are_as_several_prompts(server):
    ids = [IDS, IDS[:2], IDS[2:]]
    rows = [ROWS, ROWS[:2], ROWS[2:]]
    expected = server.post(PATH, body(prompt=ids, n=2)).json()
    forms = [
        raw(rows[0]),
        tensors(prompt_embeds=torch.from_numpy(rows[1]).bfloat16()),
        raw(rows[2]),
    ]
    answer = server.post(PATH, body(prompt_embeds=forms, n=2)).json()
    assert tokens_of(answer["choices"]) == tokens_of(expected["choices"])
    assert [index for index, _ in tokens_of(answer["choices"])] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] == 10
    mixed = {
        "prompt": [[64, 0, 0, 66, 188], [0, 65], [0, 0, 0]],
        "prompt_is_token_ids": [[True, False, False, True, True], [False, True], [False] * 3],
        "prompt_embeds": [raw(ROWS[1:3]), raw(ROWS[:1]), raw(ROWS[2:])],
    }
    answer = server.post(PATH, body(**mixed, n=2)).json()
    assert tokens_of(answer["choices"]) == tokens_of(expected["choices"])
    choices = {}
    for event in server.events(PATH, body(prompt_embeds=forms, stream=True)):
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    whole = server.post(PATH, body(prompt=ids)).json()["choices"]
    assert sorted(choices.items()) == tokens_of(whole)
    (choice,) = server.post(PATH, body(prompt_embeds=forms[:1])).json()["choices"]
    assert (choice["index"], choice["token_ids"]) == tokens_of(whole)[0]


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return text(buffer.getvalue())


def with_nan(rows):
    changed = rows.copy()
    changed[2, 1] = math.nan
    return changed


SHORT = raw(ROWS) | {"shape": [4, 2]}
REFUSED = {
    "torch.save": ({"prompt_embeds": saved(TENSOR)}, "prompt_embeds: .*torch.save or pickle"),
    "a pickle": ({"prompt_embeds": text(pickle.dumps(ROWS))}, "prompt_embeds: .*never read"),
    "no base64": ({"prompt_embeds": "ab!"}, "prompt_embeds: expected base64, got 3 characters"),
    "nothing": ({"prompt_embeds": ""}, "prompt_embeds: expected base64 of safetensors"),
    "noise": ({"prompt_embeds": text(b"x" * 60)}, "prompt_embeds: expected base64 of safetensors"),
    "another tensor": ({"prompt_embeds": tensors(x=TENSOR)}, 'one tensor, "prompt_embeds", got x'),
    "two tensors": ({"prompt_embeds": tensors(prompt_embeds=TENSOR, x=TENSOR)}, "one tensor"),
    "float64": ({"prompt_embeds": tensors(prompt_embeds=TENSOR.double())}, "dtype of .*got F64"),
    "integers": ({"prompt_embeds": tensors(prompt_embeds=TENSOR.int())}, "dtype of .*got I32"),
    "another dtype": ({"prompt_embeds": raw(ROWS, "int8")}, r"prompt_embeds\.dtype"),
    "another size": ({"prompt_embeds": SHORT}, "prompt_embeds: expected 32 bytes, .*got 40"),
    "one dimension": ({"prompt_embeds": SHORT | {"shape": [10]}}, r"prompt_embeds\.shape"),
    "no such shape": ({"prompt_embeds": SHORT | {"shape": [-5, 2]}}, r"prompt_embeds\.shape"),
    "a huge shape": ({"prompt_embeds": SHORT | {"shape": [2**60, 2**60]}}, "got 40"),
    "numbers in a list": ({"prompt_embeds": [[1.0, 2.0]]}, r"prompt_embeds\[0\]: expected a str"),
    "no rows": ({"prompt_embeds": raw(ROWS[:0])}, "prompt_embeds: expected at least one row"),
    "another width": (
        {"prompt_embeds": raw(ROWS.reshape(2, 5))},
        "prompt_embeds: expected rows of 2",
    ),
    "not finite": ({"prompt_embeds": raw(ROWS * math.nan)}, r"prompt_embeds\[0\]: expected finite"),
    "too large": ({"prompt_embeds": raw(np.ones((51, 2), "<f4"))}, "at most 400 bytes .*max_bytes"),
    "a text besides": ({"prompt": "a", "prompt_embeds": raw(ROWS)}, "prompt: expected none with"),
    "ids without a mask": (
        {"prompt": [0], "prompt_embeds": raw(ROWS)},
        "prompt: expected none with",
    ),
    "a mask alone": ({"prompt_is_token_ids": [True]}, "prompt_is_token_ids: expected none without"),
    "a mask of a text": (
        {"prompt": "a", "prompt_is_token_ids": [True], "prompt_embeds": raw(ROWS)},
        "prompt: expected token ids with prompt_is_token_ids",
    ),
    "another mask": (
        {"prompt": [0] * 4, "prompt_is_token_ids": [False] * 4, "prompt_embeds": raw(ROWS)},
        "prompt_embeds: expected a row for each of 4 positions",
    ),
    "an empty list": ({"prompt_embeds": []}, "prompt_embeds: expected at least one prompt, got an"),
    "too many prompts": (
        {"prompt_embeds": [raw(ROWS)] * 9},
        "prompt_embeds: expected at most 8 prompts, got 9",
    ),
    "too many completions": (
        {"prompt_embeds": [raw(ROWS)] * 5, "n": 2},
        "prompt_embeds and n: expected at most 8 completions .*got 5 prompts with n 2",
    ),
    "a pickle in a list": (
        {"prompt_embeds": [raw(ROWS), saved(TENSOR)]},
        r"^prompt_embeds\[1\]: .*torch.save or pickle",
    ),
    "another width in a list": (
        {"prompt_embeds": [raw(ROWS), raw(ROWS.reshape(2, 5))]},
        r"^prompt_embeds\[1\]: expected rows of 2",
    ),
    "not finite in a list": (
        {"prompt_embeds": [raw(ROWS), raw(with_nan(ROWS))]},
        r"^prompt_embeds\[1\]\[2\]: expected finite numbers, got nan",
    ),
    "one mask for several": (
        {
            "prompt": [[0] * 5, [0] * 5],
            "prompt_is_token_ids": [False] * 5,
            "prompt_embeds": [raw(ROWS)] * 2,
        },
        "^prompt_is_token_ids: expected a list of 2 lists, one for each of prompt_embeds",
    ),
    "ids for one of several": (
        {"prompt": [0] * 5, "prompt_is_token_ids": [[False]] * 2, "prompt_embeds": [raw(ROWS)] * 2},
        "^prompt: expected a list of 2 lists, one for each of prompt_embeds",
    ),
    "a mask of lists for one": (
        {"prompt": [0], "prompt_is_token_ids": [[False]], "prompt_embeds": raw(ROWS[:1])},
        "^prompt_is_token_ids: expected a list of booleans",
    ),
    "a flag in place of a mask": (
        {
            "prompt": [[0], [0]],
            "prompt_is_token_ids": [False, False],
            "prompt_embeds": [raw(ROWS[:1])] * 2,
        },
        r"^prompt_is_token_ids\[0\]: expected a list of booleans",
    ),
    "another mask in a list": (
        {
            "prompt": [[0], [0, 0]],
            "prompt_is_token_ids": [[False], [False, True]],
            "prompt_embeds": [raw(ROWS[:1]), raw(ROWS[:2])],
        },
        r"^prompt_embeds\[1\]: expected a row for each of 1 positions",
    ),
    "echo": ({"echo": True, "prompt_embeds": raw(ROWS)}, "echo: expected false with prompt_embeds"),
    "logprobs of the prompt": (
        {"prompt_logprobs": 1, "prompt_embeds": raw(ROWS)},
        "prompt_logprobs: expected none with prompt_embeds",
    ),
    "no prompt": ({}, "prompt: missing"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_bodies(server, name, stream):
    fields, message = REFUSED[name]
    response = server.post(PATH, body(**fields, stream=stream))
    assert response.status_code == 400, response.text
    error = response.json()["error"]["message"]
    assert re.search(message, error), error


def test_nothing_is_disturbed_by_them(server, expected):
    assert server.post(PATH, body(prompt=IDS)).json()["choices"][0] == expected


@pytest.mark.parametrize(
    ("allowed", "tables", "message"),
    [
        (False, ON, "this server takes no embeddings (server.prompt_embeds is false)"),
        (True, {}, "this engine takes no embeddings (plugin.prompt_embeddings.enabled is false)"),
    ],
)
def test_off_unless_server_and_engine_take_them(tmp_path, allowed, tables, message):
    llm = engine(tmp_path, allowed=allowed, **tables)
    with running(llm) as server:
        response = server.post(PATH, body(prompt_embeds=raw(ROWS)))
    llm.close()
    assert response.status_code == 400
    text = response.json()["error"]["message"]
    assert text.startswith("prompt_embeds: expected ")
    assert text.endswith(message)
