"""Tokens that skip layers: logits, keys and values are those of a reference in transformers."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.cases import nightly_but
from support.plugins.tapping import TAPS

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.models.llama import Llama

MULTIPROC = {"executor": {"use": "multiproc"}}
FORMS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 16}},
    "preemption": {"kv_cache": {"num_blocks": 40}},
    "drafts": {"speculation": {"use": ["ngram"], "adaptive": False}},
    "process": {"engine": {"in_process": False}},
    "tensor ranks": {**MULTIPROC, "parallel": {"tensor": 2}},
    "ahead": {**MULTIPROC, "scheduler": {"asynchronous": True}},
}
NEAR = 1e-4
KINDS = [
    {},
    {"leave": {"layer": 0}},
    {"leave": {"layer": 1, "first": 6}},
    {"leave": {"layer": 0, "every": 2}, "raw": {"layers": [1, 2]}},
    {"leave": {"layer": 0, "threshold": 0.03}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exits") / "model"


@pytest.fixture(scope="module")
def reference(folder):
    return write_model(folder)


def opened(folder, form="plain", **fields):
    config = {"plugins": TAPS, "kv_cache": {"num_blocks": 256}, **FORMS[form], **fields}
    return LLM(str(folder), config=config, max_model_len=64)


@contextlib.contextmanager
def leaving(model, layer, exits):
    """Let positions leave a model of transformers after a layer.

    Args:
        exits: returns whether a position leaves.
    """

    def skip(_module, args, result):
        positions = torch.arange(result.shape[1])
        left = torch.tensor([exits(int(position)) for position in positions])
        return torch.where(left[None, :, None], args[0], result)

    hooks = [each.register_forward_hook(skip) for each in model.model.layers[layer + 1 :]]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def left_difference(output, prompt, reference, layer, exits):
    with leaving(copy.deepcopy(reference), layer, exits) as model:
        return difference(output, prompt, model)


def contents(output):
    completion = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in at.items()} for at in completion.logprobs]
    arrays = (completion.part_arrays or {}).get("activation_taps", {})
    values = {name: array.values.tobytes() for name, array in arrays.items()}
    return completion.token_ids, logprobs, values


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_all_tokens_leave_after_a_layer(folder, reference, layer):
    prompt = [5, 17, 200, 31, 8]
    truncated = copy.deepcopy(reference)
    del truncated.model.layers[layer + 1 :]
    with opened(folder) as llm:
        (output,) = llm.generate([prompt], all_logprobs(8, plugin_args={"leave": {"layer": layer}}))
    assert difference(output, prompt, truncated) < NEAR
    if layer < 2:
        assert difference(output, prompt, reference) > 0.1


def test_later_tokens_of_full_depth_read_propagated_keys(folder, reference):
    prompt = [5, 17, 200, 31, 8, 90, 4]
    with opened(folder) as llm:
        for layer, every in ((0, 2), (1, 3), (0, 5)):
            args = {"leave": {"layer": layer, "every": every}}
            (output,) = llm.generate([prompt], all_logprobs(8, plugin_args=args))
            left = {position for position in range(64) if position % every == 0}
            assert left_difference(output, prompt, reference, layer, left.__contains__) < NEAR
            assert difference(output, prompt, reference) > 0.1


def jobs_of(kinds=KINDS, count=20):
    rng = random.Random(3)
    prompts, params = [], []
    for index in range(count):
        pattern = [rng.randrange(256) for _ in range(rng.randrange(1, 7))]
        prompts.append((pattern * 20)[: rng.randrange(3, 40)])
        kind = kinds[index % len(kinds)]
        params.append(all_logprobs(8, seed=index, temperature=index % 2 * 1.0, plugin_args=kind))
    return prompts, params


@pytest.mark.parametrize("form", nightly_but(FORMS, "chunks", "preemption", "drafts"))
def test_requests_of_a_batch_are_as_each_alone(folder, reference, form):
    prompts, params = jobs_of(KINDS[:4] if form == "tensor ranks" else KINDS)
    with opened(folder, form) as llm:
        together = llm.generate(prompts, params)
        llm.reset_prefix_cache()
        for index in range(0, len(prompts), 3):
            (alone,) = llm.generate([prompts[index]], params[index])
            assert contents(alone) == contents(together[index]), index
        if form == "preemption":
            assert llm.engines.scheduler_stats().num_preemptions > 0
        if form == "drafts":
            assert llm.engines.scheduler_stats().num_accepted_drafts > 0
    for index, output in enumerate(together):
        prompt, kind = prompts[index], params[index].plugin_args
        if kind == {}:
            assert difference(output, prompt, reference) < NEAR
        if kind == KINDS[2]:
            assert left_difference(output, prompt, reference, 1, lambda at: at >= 6) < NEAR


def test_a_threshold_that_no_token_reaches_changes_no_bit(folder, reference):
    prompts, params = jobs_of()
    plain = [all_logprobs(8, seed=p.seed, temperature=p.temperature) for p in params]
    never = [
        all_logprobs(
            8, seed=p.seed, temperature=p.temperature, plugin_args={"leave": {"threshold": 1.1}}
        )
        for p in params
    ]
    with opened(folder) as llm:
        expected, outputs = llm.generate(prompts, plain), llm.generate(prompts, never)
    assert [contents(output) for output in outputs] == [contents(output) for output in expected]


def test_blocks_are_shared_by_requests_with_the_same_exits(folder, reference):
    prompt = [7, 9, 11, 13] * 10

    with opened(folder) as llm:

        def cached(**plugin_args):
            params = SamplingParams(max_tokens=1, plugin_args=plugin_args)
            (output,) = llm.generate([prompt], params)
            return output.num_cached_tokens

        assert cached() == 0
        assert cached() == 32
        assert cached(leave={"layer": 1}) == 0
        assert cached(leave={"layer": 0}) == 0
        assert cached(leave={"layer": 1}) == 32
        assert cached() == 32


def test_with_an_adapter(folder, reference, tmp_path):
    merged = write_adapter(tmp_path, reference)
    prompt, args = [5, 17, 200, 31, 8], {"leave": {"layer": 0, "every": 2}}
    fields = {"adapters": {"max_loras": 1, "max_lora_rank": 8}}
    with opened(folder, **fields) as llm:
        params = all_logprobs(4, plugin_args=args)
        (output,) = llm.generate([prompt], params, lora_request=lora("poet", 1, tmp_path))
    assert left_difference(output, prompt, merged, 0, lambda at: at % 2 == 0) < 1e-3


def test_named_layers_are_skipped_by_a_step_part(folder, reference):
    prompts, layers = [[5, 17, 200, 31, 8], [9, 4, 77], [5, 17, 200, 31, 8, 90]], [[0], [1], [0, 2]]
    config = {"plugins": {"enable": ["support.plugins.skipping:Skipping"]}}
    params = [all_logprobs(8, plugin_args={"skipping": {"layers": each}}) for each in layers]
    with LLM(str(folder), config=config, max_model_len=64) as llm:
        *outputs, plain = llm.generate([*prompts, prompts[0]], [*params, all_logprobs(8)])
    for prompt, skipped, output in zip(prompts, layers, outputs, strict=True):
        model = copy.deepcopy(reference)
        for layer in reversed(skipped):
            del model.model.layers[layer]
        assert difference(output, prompt, model) < NEAR
    assert difference(plain, prompts[0], reference) < NEAR


@pytest.mark.parametrize(
    ("every", "rows"), [(1, [(0, 6)]), (2, [(0, 6), (1, 3), (2, 3)])], ids=["all", "some"]
)
def test_tokens_that_skip_a_layer_leave_out_its_mlp(folder, reference, monkeypatch, every, rows):
    calls, run_mlp = [], Llama.run_mlp

    def noting(self, index, h, batch):
        calls.append((index, len(h)))
        return run_mlp(self, index, h, batch)

    params = SamplingParams(max_tokens=1, plugin_args={"leave": {"layer": 0, "every": every}})
    with opened(folder) as llm:
        monkeypatch.setattr(Llama, "run_mlp", noting)
        llm.generate([[5, 17, 200, 31, 8, 4]], params)
    assert calls == rows
