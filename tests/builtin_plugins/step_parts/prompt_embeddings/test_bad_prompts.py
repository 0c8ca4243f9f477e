"""Wrong embeddings are refused by one error that names the field; nothing else is disturbed."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from support.embedded import prompt_of

from hardpoint import LLM, PluginError, PoolingParams, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.prompt_embeddings.engine_half import EmbeddedPrompts
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing import scripted_config, write_scripted_model

IDS = prompt_of(12)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
WIDTH = 64
ROWS = np.ones((3, WIDTH), dtype=np.float32)
MASK = [True, False, False, False, True]
MIXED = {
    "prompt_embeds": ROWS,
    "prompt_token_ids": [5, 0, 0, 0, 6],
    "prompt_is_token_ids": MASK,
}
MAX_BYTES = 4 * WIDTH * 90


def with_row(row, value):
    rows = ROWS.copy()
    rows[row, 5] = value
    return rows


EMBEDS = {
    "wrong width": (np.ones((3, 63), np.float32), r"expected rows of 64 numbers, .*got \[3, 63\]"),
    "one dimension": (np.ones(64, np.float32), r"expected two dimensions, .*got \[64\]"),
    "three dimensions": (torch.ones(1, 3, 64), r"expected two dimensions, .*got \[1, 3, 64\]"),
    "no rows": (torch.ones(0, 64), r"expected at least one row, got \[0, 64\]"),
    "float64": (np.ones((3, 64)), "of float32, float16 or bfloat16, got dtype float64"),
    "integers": (torch.ones(3, 64, dtype=torch.int64), "got dtype int64"),
    "bits": (np.ones((3, 64), np.uint16), "of float32, float16 or bfloat16, got dtype uint16"),
    "complex": (torch.ones(3, 64, dtype=torch.complex64), "got dtype complex64"),
    "objects": (np.full((3, 64), None), "got dtype object"),
    "a list": ([[1.0] * 64], "expected a tensor or array"),
    "none": (None, "expected a tensor or array"),
    "bytes": (b"\x80\x04", "expected a tensor or array"),
    "sparse": (torch.ones(3, 64).to_sparse(), "got torch.sparse_coo on cpu"),
    "on no device": (torch.ones(3, 64, device="meta"), "got torch.strided on meta"),
    "too many": (np.ones((91, 64), np.float32), f"at most {MAX_BYTES} bytes .*max_bytes"),
}
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
FORMS = {
    "two forms": ({**MIXED, "prompt_parts": [[1]]}, "prompt: expected a mapping with"),
    "a text besides": ({"prompt": "a", "prompt_embeds": ROWS}, "prompt: expected a mapping with"),
    "no mask": ({"prompt_token_ids": [1, 0, 0, 0], "prompt_embeds": ROWS}, "prompt: expected a"),
    "a mask alone": ({"prompt_is_token_ids": MASK}, "prompt: expected a mapping with"),
    "a short mask": (
        MIXED | {"prompt_is_token_ids": MASK[:-1]},
        "prompt_is_token_ids: expected one for each of 5 prompt_token_ids, got 4",
    ),
    "a mask of numbers": (
        MIXED | {"prompt_is_token_ids": [1, 0, 0, 0, 1]},
        "prompt_is_token_ids: expected a list of booleans",
    ),
    "no list as mask": (MIXED | {"prompt_is_token_ids": 3}, "prompt_is_token_ids: expected a list"),
    "none as mask": (MIXED | {"prompt_is_token_ids": None}, "prompt_is_token_ids: expected a list"),
    "another number of rows": (
        MIXED | {"prompt_embeds": ROWS[:2]},
        "prompt_embeds: expected a row for each of 3 positions without a token id, got 2",
    ),
    "ids everywhere": (
        MIXED | {"prompt_is_token_ids": [True] * 5},
        "prompt_embeds: expected a row for each of 0 positions",
    ),
    "an id below an embedding": (
        MIXED | {"prompt_token_ids": [5, 0, 7, 0, 6]},
        r"prompt_token_ids\[2\]: expected 0 where an embedding stands, got 7",
    ),
    "no id": (MIXED | {"prompt_token_ids": [5, 0, 0, 0, None]}, r"prompt_token_ids\[4\]: expected"),
    "an id too large": (MIXED | {"prompt_token_ids": [5, 0, 0, 0, 257]}, r"prompt_token_ids\[4\]:"),
    "ids of text": (MIXED | {"prompt_token_ids": "abcde"}, "prompt_token_ids: expected a list"),
    "no parts": ({"prompt_parts": []}, "prompt_parts: expected a list of parts"),
    "parts of text": ({"prompt_parts": "ab"}, "prompt_parts: expected a list of parts"),
    "a wrong part": ({"prompt_parts": [[1], 5]}, r"prompt_parts\[1\]: expected a tensor or array"),
    "a part of no rows": (
        {"prompt_parts": [ROWS[:0]]},
        r"prompt_parts\[0\]: expected at least one",
    ),
    "a wrong id in a part": (
        {"prompt_parts": [[1, -1], ROWS]},
        r"prompt_parts\[0\]\[1\]: expected",
    ),
    "parts too large together": (
        {"prompt_parts": [np.ones((60, 64), np.float32), np.ones((31, 64), np.float32)]},
        r"prompt_parts\[1\]: expected at most .* bytes of float32",
    ),
}


@pytest.fixture(scope="module")
def llm(embedded):
    options = {"prompt_embeddings": {"enabled": True, "max_bytes": MAX_BYTES}}
    with LLM(config=embedded.settings({"plugin": options})) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(llm, embedded):
    """Fails if another request has no longer the tokens that it had, after each test."""
    return [o.outputs[0].token_ids for o in llm.generate([IDS, embedded.embedded(IDS)], PARAMS)]


@pytest.fixture(autouse=True)
def _others(llm, undisturbed, embedded):
    yield
    outputs = llm.generate([IDS, embedded.embedded(IDS)], PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == undisturbed
    assert not llm.llm_engine.has_unfinished_requests()


def refuse(llm, prompt, message, params=PARAMS, **options):
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate(prompt, params, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", EMBEDS)
def test_wrong_embeddings(llm, name):
    value, message = EMBEDS[name]
    refuse(llm, {"prompt_embeds": value}, f"^prompt_embeds: .*{message}")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite(llm, name):
    message = rf"^prompt_embeds\[1\]: expected finite numbers, got {name}$"
    refuse(llm, {"prompt_embeds": with_row(1, NUMBERS[name])}, message)
    message = message.replace("prompt_embeds", r"prompt_parts\[1\]")
    refuse(llm, {"prompt_parts": [[1], with_row(1, NUMBERS[name])]}, message)
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.from_numpy(with_row(1, NUMBERS[name])).to(dtype)
        refuse(llm, {"prompt_parts": [[1], halves]}, message)


@pytest.mark.parametrize("name", FORMS)
def test_wrong_forms(llm, name):
    prompt, message = FORMS[name]
    refuse(llm, prompt, f"^{message}")


def test_together_with_what_needs_ids(llm):
    prompt = {"prompt_embeds": ROWS}
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    refuse(llm, prompt, "^prompt_logprobs: expected none with prompt_embeds, .*got 1", params)
    cut = "^truncate_prompt_tokens: expected none for a prompt with prompt_embeds, got 2"
    refuse(llm, prompt, cut, truncate_prompt_tokens=2)


def test_a_prompt_that_is_too_long(llm, embedded):
    with pytest.raises(PromptTooLongError, match="96"):
        llm.generate({"prompt_parts": [[1] * 70, ROWS.repeat(9, axis=0)]}, PARAMS)
    with pytest.raises(PromptTooLongError, match="97"):
        llm.embed({"prompt_parts": [[1] * 70, ROWS.repeat(9, axis=0)]}, PoolingParams())


def bits_of(rows):
    """Return the bits of rows in bfloat16."""
    return torch.from_numpy(rows).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def prebuilt(**fields):
    base = {
        "request_id": "r",
        "prompt_token_ids": [0, 0, 0],
        "params": PARAMS,
        "prompt_embeds": ROWS,
    }
    return EngineCoreRequest(**base | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": [0, 0]}, "prompt_embeds: expected a row for each of 2 positions"),
        ({"prompt_token_ids": [0, 4, 0]}, r"prompt_token_ids\[1\]: expected 0"),
        ({"prompt_embeds": with_row(2, math.nan)}, r"prompt_embeds\[2\]: expected finite numbers"),
        (
            {"prompt_embeds": bits_of(with_row(2, math.inf))},
            r"prompt_embeds\[2\]: expected finite numbers, got inf",
        ),
        ({"prompt_embeds": bits_of(ROWS)[:2]}, "prompt_embeds: expected a row for each of 3 pos"),
        ({"prompt_embeds": [[0.5]]}, "prompt_embeds: expected a tensor or array"),
        ({"prompt_is_token_ids": [True, False]}, "prompt_is_token_ids: expected one for each of 3"),
        (
            {"prompt_embeds": None, "prompt_is_token_ids": [True] * 3},
            "prompt_is_token_ids: expected none without prompt_embeds",
        ),
        ({"resumable": True}, "resumable: expected false"),
        (
            {"params": msgspec.structs.replace(PARAMS, prompt_logprobs=0)},
            "prompt_logprobs: expected none",
        ),
    ],
)
def test_ready_made_requests(llm, fields, message):
    refuse_ready(llm, prebuilt(**fields), f"^{message}")


def refuse_ready(llm, request, message):
    with pytest.raises(RequestError, match=message):
        llm.llm_engine.add_request("r", request)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text", "prompt_embeds: expected an array of float32, .*, got 'text'"),
        ([[0.5]], r"prompt_embeds: expected an array of float32, .*, got \[\[0.5\]\]"),
        (ROWS.astype("float64"), r"prompt_embeds: expected .*, got float64 \[3, 64\]$"),
        (np.array(0.5, np.float32), r"prompt_embeds: expected two dimensions, .*, got \[\]"),
        (ROWS[:2], "prompt_embeds: expected a row for each of 3 positions"),
    ],
)
def test_what_another_program_sends_is_no_fault_of_the_part(rows, message):
    """Blocks are keyed before a request is checked."""
    half = EmbeddedPrompts(64, MAX_BYTES, lambda message: [])
    request = prebuilt(prompt_embeds=rows)
    half.block_key(request, range(3))
    with pytest.raises(RequestError, match=f"^{message}"):
        half.check(request)


def test_a_ready_made_request_has_what_its_prompt_has(llm, embedded):
    rows = embedded.table[IDS].to(torch.bfloat16)
    zeros = [0] * len(IDS)
    request = prebuilt(prompt_token_ids=zeros, prompt_embeds=rows)
    engine = llm.llm_engine
    engine.add_request("r", request)
    while engine.has_unfinished_requests():
        output = (engine.step() or [None])[-1]
    (expected,) = llm.generate([{"prompt_embeds": rows}], PARAMS)
    bits = bits_of(rows.float().numpy())
    engine.add_request("r", prebuilt(prompt_token_ids=zeros, prompt_embeds=bits))
    while engine.has_unfinished_requests():
        same = (engine.step() or [None])[-1]
    assert same.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.prompt_token_ids == expected.prompt_token_ids == [None] * len(IDS)


@pytest.mark.parametrize("enabled", [False, True])
def test_off_unless_enabled(tmp_path, enabled):
    """The scripted model's config states no hidden size: its worker does."""
    folder = write_scripted_model(tmp_path)
    config = scripted_config(folder, {"plugin": {"prompt_embeddings": {"enabled": enabled}}})
    with LLM(config=config) as scripted_llm:
        if enabled:
            text = {"prompt_parts": ["ab", np.full((2, 2), 37, np.float32), "c"]}
            output, same = scripted_llm.generate([text, [64, 65, 37, 37, 66]], PARAMS)
            assert output.outputs[0].token_ids == same.outputs[0].token_ids
            assert output.prompt_token_ids == [64, 65, None, None, 66]
            refuse(
                scripted_llm, {"prompt_embeds": ROWS}, r"^prompt_embeds: expected rows of 2 numbers"
            )
            return
        off = "this engine takes no embeddings"
        for prompt in ({"prompt_embeds": ROWS}, {"prompt_parts": [[1], ROWS]}, MIXED):
            refuse(
                scripted_llm, prompt, f"^prompt_.*: expected token ids, {off} .*enabled is false"
            )
        refuse_ready(scripted_llm, prebuilt(), f"^prompt_embeds: expected token ids, {off}")
        no_rows = prebuilt(prompt_embeds=None, prompt_is_token_ids=[True] * 3)
        refuse_ready(scripted_llm, no_rows, "^prompt_is_token_ids: expected none")


def test_a_model_that_embeds_on_its_own_is_refused_at_start(tmp_path):
    import transformers
    from support.embedded import SETTINGS

    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
    )
    folder = write_scripted_model(tmp_path)
    transformers.BertModel(config).save_pretrained(folder)
    message = "prompt_embeddings.*changes embedded tokens.*does not call"
    with pytest.raises(PluginError, match=message):
        LLM(config={"model": str(folder), **SETTINGS})
