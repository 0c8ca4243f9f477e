"""Steps with the times of a file: an executor that waits, and a server without a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from support.costs import made_up_cost
from support.process.forked_python import forked_python

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import HardpointError, StepCost, hookimpl
from hardpoint.testing import history_hash, scripted_config, write_scripted_model
from hardpoint.testing.scripted import _hash_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def cost_file(tmp_path):
    """Returns the path of a file with steps of 20 ms, and 1 ms for each token of a prompt."""
    cost = made_up_cost(
        max_model_len=512,
        num_blocks=64,
        tokens=[(1, 20.0), (101, 120.0)],
        single_query=0.0,
        prompt=0.0,
        step_cost=StepCost(step=20.0, is_trained=True),
    )
    file = tmp_path / "cost.json"
    file.write_bytes(msgspec.json.encode(cost))
    return file


class TestPacedExecutor:
    def test_steps_take_their_time_and_tokens_are_the_same(self, tmp_path, cost_file):
        folder = write_scripted_model(tmp_path / "model")
        with LLM(config=scripted_config(folder, {"engine": {"in_process": True}})) as llm:
            (plain,) = llm.generate("hello", GREEDY)
        paced = {
            "engine": {"in_process": True},
            "executor": {"use": "hardpoint.simulation:PacedExecutor"},
            "plugin": {"paced_executor": {"cost": str(cost_file), "speed": 2.0}},
        }
        with LLM(config=scripted_config(folder, paced)) as llm:
            llm.generate("warm", GREEDY)
            began = time.perf_counter()
            (slow,) = llm.generate("hello", GREEDY)
            seconds = time.perf_counter() - began
        assert slow.outputs[0].token_ids == plain.outputs[0].token_ids
        # A prompt of 5 tokens in 24 ms, 11 steps of 20 ms, all at twice the speed, less what the
        # first step catches up.
        assert seconds > 0.122 - 0.011

    def test_a_file_that_is_missing_is_named(self, tmp_path):
        folder = write_scripted_model(tmp_path / "model")
        paced = {
            "engine": {"in_process": True},
            "executor": {"use": "hardpoint.simulation:PacedExecutor"},
            "plugin": {"paced_executor": {"cost": str(tmp_path / "none.json")}},
        }
        with pytest.raises(
            HardpointError, match="none.json: there is no such file; `hardpoint cal"
        ):
            LLM(config=scripted_config(folder, paced))


class TestScriptedAlias:
    def test_its_files_are_those_that_are_written(self, tmp_path):
        import hardpoint.testing

        packaged = Path(hardpoint.testing.__file__).parent / "scripted_model"
        likely = " abcdefghijklmnopqrstuvwxyz"
        made = write_scripted_model(
            tmp_path / "made", max_position_embeddings=131_072, likely=likely
        )
        assert sorted(os.listdir(packaged)) == sorted(os.listdir(made))
        for file in made.iterdir():
            assert (packaged / file.name).read_bytes() == file.read_bytes()

    def test_it_writes_letters_and_does_not_end(self):
        with LLM("scripted", config={"engine": {"in_process": True}}) as llm:
            (output,) = llm.generate(
                "hello", SamplingParams(temperature=1.0, seed=1, max_tokens=40)
            )
            assert llm.config.load.use == "dummy"
        assert re.fullmatch(r"[a-z ]{40}", output.outputs[0].text)
        assert output.outputs[0].finish_reason == "length"

    def test_other_plugins_are_enabled_besides_it(self):
        config = {
            "engine": {"in_process": True},
            "plugins": {"enable": [{"use": f"{__name__}:Nothing", "name": "nothing"}]},
            "max_model_len": 256,
        }
        with LLM("scripted", config=config) as llm:
            enabled = [plugin.name for plugin in llm.config.plugins.enable]
        assert enabled == ["ScriptedForCausalLM", "nothing"]

    @pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 32, 33, 1000])
    def test_long_histories_have_the_same_hash(self, length):
        import numpy as np

        tokens = [(7 * n * n + length) % 257 for n in range(length)]
        assert _hash_of(np.array(tokens, dtype=np.int64)) == history_hash(tokens)


class Nothing:
    """Hooks that do nothing."""

    contract = 1

    @hookimpl
    def engine_closing(self):
        pass


def test_a_server_without_a_model(cost_file):
    command = ["-m", "hardpoint", "serve", "--model", "scripted"]
    command += ["--pace", str(cost_file), "--port", "0", "--set", "max_model_len=512"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    server = forked_python().popen(command, cwd=cost_file.parent, **streams)
    try:
        url = _url(server)
        _ask(url, 2)
        began = time.perf_counter()
        answer = _ask(url, 11)
        seconds = time.perf_counter() - began
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert re.fullmatch("[a-z ]{11}", answer["choices"][0]["text"])
    assert answer["model"] == "scripted"
    # A prompt of 5 tokens in 24 ms, and 10 further tokens in 20 ms each.
    assert seconds > 0.224 - 0.011


def _url(server):
    lines = []
    for line in server.stdout:
        lines.append(line)
        if match := re.search(r"Serving scripted at (http://\S+)", line):
            return match[1]
    raise AssertionError(f"the server did not start: {''.join(lines)}")


def _ask(url, count):
    body = {"model": "scripted", "prompt": "hello", "max_tokens": count}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.loads(answer.read())
