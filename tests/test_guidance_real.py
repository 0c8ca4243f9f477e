"""Classifier-free guidance has the tokens of two forward passes of transformers, in any engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest
from support.processes import ROOT

from hardpoint import LLM, SamplingParams

CASES = json.loads((ROOT / "tests/support/demo_reference.json").read_text())["guidance"]
SETTINGS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 16}},
    "preempting": {"kv_cache": {"num_blocks": 7, "watermark": 0.0}},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "drafts": {"speculation": {"use": ["ngram"]}},
    "own process": {"engine": {"in_process": False}},
    "two engines": {"engine": {"in_process": False}, "parallel": {"data": 2}},
    "pipeline": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
    "tensor": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 3}},
}


def params(case, **fields):
    arguments = {"negative_prompt": case["negative_prompt"], "scale": case["scale"]}
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(case["tokens"]),
        ignore_eos=True,
        plugin_args={"guidance": arguments},
        **fields,
    )


def check(acme_guidance, monkeypatch, settings) -> None:
    monkeypatch.syspath_prepend(acme_guidance)
    monkeypatch.setenv("PYTHONPATH", str(acme_guidance))
    config = {"device": "cpu", "plugins": {"enable": ["acme_guidance:Guidance"]}, **settings}
    prompts = [case["prompt"] for case in CASES]
    with LLM("smollm2", dtype="float32", max_model_len=96, config=config) as llm:
        alone = llm.generate(prompts[:1], params(CASES[0]))
        assert alone[0].outputs[0].token_ids == CASES[0]["tokens"]
        plain = SamplingParams(temperature=0.0, max_tokens=4)
        outputs = llm.generate([*prompts, *prompts], [*map(params, CASES), *[plain] * len(CASES)])
        for case, output in zip(CASES, outputs, strict=False):
            assert output.outputs[0].token_ids == case["tokens"]
        stats = llm.engines.scheduler_stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        if "num_blocks" in settings.get("kv_cache", {}):
            assert stats.num_preemptions


@pytest.mark.nightly
def test_guided_tokens_are_those_of_transformers(acme_guidance, monkeypatch):
    check(acme_guidance, monkeypatch, {})


@pytest.mark.nightly
def test_the_server_returns_the_guided_tokens(acme_guidance):
    command = [sys.executable, "-m", "hardpoint", "serve", "smollm2", "--port", "0"]
    settings = ['dtype="float32"', "max_model_len=96", 'plugins.enable=["guidance"]']
    command += [word for setting in settings for word in ("--set", setting)]
    surroundings = {**os.environ, "PYTHONPATH": str(acme_guidance)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            for case in CASES:
                arguments = {"negative_prompt": case["negative_prompt"], "scale": case["scale"]}
                body = {
                    "model": "smollm2",
                    "prompt": case["prompt"],
                    "max_tokens": len(case["tokens"]),
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    "plugin_args": {"guidance": arguments},
                }
                request = urllib.request.Request(
                    f"{url}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=120) as answer:
                    (choice,) = json.load(answer)["choices"]
                assert choice["token_ids"] == case["tokens"]
        finally:
            server.terminate()
            server.wait(60)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_guided_tokens_are_the_same_whatever_the_engine_does(acme_guidance, monkeypatch, name):
    check(acme_guidance, monkeypatch, SETTINGS[name])
