"""Steps of few tokens are recorded and repeated, with the same results as running the model."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from support.cases import nightly_but

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.models.gemma.text import Gemma3
from hardpoint.builtin_plugins.models.granite import Granite
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.olmo import Olmo2
from hardpoint.builtin_plugins.models.phi3 import Phi3
from hardpoint.builtin_plugins.models.smollm3 import SmolLM3
from hardpoint.builtin_plugins.step_parts.recording import repeated_steps
from hardpoint.kernels import cpu
from hardpoint.testing import write_scripted_model

CONFIG = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 2 + count))} for count in (3, 9, 20)]


class Counting(Llama):
    """Counts the steps in which Python runs."""

    contract = 1
    replayable = True
    steps = 0

    def forward(self, batch):
        Counting.steps += 1
        return self.compute(batch)

    def compute(self, batch):
        return super().forward(batch)


class Normed(Counting):
    """Normalises heads, which are parts of a wider tensor."""

    contract = 1
    replayable = True
    head_norms = True


class CountingPhi3(Counting, Phi3):
    contract = 1
    replayable = True
    config = {"partial_rotary_factor": 0.5}


class CountingOlmo2(Counting, Olmo2):
    contract = 1
    replayable = True
    config = {}


class CountingGranite(Counting, Granite):
    contract = 1
    replayable = True
    config = {"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 8.0}


class CountingSmolLM3(Counting, SmolLM3):
    contract = 1
    replayable = True
    config = {"no_rope_layer_interval": 2}


class Gemma(Gemma3, Counting):
    """Scales embeddings, normalises outputs and caps scores; layers of two kinds."""

    contract = 1
    replayable = True
    config_defaults = Gemma3.config_defaults | {
        "head_dim": 8,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 1.0,
    }


class Derived(Counting):
    """Says nothing of itself."""

    contract = 1


class Torch(Counting):
    """Computes with torch, though it declares the opposite."""

    contract = 1
    replayable = True

    def compute(self, batch):
        return super().compute(batch) * 1.5


class Lying(Counting):
    """Computes where nobody can see it, though it declares the opposite."""

    contract = 1
    replayable = True

    def compute(self, batch):
        hidden = super().compute(batch)
        hidden.numpy()[:] += batch.positions.numpy()[:, None]
        return hidden


@pytest.fixture(scope="module", autouse=True)
def kernels():
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"only kernels are recorded, and they: {cause}")


@pytest.fixture
def run(tmp_path):
    """Return a function that gives tokens and the number of steps in which Python ran."""
    write_scripted_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def generate(
        model, prompts=PROMPTS, tokens=24, between=lambda llm: None, dtype="bfloat16", **extra
    ):
        use = {"use": f"{__name__}:{model.__name__}", "name": "TinyForCausalLM"}
        settings = {"load": {"use": "dummy"}, "plugins": {"enable": [use]}, **extra}
        fields = {**config, **CONFIG, **getattr(model, "config", {})}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        Counting.steps = 0
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2, seed=1)
        with LLM(str(tmp_path), dtype=dtype, config=settings, progress=False) as llm:
            outputs = llm.generate(prompts, params)
            between(llm)
            outputs += llm.generate(prompts, params)
        results = []
        for output in outputs:
            answer = output.outputs[0]
            results.append(
                (list(answer.token_ids), [list(map(str, p.items())) for p in answer.logprobs])
            )
        return results, Counting.steps

    return generate


FAMILIES = [Gemma, CountingPhi3, CountingOlmo2, CountingGranite, CountingSmolLM3]


@pytest.mark.parametrize(
    "model", nightly_but([Counting, Normed, *FAMILIES], Normed, Gemma, CountingSmolLM3)
)
def test_replayed_steps_give_the_same_bits_in_less_python(run, model):
    expected, all_steps = run(model, executor={"enforce_eager": True})
    results, steps = run(model)
    assert results == expected
    assert steps < all_steps / 4


def test_steps_of_many_kinds_are_replayed_rightly(run):
    extra = {"scheduler": {"max_num_batched_tokens": 16}, "kv_cache": {"num_blocks": 9}}
    extra["max_model_len"] = 128
    expected, _ = run(Counting, executor={"enforce_eager": True}, **extra)
    assert run(Counting, **extra)[0] == expected


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_steps_with_codes_of_keys_and_values_are_replayed_rightly(run, cache_dtype):
    def sleep(llm):
        llm.sleep(1)
        llm.wake_up()

    extra = {"kv_cache": {"dtype": cache_dtype}, "between": sleep}
    expected, all_steps = run(Counting, executor={"enforce_eager": True}, **extra)
    results, steps = run(Counting, **extra)
    assert results == expected
    assert steps < all_steps
    assert results != run(Counting)[0]


@pytest.mark.parametrize("limit", [2_000, 4_000])
def test_recorded_steps_make_room_for_others(run, monkeypatch, limit):
    def alone(llm):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=24, ignore_eos=True))

    monkeypatch.setattr(repeated_steps, "RECORDED_BYTES", limit)
    few = {"prompts": PROMPTS[:2], "between": alone}
    expected, all_steps = run(Counting, executor={"enforce_eager": True}, **few)
    results, steps = run(Counting, **few)
    assert results == expected
    assert steps < all_steps


def test_caches_that_were_released_are_not_written_to(run):
    def sleep(llm):
        llm.sleep(1)
        llm.wake_up()

    expected, _ = run(Counting, executor={"enforce_eager": True})
    assert run(Counting, between=sleep)[0] == expected


@pytest.mark.parametrize("model", [Derived, Torch])
def test_python_runs_in_every_step_of_a_model_that_cannot_be_replayed(run, model):
    _, all_steps = run(Counting, executor={"enforce_eager": True})
    assert run(model)[1] == all_steps


def test_a_stranger_operation_runs_in_every_step(run):
    _, all_steps = run(Counting, executor={"enforce_eager": True})
    assert run(Counting, attention={"use": "torch"})[1] == all_steps
    assert run(Counting, ops={"use": "torch"})[1] == all_steps


def test_a_model_that_promised_too_much_gets_no_wrong_tokens(run, caplog):
    expected, _ = run(Lying, dtype="float32", executor={"enforce_eager": True})
    with caplog.at_level(logging.WARNING, "hardpoint"):
        assert run(Lying, dtype="float32")[0] == expected
    assert caplog.text.count("a repeated step gave other hidden states than forward()") == 1


_RECORDING = """
import sys
import torch
from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.plugins import OpsContext

context = OpsContext(name="ops", options=None, device=torch.device("cpu"), dtype=torch.float32)
ops, table, ids = NativeOps(context), torch.ones(3, 4), torch.tensor([1])
with torch.inference_mode():
    repeat = ops.record(lambda: ops.silu_and_mul(ops.gather_rows(table, ids).view(2, 2)))
assert repeat is not None
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.nightly
def test_recording_does_not_import_the_compiler_of_torch():
    done = subprocess.run(
        [sys.executable, "-c", _RECORDING], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
