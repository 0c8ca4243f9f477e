"""The example programs that share the work between two engines, and between two servers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys

import pytest
from support.builtins.split import DECODE, PREFILL, split_config
from support.http_server import running
from support.processes import ROOT
from support.scripted_server import server_config, write_model

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.testing import scripted_config, write_scripted_model

KEY = "a-key-of-some-length"


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_engines(tmp_path, capsys):
    config = scripted_config(write_scripted_model(tmp_path / "m", {"say abc" * 10: " abc"}))
    prompts = ["say abc" * 10, "The quick brown fox jumps over the lazy dog. " * 3]
    main = example("split_prefill").main
    outputs = asyncio.run(main(config.pop("model"), prompts, **config))
    assert outputs[0].outputs[0].text == " abc"
    assert [output.num_cached_tokens for output in outputs] == [64, 128]
    assert "64 of 70 prompt tokens from the other engine" in capsys.readouterr().out


@pytest.mark.nightly
def test_two_servers(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(f'[[key]]\nname = "router"\nkey = "{KEY}"\nkv_transfer = true\n')
    base = server_config(write_model(tmp_path / "model"))

    def server(name):
        llm = AsyncLLM(config=split_config(base, tmp_path / "s", name))
        return running(llm, authenticators=[installed(KeyStore(str(keys)))])

    def program(*urls):
        path = ROOT / "examples" / "split_prefill_servers.py"
        done = subprocess.run(
            [sys.executable, str(path), *urls, "0123456789" * 10],
            env={**os.environ, "HARDPOINT_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout, done.stderr

    with server(DECODE) as decode:
        with server(PREFILL) as prefill:
            text, usage = program(str(prefill.client.base_url), str(decode.client.base_url))
            assert "'cached_tokens': 96" in usage
        alone, _ = program("http://127.0.0.1:9", str(decode.client.base_url))
        assert alone == text
