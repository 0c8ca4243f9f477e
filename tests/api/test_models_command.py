"""`hardpoint models`: what can be run, and what a model is and needs, before weights are read."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from hardpoint import model_report
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.cli import main
from hardpoint.configuration.loading import load_config
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.weights.planned_model import open_attention, open_ops, plan_model
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.memory import MemoryLimit, memory_limit, trim_memory
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.quantization import QuantizedWeight

pytestmark = pytest.mark.usefixtures("folder")

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
MIB = 1 << 20
Q9 = WeightFormat("q9", 4, is_quantized=True)


@pytest.fixture
def tiny(tmp_path):
    return write(tmp_path / "tiny")


def write(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def settings_of(*settings):
    given = ("load.use=dummy", "dtype=bfloat16", "weight_cache.path=off", *settings)
    return [part for setting in given for part in ("--set", setting)]


def report(capsys, folder, *arguments, settings=(), code=0):
    command = ["models", str(folder), "--json", *settings_of(*settings), *arguments]
    assert main(command) == code
    return json.loads(capsys.readouterr().out)


def limited(monkeypatch, available):
    monkeypatch.setattr(model_report, "memory_limit", lambda _: MemoryLimit(available, "the test"))


def test_architectures_formats_and_schemes_are_listed(capsys):
    assert (
        main(["models", "show", "--json", "--set", 'plugins.disable=["quantizations/q4_1"]']) == 0
    )
    found = {(each["kind"], each["name"]): each for each in json.loads(capsys.readouterr().out)}
    assert {kind for kind, _ in found} == {"models", "loaders", "quantizations"}
    assert found["models", "LlamaForCausalLM"]["distribution"] == "hardpoint"
    assert found["loaders", "gguf"]["on"]
    assert found["quantizations", "q4_0"]["about"].startswith("read from files: ")
    assert found["quantizations", "int8"]["about"].startswith("made while weights are loaded: ")
    off = found["quantizations", "q4_1"]
    assert (off["on"], off["about"]) == (False, "")
    assert main(["models", "show"]) == 0
    assert "architecture  LlamaForCausalLM " in capsys.readouterr().out


def test_a_report_describes_the_model(capsys, tmp_path):
    folder = write(tmp_path / "windows", **WINDOWS)
    found = report(capsys, folder, "--context", "100", "--context", "4000")
    names = ("architecture", "provider", "loader", "vocab_size", "max_position_embeddings")
    assert [found[name] for name in names] == [
        "Qwen2ForCausalLM", *("hardpoint 0.1.0", "dummy", 2048, 4096)
    ]  # fmt: skip
    assert (found["path"], found["fits"], found["windows"]) == (
        str(folder), True, [None, None, 64, 64]
    )  # fmt: skip
    attention, mlp = 2 * 128 * 128 + 2 * 128 * 64 + 128 + 2 * 64, 3 * 128 * 512
    assert found["num_params"] == 4 * (attention + mlp + 2 * 128) + 128 + 2 * 2048 * 128
    assert [each["num_tokens"] for each in found["contexts"]] == [100, 4000]
    assert main(["models", "show", str(folder), *settings_of()]) == 0
    text = capsys.readouterr().out
    assert "4: 2 see all tokens, 2 see the last 64 tokens\n" in text
    assert "for requests of up to 4096 tokens.\n" in text


def test_codes_of_keys_and_values_take_about_half_the_memory(capsys, tiny):
    settings = ("attention.use=torch", "kv_cache.dtype=int8")
    plain, coded = (report(capsys, tiny, settings=part) for part in (settings[:1], settings))
    assert (plain["cache_dtype"], coded["cache_dtype"]) == ("auto", "int8")
    for before, after in zip(plain["contexts"], coded["contexts"], strict=True):
        assert after["one_request"] * 64 == before["one_request"] * 36  # heads of 32: 64, 36 bytes
    assert coded["longest"] >= plain["longest"]
    assert main(["models", "show", str(tiny), *settings_of(*settings)]) == 0
    assert "attention: torch, keys and values in int8\n" in capsys.readouterr().out


SMALL = TINY | {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    "architectures": ["LlamaForCausalLM"],
}
LAYER = {
    **{"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)},
    **{"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32)},
    **{"mlp.down_proj": (32, 64), "input_layernorm": (32,), "post_attention_layernorm": (32,)},
}
WEIGHTS = {
    **{"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)},
    **{f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()},
    "lm_head.weight": (64, 32),
}
ACTIVATIONS = {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": {"bits": 8}}


def checkpoint(folder, names, **changes):
    write(folder, **(SMALL | changes))
    save_file({n: torch.ones(WEIGHTS[n]) for n in names}, folder / "model.safetensors")
    return str(folder)


def error_of(capsys, path):
    assert (
        main(["models", "show", path, "--set", "weight_cache.path=off", "--set", "device=cpu"]) == 2
    )
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        ([], "12 weights: model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model"),
        (["lm_head.weight"], "11 weights: model.embed_tokens.weight, model.layers.0.input_layerno"),
        ([n for n in WEIGHTS if "norm" not in n], "3 weights: model.layers.0.input_layernorm.weig"),
    ],
)
def test_a_checkpoint_that_lacks_weights_has_no_report(capsys, tmp_path, names, lacking):
    whole = checkpoint(tmp_path / "whole", WEIGHTS)
    assert main(["models", "show", whole, "--set", "device=cpu"]) == 0
    path = checkpoint(tmp_path / "cut", names)
    capsys.readouterr()
    assert f"model: '{path}' lacks {lacking}" in error_of(capsys, path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            ": format: expected pack-quantized or int-quantized or naive-quantized or float-quan",
        ),
        ({"quant_method": "awq", "bits": 3}, ": bits: expected 4, got 3"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": ACTIVATIONS}},
            ".config_groups.g: input_activations: activations that are quantized are not supported",
        ),
    ],
)
def test_a_scheme_that_is_not_supported_is_refused_also_where_no_weight_has_it(
    capsys, tmp_path, described, message
):
    path = checkpoint(tmp_path / "m", WEIGHTS, quantization_config=described)
    assert f"config.json: quantization_config{message}" in error_of(capsys, path)


def test_windows_save_memory_as_in_the_engine(capsys, tmp_path):
    folder = write(tmp_path / "windows", **WINDOWS)
    small = ("scheduler.max_num_batched_tokens=64",)
    windows = report(capsys, folder, "--context", "4096", settings=small)["contexts"][0]
    without = (*small, "kv_cache.window_groups=false")
    full = report(capsys, folder, "--context", "4096", settings=without)["contexts"][0]
    token = 2 * 2 * 32 * 2  # keys and values, heads, their size, bytes
    assert full["one_request"] == 4 * 4096 * token
    assert full["all_requests"] == 64 * full["one_request"]
    assert windows["one_request"] < 0.6 * full["one_request"]


def test_no_weight_is_read(capsys, tiny, monkeypatch):
    monkeypatch.setattr(DummyLoader, "weights", lambda *_: pytest.fail("weights are read"))
    assert report(capsys, tiny)["fits"]


def test_the_longest_request_that_fits_is_the_longest(capsys, tiny, monkeypatch):
    limited(monkeypatch, 10 * MIB)
    settings = ("scheduler.max_num_seqs=1", "scheduler.max_num_batched_tokens=64")
    found = report(capsys, tiny, settings=settings, code=1)
    longest = found["longest"]
    assert 0 < longest < 4096
    assert found["problem"].startswith(f"model: '{tiny}' does not fit into memory: weights ")
    assert [each["fits"] for each in found["contexts"]] == [False]
    fitting = report(capsys, tiny, settings=(*settings, f"max_model_len={longest}"))
    assert (fitting["fits"], fitting["problem"], fitting["longest"]) == (True, "", longest)
    assert fitting["cache_bytes"] >= fitting["contexts"][-1]["one_request"]
    report(capsys, tiny, settings=(*settings, "max_model_len=auto"))
    assert main(["models", "show", str(tiny), *settings_of(*settings)]) == 1
    assert "\nIt does not fit: model: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ("models.fallback=none",),
            "'GPT2LMHeadModel' is not supported",
        ),
        ({}, ("quantization.use=q4_0",), "'q4_0' does not quantize weights, and"),
        (
            {},
            ("quantization.use=int9",),
            "quantization.use: no quantization scheme 'int9' is enabled (did you mean 'int8'?); "
            "expected auto, none, or one of ",
        ),
        ({}, ("quantization.use=off",), "tq2_0 (from argument --set quantization.use)"),
        (
            {},
            ("quantization.use=int8", "plugin.int8.group_size=96", "parallel.tensor=2"),
            "'int8' has groups of 96 columns, which do not divide columns 0 to 64 of 128",
        ),
        ({}, ("parallel.tensor=3",), "2, 4 would do"),
        ({}, ("max_model_len=5000",), "expected at most 4096"),
    ],
)
def test_what_cannot_be_loaded_has_the_same_error_as_a_load(
    capsys, monkeypatch, tmp_path, changes, settings, message
):
    # `formats` of random weights is not known; these are declared float32.
    def formats(self, shapes):
        return {name: WeightFormat("float32", 4) for name in shapes}

    monkeypatch.setattr(DummyLoader, "formats", formats)
    assert (
        main(["models", "show", str(write(tmp_path / "wrong", **changes)), *settings_of(*settings)])
        == 2
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "5"], "--context: expected a MODEL before it"),
        (["smollm2", "--context", "0"], "--context: expected at least 1, got 0"),
        (["./nowhere"], "found no file or directory './nowhere'"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    assert main(["models", "show", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_lengths_above_max_model_len_are_marked(capsys, tiny):
    command = ["models", str(tiny), *settings_of("max_model_len=128"), "--context", "129"]
    assert main([*command, "--context", "128"]) == 0
    above, at = (line for line in capsys.readouterr().out.splitlines() if "a request of" in line)
    assert above.endswith("; longer than max_model_len, 128")
    assert at.endswith(" of them")


def test_a_missing_scheme_is_named_with_the_weight_and_the_loader(capsys, tiny, monkeypatch):
    formats = {"model.norm.weight": WeightFormat("float32", 4), "lm_head.weight": Q9}
    monkeypatch.setattr(DummyLoader, "formats", lambda *_: formats)
    assert main(["models", "show", str(tiny), *settings_of()]) == 2
    error = capsys.readouterr().err
    assert f"weight 'lm_head.weight' of '{tiny}': the loader 'dummy' reports storage in" in error
    assert "storage in 'q9', which is no enabled quantization scheme; enabled: " in error


@pytest.mark.parametrize(
    "wrong",
    ["float32", WeightFormat(8, 4), WeightFormat("q", 4, stored=QuantizedWeight(7, (1, 1), {}))],
)
def test_a_loader_that_does_not_know_its_formats_is_named(capsys, tiny, monkeypatch, wrong):
    monkeypatch.setattr(DummyLoader, "formats", lambda *_: {"x": wrong})
    assert main(["models", "show", str(tiny), *settings_of()]) == 2
    error = capsys.readouterr().err
    assert "plugin 'dummy'" in error
    assert "its formats() gave" in error


def loaded(folder, settings):
    """Return the rank's share of a model, with its weights, and the report that is made before."""
    given = ["load.use=dummy", *settings]
    config, sources = load_config(None, settings=given, model=str(folder))
    found = model_report.report_model(config, sources, ())
    spec = prepare_worker(config, resolve_plugins(config, sources), sources, no_progress)
    limit = memory_limit(spec.device)
    share = plan_model(spec, open_ops(spec), open_attention(spec), Parallel(), lambda: limit)
    weights = spec.loader.weights(share.checked.shapes)
    share.model.load_weights(share.quantized.pass_on(weights))
    trim_memory()
    return share, found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        ("dtype=bfloat16",),
        ("dtype=float32", "ops.use=torch"),
        ("dtype=bfloat16", "quantization.use=int8"),
        ("dtype=float32", "quantization.use=int4"),
        ("dtype=bfloat16", "quantization.use=int8", 'quantization.skip=["*embed*","lm_head*"]'),
        ("dtype=bfloat16", "quantization.use=int8", "ops.use=torch"),
    ],
)
def test_weights_take_what_was_estimated(tmp_path, settings, tied):
    folder = write(tmp_path / "model", tie_word_embeddings=tied)
    share, found = loaded(folder, settings)
    packed = share.model.packed_weights()
    held = sum(t.numel() * t.element_size() for t in {id(t): t for t in packed.values()}.values())
    assert held == pytest.approx(found.weights_bytes, rel=0.05)
    assert sum(group.held_bytes for group in found.weights) == found.weights_bytes
    assert sum(group.num_params for group in found.weights) == found.num_params
    assert found.contexts[-1].one_request == 4096 // 16 * share.attention.bytes_per_block


def test_stages_and_ranks_share_a_model(capsys, tiny):
    whole = report(capsys, tiny)
    parts = report(capsys, tiny, settings=("parallel.pipeline=2", "parallel.tensor=2"))
    assert (whole["num_ranks"], parts["num_ranks"]) == (1, 4)
    assert parts["num_params"] == whole["num_params"]
    assert parts["weights_bytes"] == pytest.approx(whole["weights_bytes"] / 4, rel=0.02)
    assert sum(group["held_bytes"] for group in parts["weights"]) == pytest.approx(
        whole["weights_bytes"], rel=0.02
    )
    assert parts["limit"].endswith(", divided by 4 ranks")
    one, full = (found["contexts"][-1]["one_request"] for found in (parts, whole))
    assert one == full // 4


_MEASURED = """
    import re, sys
    from test_models_command import loaded

    def anonymous():
        with open("/proc/self/smaps_rollup") as file:
            return int(re.search(r"Anonymous: +([0-9]+) kB", file.read())[1]) * 1024

    small, large, *settings = sys.argv[1:]
    first, _ = loaded(small, settings)  # what libraries allocate once
    before = anonymous()
    share, found = loaded(large, settings)
    after = anonymous()
    print(found.weights_bytes, after - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
@pytest.mark.parametrize("use", ["auto", "int8"])
def test_a_process_takes_what_was_estimated(tmp_path, tiny, use):
    folder = write(tmp_path / "large", hidden_size=1024, intermediate_size=4096, vocab_size=32000)
    command = [sys.executable, "-c", textwrap.dedent(_MEASURED), str(tiny), str(folder)]
    command += ["dtype=bfloat16", f"quantization.use={use}"]
    done = subprocess.run(
        command, cwd=str(__file__).rsplit("/", 1)[0], capture_output=True, check=True
    )
    estimated, used = map(int, done.stdout.split())
    assert used == pytest.approx(estimated, rel=0.1)


def test_the_old_form_works_with_a_warning(tiny, capsys):
    """For one version."""
    assert main(["models", str(tiny), *settings_of()]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tiny}: Qwen2ForCausalLM")
    assert "is now `hardpoint models show [MODEL]`" in err
    assert main(["models", *settings_of(), "-q"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("WHAT ")
    assert err == ""
    assert main(["models", "show", *settings_of()]) == 0
    assert capsys.readouterr().err == ""
