"""Modules in the engine and over HTTP; failures of hostile modules end their own request only."""

from __future__ import annotations

import hashlib
import itertools
import re

import pytest
from hardpoint_wasm.compilation import CompileOptions, Compiler, open_compiler
from hardpoint_wasm.senders import may_send
from modules import ALTERNATING, COUNTING, FAILING, REJECTED, SUCCESSOR, VOWELS, compile_bomb, text

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.plugins.server import Client
from hardpoint.testing import scripted_config, serve, write_scripted_model

pytest_plugins = ["hardpoint.testing"]

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"), {"say": " ha" * 20})


@pytest.fixture(scope="module")
def open_llm(folder):
    def open_llm(wasm=None, **config):
        table = {"accept": "any", **(wasm or {})}
        plugins = {"plugins": {"enable": ["wasm"]}, "plugin": {"wasm": table}}
        plugin = {**plugins["plugin"], **config.pop("plugin", {})}
        return LLM(config=scripted_config(folder, {**plugins, **config, "plugin": plugin}))

    return open_llm


@pytest.fixture(scope="module")
def llm(open_llm):
    with open_llm() as llm:
        yield llm


def params(module=None, **fields):
    arguments = {} if module is None else {"plugin_args": {"wasm": {"module": text(module)}}}
    return SamplingParams(**{**GREEDY, **arguments, **fields})


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_module_changes_the_logits_of_its_request_only(llm):
    outputs = llm.generate(["A", "say", "say"], [params(SUCCESSOR), params(), params(COUNTING)])
    first = outputs[0].outputs[0].token_ids
    assert all(after == before + 1 for before, after in itertools.pairwise(first[:6]))
    assert outputs[1].outputs[0].text.startswith(" ha ha")
    assert outputs[2].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_a_module_works_as_a_grammar(llm):
    fields = {"temperature": 8.0, "max_tokens": 60, "seed": 3}
    outputs = llm.generate(["say"] * 2, [params(VOWELS, **fields), params(**fields)])
    first, second = (set(output.outputs[0].token_ids) for output in outputs)
    assert first == {65, 69, 73}
    assert second - first


def test_a_token_that_is_masked_before_stays_masked(llm):
    (output,) = llm.generate("say", params(VOWELS, allowed_token_ids=[65, 70]))
    assert set(output.outputs[0].token_ids) == {65}
    nothing = params(VOWELS, allowed_token_ids=[70])
    ended = llm.generate("say", nothing)[0].outputs[0]
    assert (ended.stop_reason["reason"], len(ended.token_ids)) == ("logits", 1)


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_module_ends_its_own_request(llm, name):
    module, reason = FAILING[name]
    bad, other, plain = llm.generate(
        ["say"] * 3, [params(module), params(COUNTING), params(max_tokens=6)]
    )
    ended = bad.outputs[0]
    assert (ended.finish_reason, len(ended.token_ids) <= 1) == ("stop", True)
    assert ended.stop_reason["plugin"] == "wasm"
    assert ended.stop_reason["reason"] == reason
    assert other.outputs[0].finish_reason == plain.outputs[0].finish_reason == "length"
    assert plain.outputs[0].text == " ha ha"
    assert llm.plugins.health().quarantined == {}


@pytest.mark.parametrize("name", REJECTED)
def test_an_invalid_module_is_rejected(llm, name):
    module, pattern = REJECTED[name]
    if not module:
        with pytest.raises(RequestError, match="expected either name or module"):
            llm.generate("say", params(module))
        return
    with pytest.raises(RequestError, match=r"plugin_args\.wasm: module: ") as raised:
        llm.generate("say", params(module))
    assert re.search(pattern, str(raised.value))


def test_a_large_module_is_rejected(llm):
    for size in (300_000, 10 << 20):
        with pytest.raises(RequestError, match=r"expected at most 262144 bytes"):
            llm.generate("say", params(SUCCESSOR + bytes(size)))


def test_other_text_than_base64_is_rejected(llm):
    arguments = {"wasm": {"module": "*" * 8}}
    with pytest.raises(RequestError, match="expected base64"):
        llm.generate("say", SamplingParams(plugin_args=arguments))


def test_a_client_cannot_send_compiled_code(llm):
    for arguments in (
        {"compiled": "AAAA"},
        {"module": text(SUCCESSOR), "compiled": "AAAA"},
        {"module": text(SUCCESSOR), "compiled": b"AAAA"},
    ):
        with pytest.raises(RequestError, match=r"plugin_args\.wasm\.compiled"):
            llm.generate("say", SamplingParams(plugin_args={"wasm": arguments}))


def test_a_compile_bomb_ends_at_the_limit_and_others_compile():
    compiler = Compiler(0.5, 1 << 30, 256 << 10)
    bomb = compile_bomb(18_000)
    assert len(bomb) < 256 << 10
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ValueError, match=r"within 0.5 s \(compile_seconds\)"):
            compiler.compile(bomb)
    assert compiler.compile(SUCCESSOR) == compiler.compile(SUCCESSOR)


def test_a_module_of_the_operator_is_named(open_llm, tmp_path):
    (tmp_path / "successor.wasm").write_bytes(SUCCESSOR)
    table = {"modules": {"successor": str(tmp_path / "successor.wasm"), "gone": "nowhere.wasm"}}
    with open_llm({**table, "accept": "none"}) as llm:
        named = {"plugin_args": {"wasm": {"name": "successor"}}}
        (output,) = llm.generate("A", SamplingParams(**GREEDY, **named))
        assert output.outputs[0].text.startswith("BCDEF")
        for arguments, message in {
            "other": r"name: expected a name in plugin.wasm.modules \(gone, successor\)",
            "gone": r"plugin.wasm.modules.gone: No such file",
        }.items():
            with pytest.raises(RequestError, match=message):
                llm.generate("A", SamplingParams(plugin_args={"wasm": {"name": arguments}}))
        with pytest.raises(RequestError, match='plugin.wasm.accept is "none"'):
            llm.generate("A", params(SUCCESSOR))


def test_a_module_without_admission_is_rejected(open_llm):
    table = {"accept": "admitted", "compile_seconds": 7.0}  # a cache of its own
    with open_llm(table) as llm:
        with pytest.raises(RequestError, match="the hook wasm_senders has admitted"):
            llm.generate("A", params(SUCCESSOR))
        open_compiler(CompileOptions(compile_seconds=7.0)).admit(SUCCESSOR, "ann")
        (output,) = llm.generate("A", params(SUCCESSOR))
        assert output.outputs[0].text.startswith("BCDEF")


@pytest.mark.parametrize("in_process", [True, False])
def test_drafts_and_preemption_change_no_token(open_llm, llm, in_process):
    prompts = ["say", "A"]
    # The outputs of a prompt begin in the same step, so that they compete for blocks.
    sampled = [params(m, temperature=1.0, seed=7, n=4) for m in (COUNTING, ALTERNATING)]

    def tokens(llm):
        outputs = llm.generate(prompts, sampled)
        return [completion.token_ids for output in outputs for completion in output.outputs]

    expected = tokens(llm)
    config = {
        "engine": {"in_process": in_process},
        "max_model_len": 48,
        "kv_cache": {"block_size": 4, "num_blocks": 14},  # too few for the outputs of a prompt
        "speculation": {"use": ["ngram"], "adaptive": False},
    }
    with open_llm(**config) as other:
        assert tokens(other) == expected
        stats = other.engines.scheduler_stats()
        assert min(stats.num_preemptions, stats.num_accepted_drafts) > 0
        failing = other.generate(["say"], params(FAILING["infinite loop"][0]))
        assert failing[0].outputs[0].stop_reason["reason"] == "fuel"


def test_keys_and_tags_of_keys_may_send():
    client = Client(name="ann", tags={"team": "research", "tenant": "acme"})
    assert may_send(client, ["bob", "ann"])
    assert may_send(client, ["team=research"])
    assert not may_send(client, ["research", "acme", "bob", "team=sales"])


def write_keys(file, *names):
    """Write a file with the keys `NAME-key-of-some-length`."""
    lines = []
    for name in names:
        digest = hashlib.sha256(f"{name}-key-of-some-length".encode()).hexdigest()
        lines += ["[[key]]", f'name = "{name}"', f'hash = "sha256:{digest}"']
    file.write_text("\n".join(lines))
    file.chmod(0o600)


def test_listed_keys_send_modules_over_http(tmp_path):
    write_keys(tmp_path / "keys.toml", "ann", "bob")
    config = {
        "plugins": {"enable": ["wasm", "wasm_senders"]},
        "plugin": {"wasm": {"accept": "admitted"}, "wasm_senders": {"senders": ["ann"]}},
        "server": {"keys_file": str(tmp_path / "keys.toml")},
    }
    body = {**GREEDY, "prompt": "A", "max_tokens": 5}

    def ask(server, key, module):
        arguments = {"wasm": {"module": text(module)}}
        headers = {"authorization": f"Bearer {key}-key-of-some-length"}
        return server.ask("/v1/completions", {**body, "plugin_args": arguments}, headers=headers)

    with serve(config, replies={"say": " ha"}) as server:
        answer = ask(server, "ann", SUCCESSOR)
        assert answer.status == 200, server.log
        assert answer.json()["choices"][0]["text"] == "BCDEF"
        refused = ask(server, "bob", SUCCESSOR)
        assert refused.status == 403
        assert "plugin.wasm_senders.senders" in refused.json()["error"]["message"]
        ended = ask(server, "ann", FAILING["infinite loop"][0]).json()["choices"][0]
        assert ended["stop_reason"]["reason"] == "fuel"
        wrong = ask(server, "ann", REJECTED["imports"][0])
        large = ask(server, "ann", SUCCESSOR + bytes(300_000))
        assert (large.status, "max_module_bytes" in large.json()["error"]["message"]) == (400, True)
        assert ask(server, "ann", SUCCESSOR + bytes(10 << 20)).status == 413
        assert (wrong.status, "no imports" in wrong.json()["error"]["message"]) == (400, True)
