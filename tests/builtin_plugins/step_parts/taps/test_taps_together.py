"""Activation taps with all other features of steps: each request gets the same as alone."""

from __future__ import annotations

import base64
import random

import numpy as np
import pytest
import torch
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.cases import nightly_but
from support.http_server import running
from support.plugins.tapping import TAPS

from hardpoint import LLM, AsyncLLM, SamplingParams

MULTIPROC = {"executor": {"use": "multiproc"}}
FORMS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 16}},
    "preemption": {"kv_cache": {"num_blocks": 40}},
    "drafts": {"speculation": {"use": ["ngram"], "adaptive": False}},
    "process": {"engine": {"in_process": False}},
    "tensor ranks": {**MULTIPROC, "parallel": {"tensor": 2}},
    "ahead": {**MULTIPROC, "scheduler": {"asynchronous": True}},
    "engines": {"parallel": {"data": 2}},
}
NEAR = 1e-4
KINDS = [
    {},
    {"raw": {"layers": [0, 2]}},
    {"add": {"strength": 3.0}},
    {"add": {"strength": -2.0, "place": "attention_output"}, "raw": {"layers": [1]}},
    {"places": {}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("taps") / "model"


@pytest.fixture(scope="module")
def reference(folder):
    return write_model(folder)


def settings_of(form):
    return {"plugins": TAPS, "kv_cache": {"num_blocks": 256}, **FORMS[form]}


def jobs_of(count=20):
    """Return prompts of many lengths and parameters, of each kind of request in turn."""
    rng = random.Random(3)
    prompts, params = [], []
    for index in range(count):
        pattern = [rng.randrange(256) for _ in range(rng.randrange(1, 7))]
        prompts.append((pattern * 20)[: rng.randrange(3, 40)])
        kind = KINDS[index % len(KINDS)]
        params.append(all_logprobs(8, seed=index, temperature=index % 2 * 1.0, plugin_args=kind))
    return prompts, params


def arrays_of(output):
    return (output.outputs[0].part_arrays or {}).get("activation_taps", {})


def contents(output):
    """Return tokens, logprobs, and readings of taps."""
    completion = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in at.items()} for at in completion.logprobs]
    arrays = {
        name: (array.positions.tolist(), array.values.tobytes())
        for name, array in arrays_of(output).items()
    }
    return completion.token_ids, logprobs, arrays


@torch.no_grad()
def hidden_states(reference, ids):
    outputs = reference(torch.tensor([ids]), output_hidden_states=True)
    return [states[0] for states in outputs.hidden_states]


@pytest.mark.parametrize("form", nightly_but(FORMS, "chunks", "preemption", "drafts"))
def test_taps_of_a_batch_are_as_each_alone(folder, reference, form):
    prompts, params = jobs_of()
    with LLM(str(folder), config=settings_of(form), max_model_len=64) as llm:
        together = llm.generate(prompts, params)
        llm.reset_prefix_cache()
        for index in range(len(prompts)) if form == "plain" else range(0, len(prompts), 4):
            (alone,) = llm.generate([prompts[index]], params[index])
            assert contents(alone) == contents(together[index]), index
        if form == "preemption":
            assert llm.engines.scheduler_stats().num_preemptions > 0
        if form == "drafts":
            assert llm.engines.scheduler_stats().num_accepted_drafts > 0
    for index, output in enumerate(together):
        ids = [*prompts[index], *output.outputs[0].token_ids]
        kind = KINDS[index % len(KINDS)]
        for array in arrays_of(output).values():
            assert array.positions.tolist() == list(range(len(ids) - 1)), index
        if kind == {} or kind == KINDS[1]:
            assert difference(output, prompts[index], reference) < NEAR, index
        if kind == KINDS[1]:
            expected = hidden_states(reference, ids[:-1])
            values = arrays_of(output)["raw/0/layer_output"].values
            np.testing.assert_allclose(values, expected[1], atol=NEAR)
            assert set(arrays_of(output)) == {
                f"raw/{layer}/{place}"
                for layer in (0, 2)
                for place in ("attention_output", "mlp_output", "layer_output")
            }
        if kind == KINDS[2]:
            assert difference(output, prompts[index], reference) > 0.1
            assert arrays_of(output) == {}
        if kind == KINDS[4]:
            rows = [[place, int(place < len(prompts[index]))] for place in range(len(ids) - 1)]
            assert arrays_of(output)["places/1/layer_output"].values.tolist() == rows


def test_a_change_is_that_of_a_hook_of_transformers(folder, reference):
    """The logprobs are equal to the reference with the same ramp added after a layer."""
    prompt = [5, 17, 200, 31, 8]
    hooked = reference.model.layers[1].register_forward_hook(
        lambda _module, _args, result: result + 1.5 * torch.linspace(-1, 1, result.shape[-1])
    )
    args = {"add": {"strength": 1.5}}
    with LLM(str(folder), config=settings_of("plain"), max_model_len=64) as llm:
        (output,) = llm.generate([prompt], all_logprobs(8, plugin_args=args))
    try:
        assert difference(output, prompt, reference) < NEAR
    finally:
        hooked.remove()


def test_blocks_are_shared_by_what_changes_alone(folder, reference):
    prompt = [7, 9, 11, 13] * 10

    with LLM(str(folder), config=settings_of("plain"), max_model_len=64) as llm:

        def cached(**plugin_args):
            params = SamplingParams(max_tokens=1, plugin_args=plugin_args)
            (output,) = llm.generate([prompt], params)
            return output.num_cached_tokens

        assert cached() == 0
        assert cached() == 32
        assert cached(places={}) == 32
        assert cached(raw={}) == 0  # it needs all tokens
        assert cached(add={"strength": 1.0}) == 0
        assert cached(add={"strength": 2.0}) == 0
        assert cached(add={"strength": 1.0}) == 32
        assert cached(add={"strength": 1.0}, places={}) == 32


def test_with_an_adapter(folder, reference, tmp_path):
    merged = write_adapter(tmp_path, reference)
    prompt = [5, 17, 200, 31, 8]
    settings = settings_of("plain") | {"adapters": {"max_loras": 1, "max_lora_rank": 8}}
    with LLM(str(folder), config=settings, max_model_len=64) as llm:
        params = all_logprobs(4, plugin_args={"raw": {"layers": [1]}})
        (output,) = llm.generate([prompt], params, lora_request=lora("poet", 1, tmp_path))
    ids = [*prompt, *output.outputs[0].token_ids][:-1]
    values = arrays_of(output)["raw/1/layer_output"].values
    np.testing.assert_allclose(values, hidden_states(merged, ids)[2], rtol=1e-3, atol=1e-3)


def test_several_completions_and_a_stop_string(folder, reference):
    prompt = [5, 17, 200]
    params = SamplingParams(
        n=3, seed=4, max_tokens=6, ignore_eos=True, plugin_args={"raw": {"layers": [2]}}
    )
    with LLM(str(folder), config=settings_of("plain"), max_model_len=64) as llm:
        (output,) = llm.generate([prompt], params)
        for completion in output.outputs:
            ids = [*prompt, *completion.token_ids][:-1]
            values = completion.part_arrays["activation_taps"]["raw/2/mlp_output"]
            assert values.positions.tolist() == list(range(len(ids)))


def test_recorded_steps_are_not_repeated_under_taps(folder, reference):
    """A tap is called in each step, whatever else runs steps without Python."""
    with LLM(str(folder), config=settings_of("plain"), max_model_len=64) as llm:
        for _ in range(3):
            params = SamplingParams(max_tokens=20, ignore_eos=True, plugin_args={"places": {}})
            (output,) = llm.generate([[1, 2, 3]], params)
            assert len(arrays_of(output)["places/1/layer_output"].positions) == 22
            llm.reset_prefix_cache()


def test_over_http(folder, reference):
    """Whole answers and streams have the numbers in base64, whichever route is asked."""
    params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    args = {"raw": {"layers": [1]}}
    config = {"model": str(folder), "max_model_len": 64, "stats": {"sinks": []}}
    config |= settings_of("plain") | {"server": {"port": 0, "access_log": "off"}}
    with running(AsyncLLM(config=config)) as server:
        body = {"prompt": [5, 6], "plugin_args": args, **params}
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        whole = choice["part_arrays"]["activation_taps"]["raw/1/layer_output"]
        values = np.frombuffer(base64.b64decode(whole["data"]), whole["dtype"])
        assert whole["positions"] == list(range(5))
        assert whole["shape"] == [5, 64]
        assert values.shape == (5 * 64,)
        chunks = server.events("/v1/completions", body | {"stream": True})
        choices = [c for chunk in chunks for c in chunk["choices"] if "part_arrays" in c]
        assert [c["part_arrays"] for c in choices] == [choice["part_arrays"]]
        plain = server.post("/v1/completions", body | {"plugin_args": {}}).json()
        assert "part_arrays" not in plain["choices"][0]
        ids = {"token_ids": [5, 6], "sampling_params": {"plugin_args": args, **params}}
        (choice,) = server.post("/inference/v1/generate", ids).json()["choices"]
        assert choice["part_arrays"]["activation_taps"]["raw/1/mlp_output"]["shape"] == [5, 64]
        refused = server.post("/v1/completions", body | {"plugin_args": {"raw": {"layers": [9]}}})
        assert refused.status_code == 400
        assert "expected layers in 0..2" in refused.json()["error"]["message"]
