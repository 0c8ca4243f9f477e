"""scripts/gpu-check: what it prints and how it ends, without a GPU; with --all, a whole dry run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest
from support.process.forked_python import forked_python
from support.processes import ROOT

SCRIPT = str(ROOT / "scripts" / "gpu_check.py")
KERNEL_TESTS = sorted((ROOT / "tests" / "kernels").glob("test_triton_*.py"))
LIMIT = 180  # seconds of a dry run


def run(folder, *arguments, **environment):
    variables = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    return forked_python().run([SCRIPT, *arguments], folder, variables)


@pytest.fixture
def parts(monkeypatch):
    """The modules of the checks."""
    for folder in ("benchmarks", "scripts"):  # gpu_checks.speed imports bounds
        monkeypatch.syspath_prepend(str(ROOT / folder))
    names = ("comparing", "device", "kernels", "models", "recorder", "report", "outcomes")
    modules = {name: importlib.import_module(f"gpu_checks.{name}") for name in names}
    return SimpleNamespace(**modules)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--only", "kernel"], "invalid choice: 'kernel' (choose from 'environment', 'kernels'"),
        (["--only", "kernels", "--skip", "sleep"], "expected --only or --skip, got both"),
        (["--minutes", "0"], "--minutes: expected a number above 0, got 0.0"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, error):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert error in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "sees no GPU (torch.cuda.is_available() is False); --dry-run runs" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_part_that_takes_too_long_fails(tmp_path):
    done = run(tmp_path, "--dry-run", "--only", "environment", "--minutes", "0.17", "--out", "out")
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    (check,) = [c for c in result["parts"]["environment"]["checks"] if c["status"] == "failed"]
    assert check["name"] == "deadline"
    assert result["summary"]["failed"] == 1
    text = (tmp_path / "out" / "gpu-check.txt").read_text()
    assert text == done.stdout
    assert text.startswith("gpu-check: FAILED")
    assert "deadline" in text
    assert "took longer than its" in text


def write_checks(parts, file, *, is_dry=False):
    """Write checks of all kinds to a file, and return them as the script reads them."""
    recorder = parts.recorder.Recorder("sleep", file, is_dry=is_dry)
    with recorder.check("level 2") as check:
        check.expect(1 > 2, "level 2 returned 0.10 GiB of 2.00 GiB")
        check.expect(2 > 1, "never said")
    with recorder.check("broken"):
        raise RuntimeError("CUDA error: an illegal memory access")
    with recorder.check("speed") as check:
        check.fake("speeds")
        check.measured(share=0.71, tokens=2412.4)
        check.aim("decode, share of the bandwidth", "share", 0.7)
        check.aim("tokens per second", "tokens", 2500)
        check.aim("tokens elsewhere", "tokens", 2500, is_judged=False)
        check.set_detail("3 rounds")
    recorder.skip("level 1", "weights stay on the device")
    recorder.end()
    lines = parts.recorder.Lines()
    lines.read(file.read_text().splitlines())
    assert lines.has_ended
    return lines.checks


ABOUT = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "commit": "abc", "date": "today"}


def test_the_page(parts, tmp_path, capsys):
    checks = write_checks(parts, tmp_path / "lines")
    page = parts.report.page(ABOUT, {"sleep": checks, "graphs": []}, {"sleep": 12.3})
    assert page.startswith("gpu-check: FAILED; 1 passed, 2 failed, 1 skipped\nNVIDIA H100")
    for line in (
        "sleep (12 s)",
        "  failed  level 2",
        "          ! level 2 returned 0.10 GiB of 2.00 GiB",
        "          ! RuntimeError: CUDA error: an illegal memory access",
        "  passed  speed: 3 rounds",
        "  skipped level 1: weights stay on the device",
        "graphs: not run",
        "  decode, share of the bandwidth, at least 0.7: reached (0.71)",
        "  tokens per second, at least 2500: NOT reached (2412)",
        "  tokens elsewhere, at least 2500: not judged on this GPU (2412)",
        "  - the part graphs did not run",
        "  - level 1: weights stay on the device",
    ):
        assert line in page.splitlines(), line
    assert "never said" not in page
    assert "no GPU" not in page
    assert "illegal memory access" in capsys.readouterr().err


def test_a_dry_run_shows_no_figure(parts, tmp_path, capsys):
    checks = write_checks(parts, tmp_path / "lines", is_dry=True)
    page = parts.report.page({"date": "today"}, {"sleep": checks}, {"sleep": 1.0})
    for line in (
        "  faked   speed: speeds replaced by a fake; 3 rounds",
        "  decode, share of the bandwidth, at least 0.7: not measured",
        "  - speed: speeds replaced by a fake",
        "  - any speed, and whether kernels are right where a GPU runs them: no GPU",
    ):
        assert line in page.splitlines(), line
    assert "0.71" not in page
    assert "2412" not in page
    (speed,) = (check for check in checks if check.name == "speed")
    assert speed.figures == {"share": None, "tokens": None}


class Engine:
    """Continues prompts of one token with tokens of a table, with log-probabilities."""

    def __init__(self, tokens, logprob=-0.5):
        self.tokens = tokens
        self.logprob = logprob

    def generate(self, prompts, params):
        outputs = []
        for prompt, each in zip(prompts, params, strict=True):
            tokens = self.tokens[len(prompt) - 1 :][: each.max_tokens]
            best = SimpleNamespace(logprob=self.logprob), SimpleNamespace(logprob=-2.0)
            logprobs = [{token: best[0], token + 1: best[1]} for token in tokens]
            completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs


@pytest.mark.parametrize(
    ("tokens", "logprob", "gap", "ties", "problem"),
    [
        ([5, 6, 7, 8], -0.5, 1.0, 0, None),
        ([5, 9, 7, 8], -0.5, 5e-5, 1, None),
        ([5, 6, 7, 9], -0.5, 5e-5, 1, None),
        ([5, 9, 7, 8], -0.5, 2e-4, 0, "output token 1: got 9, the reference has 6, with a logit"),
        ([5, 6, 7, 8], -0.502, 1.0, 0, "log-probabilities are 2.0e-03 apart, expected at most"),
    ],
)
def test_greedy_tokens_but_for_ties(parts, tokens, logprob, gap, ties, problem):
    reference = parts.comparing.Continuation([1], [5, 6, 7, 8], [-0.5] * 4, [gap] * 4)
    check = parts.recorder.Check("equality", "greedy")
    parts.comparing.compare_greedy(Engine(tokens, logprob), [reference], check)
    assert check.facts["ties"] == ties
    assert len(check.problems) == (problem is not None)
    assert problem is None or problem in check.problems[0]
    assert check.facts["tokens"] == (4 if problem is None or "apart" in problem else 2)


@pytest.mark.parametrize("file", KERNEL_TESTS, ids=lambda file: file.name)
def test_no_search_of_kernels_shrinks(file):
    """Shrinking takes minutes, in which the other files of the part would not run."""
    text = file.read_text()
    assert text.count("@given(") == text.count("@kernel_examples("), "use support.triton"


TESTS = """
import time

import hypothesis
from hypothesis import strategies as st
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels.triton import layers


def test_the_device():
    assert kernel_device() == "cpu"


@kernel_examples(20, 20)
@hypothesis.given(st.integers())
def test_wrong(number):
    assert number == 1.5


def test_in_a_kernel():
    layers.rms_norm(None, None, 1e-5)


def test_slow():
    time.sleep(600)
"""


@pytest.mark.nightly
def test_tests_of_kernels_that_fail_and_take_too_long(parts, tmp_path, monkeypatch):
    """Checks that ended before the limit are known, and the limit ends no other process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (tmp_path / "test_slow_kernels.py").write_text(TESTS)
    slow = str(tmp_path / "test_slow_kernels.py")
    tests = {"slow": [slow], "quick": [f"{slow}::test_the_device"]}
    sizes = dataclasses.replace(parts.models.DRY, tests_s=40.0, all_tests=True)
    recorder = parts.recorder.Recorder("kernels", tmp_path / "lines", is_dry=True)
    parts.kernels.run_tests(recorder, parts.device.Fake(), sizes, tests)
    lines = parts.recorder.Lines()
    lines.read((tmp_path / "lines").read_text().splitlines())
    checks = {check.name: check for check in lines.checks}
    assert list(checks) == ["slow", "quick", "the tests ran on the device"]
    wrong, broken, late = checks["slow"].problems
    assert "::test_wrong: assert 0 == 1.5" in wrong
    assert "::test_in_a_kernel: AttributeError: 'NoneType'" in broken
    assert re.search(r"\(in kernels/triton/layers.py:\d+\)$", broken)
    assert late == "took longer than its 40 s, in ::test_slow"
    assert not checks["quick"].problems
    assert checks["quick"].facts == {"passed": 1, "failed": 0, "skipped": 0}
    assert not checks["the tests ran on the device"].problems


def test_tests_have_to_run_on_the_device(parts, tmp_path, monkeypatch):
    """Kernels that were interpreted, or that no test launched, show nothing of a GPU."""
    outcomes = {
        "a": parts.outcomes.Outcomes(passed=3, device="cpu"),
        "b": parts.outcomes.Outcomes(passed=3, device="cuda", num_bytes=0),
    }
    environments = []

    def run(chosen, device, sizes, folder):
        environments.append(parts.kernels.environment(device)["TRITON_INTERPRET"])
        return 0, outcomes[chosen[0]], ""

    monkeypatch.setattr(parts.kernels, "_run", run)
    recorder = parts.recorder.Recorder("kernels", tmp_path / "lines", is_dry=False)
    gpu, real = parts.device.Gpu(), parts.models.REAL
    parts.kernels.run_tests(recorder, gpu, real, {"one": ["a"], "two": ["b"]})
    lines = parts.recorder.Lines()
    lines.read((tmp_path / "lines").read_text().splitlines())
    assert environments == ["0", "0"]
    (check,) = (check for check in lines.checks if check.problems)
    assert check.problems == ["one: ran on cpu, expected cuda", "no test took memory of the GPU"]
    assert lines.where == ""


@pytest.mark.parametrize(("gib", "is_skipped"), [(40, False), (24, True)])
def test_models_that_do_not_fit_are_skipped(parts, tmp_path, monkeypatch, gib, is_skipped):
    """Two copies of 8B parameters in bf16 are 29.9 GiB."""
    device, file = parts.device.Fake(), tmp_path / "lines"
    file.touch()
    monkeypatch.setattr(device, "room", lambda: gib << 30)
    recorder = parts.recorder.Recorder("benchmark", file, is_dry=False)
    llama = parts.models.LLAMA_8B
    assert is_skipped != parts.models.has_room(
        recorder, device, "8B", llama, cache_bytes=4 << 30, copies=2
    )
    lines = parts.recorder.Lines()
    lines.read(file.read_text().splitlines())
    assert [(check.status, check.detail) for check in lines.checks] == is_skipped * [
        (
            "skipped",
            "needs 40709914624 bytes of the GPU's memory (38 GiB), 25769803776 are free",
        )
    ]


def test_aims_are_judged_where_they_are_for(parts, tmp_path, monkeypatch):
    gpu = importlib.import_module("gpu_checks.speed")
    for name, has_aims in (("NVIDIA H200", True), ("NVIDIA L4", False), ("H100 of 2030", False)):
        device = parts.device.Fake()
        monkeypatch.setattr(device, "describe", lambda name=name: {"gpu": name})
        recorder = parts.recorder.Recorder("benchmark", tmp_path / "lines", is_dry=False)
        assert gpu.measure_device(recorder, device).has_aims is has_aims, name


@pytest.mark.parametrize(
    ("chosen", "minutes"),
    [
        ([], 8),
        (["kernels"], 8),
        (["throughput"], 230 / 60),
        (["cpu"], 2),
        (["throughput", "cpu"], 340 / 60),
        (["sleep", "cpu"], 10),
    ],
)
def test_minutes_of_parts(parts, chosen, minutes):
    program = importlib.import_module("gpu_check")
    assert program.default_minutes(chosen) == pytest.approx(minutes)


def test_entries_of_products_that_were_faster(parts):
    products = importlib.import_module("gpu_checks.products")
    qkv, out, gate_up, down, output = products.products_of(parts.models.LLAMA_8B)
    assert [p.shape for p in (qkv, out, gate_up, down, output)] == [
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (128256, 4096),
    ]
    assert [p.count for p in (qkv, output)] == [32, 1]
    times = {qkv: (1.5, 0.9, 1.1, 1.03, 1.01), out: (0.9, 1.2, 1.2, 1.2, 1.2), down: (1.0,) * 5}
    timings = {
        (product, rows): products.Timing(100, 1.0, library)
        for product, libraries in times.items()
        for rows, library in zip(products.ROWS, libraries, strict=True)
    }
    lines = products.entries(timings)
    assert [line.partition("  # ")[2] for line in lines] == ["qkv", "qkv", "o"]
    table = importlib.import_module("hardpoint.kernels.triton.measured_products")
    classes = eval(f"[{' '.join(line.partition('  #')[0] for line in lines)}]", vars(table))
    assert [entry.x_rows for entry in classes] == [(1, 1), (3, 8), (2, 16)]
    for rows, is_faster in ((1, True), (2, False), (3, True), (8, True), (9, False)):
        args = ("GPU", rows, qkv.shape, products.torch.bfloat16, {"GPU": classes[:2]})
        assert table.is_faster(*args) is is_faster


def test_figures_of_a_step_of_products(parts):
    """Each product counts as often as the model has it."""
    products = importlib.import_module("gpu_checks.products")
    check = parts.recorder.Check("products", "step")
    layer, output = products.Product("o", (4, 4), 3), products.Product("output", (8, 4), 1)
    timings = {
        (product, rows): products.Timing(1000 * product.shape[0], 2e-6, 3e-6)
        for product in (layer, output)
        for rows in products.ROWS
    }
    products.add_figures(check, [layer, output], timings, 5e9)
    assert check.figures["16_rows_tb_per_s"] == pytest.approx(20000 / 8e-6 / 1e12)
    assert check.figures["1_rows_bandwidth"] == pytest.approx(0.5)
    assert check.figures["1_rows_times_library"] == pytest.approx(1.5)


def test_wrong_products_fail(parts):
    products = importlib.import_module("gpu_checks.products")
    torch = products.torch
    x, weight = torch.randn(16, 32), torch.randn(8, 32)
    noise = iter(range(1000))
    for multiply, problem in (
        (lambda rows: rows @ weight.T, None),
        (lambda rows: 1.1 * (rows @ weight.T), "1 rows: differs from the product in float32"),
        (lambda rows: rows @ weight.T * float("nan"), "1 rows: differs from the product in"),
        (lambda rows: rows @ weight.T + len(rows) * 1e-6, "2 rows: differs from 16 rows"),
        (lambda rows: rows @ weight.T + next(noise) * 1e-6, "1 rows: launches differ"),
    ):
        check = parts.recorder.Check("products", "o")
        products.compare(x, weight, multiply, 1, check)
        if problem is None:
            assert not [p for p in check.problems if "float32" in p or "launches" in p]
        else:
            assert any(problem in line for line in check.problems), check.problems


def test_lengths_have_the_sums_of_the_sample(parts):
    lengths = importlib.import_module("gpu_checks.throughput").sharegpt_lengths()
    prompts, outputs = zip(*lengths, strict=True)
    assert len(lengths) == 1000
    assert (sum(prompts), sum(outputs)) == (217_393, 201_847)
    assert min(prompts + outputs) >= 4
    assert max(map(sum, lengths)) <= 2048


@pytest.mark.parametrize(
    ("work", "busy", "gaps"),
    [
        ([(0, 5)], 5, []),
        ([(7, 9), (0, 5)], 7, [2]),
        ([(0, 5), (3, 8), (4, 6)], 8, []),
        ([(0, 5), (5, 8), (30, 31)], 9, [22]),
    ],
)
def test_busy_time_and_gaps(parts, work, busy, gaps):
    throughput = importlib.import_module("gpu_checks.throughput")
    assert throughput.busy_and_gaps(work) == (busy, gaps)


@pytest.mark.nightly
def test_a_dry_run_of_named_parts(tmp_path):
    done = run(tmp_path, "--dry-run", "--only", "throughput", "cpu", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    checks = [check for part in ("throughput", "cpu") for check in result["parts"][part]["checks"]]
    assert [check["status"] for check in checks] == ["faked"] * 4
    assert "SGLang 16200, LMDeploy 16100, vLLM 12600" in " ".join(done.stdout.split())


def test_checks_that_run_at_once(parts, tmp_path):
    recorder, lines = (
        parts.recorder.Recorder("x", tmp_path / "x", is_dry=True),
        parts.recorder.Lines(),
    )
    with recorder.check("a"), recorder.check("b"):
        with recorder.check("c"):
            pass
        lines.read((tmp_path / "x").read_text().splitlines())
    assert lines.where == ", in 'a', 'b'"


@pytest.mark.timing
def test_a_dry_run(tmp_path):
    start = time.monotonic()
    done = run(tmp_path, "--dry-run", "--out", "out")
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{seconds:.0f} s")
    assert seconds < LIMIT
    result = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert result["dry_run"]
    assert result["gpu"] is None
    assert result["summary"]["failed"] == 0
    for part, found in result["parts"].items():
        assert found["seconds"] > 0, part
        assert found["checks"], part
        for check in found["checks"]:
            assert check["status"] in ("passed", "faked"), check
            assert not any(check["figures"].values()), check
            assert all(aim["reached"] is None for aim in check["aims"])
    fakes = {c["faked"] for found in result["parts"].values() for c in found["checks"]} - {""}
    assert fakes == {
        f"{what} replaced by a fake"
        for what in (
            "CUDA graphs",
            "torch.cuda.set_sync_debug_mode",
            "the free memory of the device",
            "rates of copies and products",
            "speeds",
        )
    }
    text = (tmp_path / "out" / "gpu-check.txt").read_text()
    assert text.startswith("gpu-check: passed;")
    assert "no GPU: a dry run on the CPU, kernels interpreted, sizes tiny" in text
    assert "decode at batch 1, share of the bandwidth, at least 0.75: not measured" in text
    assert all(f"{what}" in " ".join(text.split()) for what in fakes)
