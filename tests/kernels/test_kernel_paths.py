"""The kernels of each instruction set pass the suite, and `auto` reports why they do not run."""

from __future__ import annotations

import platform
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from support.kit_suites import messages_of
from support.processes import ROOT

from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.kernels import cpu
from hardpoint.plugins import ModelError, OpsContext
from hardpoint.testing import OpsSuite, load_ops


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets HARDPOINT_KERNELS for the next load."""

    def choose(path):
        monkeypatch.setenv(cpu.VARIABLE, path)
        cpu.load.cache_clear()

    yield choose
    cpu.load.cache_clear()


@pytest.mark.parametrize("path", cpu.PATHS)
def test_each_path_passes_the_suite(choose, path):
    choose(path)
    try:
        assert cpu.load().path == path
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))
    assert messages_of(OpsSuite, {"ops": NativeOps, "batch_invariant": True}) == {}


@pytest.mark.parametrize("path", cpu.PATHS)
@pytest.mark.parametrize("depth", [32, 37, 96, 1100])
def test_a_row_has_its_product_among_any_number_of_rows(path, depth):
    """Few rows and many are multiplied in other blocks, with sums in one order."""
    if not cpu.Library("plain").supports(path):
        pytest.skip(f"the processor has no {path}")
    library, dtype, columns = cpu.Library(path), torch.bfloat16, 100
    generator = torch.Generator().manual_seed(depth)
    num_rows = 256 if depth > 1024 else 70  # blocks of deep products keep sums between depths
    x = torch.randn(num_rows, depth, generator=generator).to(dtype)
    weight = torch.randn(columns, depth, generator=generator).to(dtype)
    packed = torch.empty(library.function("packed_size", dtype)(columns, depth), dtype=dtype)
    library.function("pack", dtype)(weight.data_ptr(), packed.data_ptr(), columns, depth)

    def product(first, count):
        y = torch.empty(count, columns, dtype=torch.float32)
        rows = x[first:]
        library.function("logits", dtype)(
            rows.data_ptr(), depth, packed.data_ptr(), None, y.data_ptr(), columns, count, columns,
            depth,
        )  # fmt: skip
        return y

    alone = torch.cat([product(row, 1) for row in range(len(x))])
    torch.testing.assert_close(alone, x.float() @ weight.float().T, rtol=1e-3, atol=1e-4)
    for count in (2, 3, 15, 16, 17, 31, 32, 33, 40, 64, 70, 125, 128, 190, 256):
        if count <= num_rows:
            assert torch.equal(product(0, count), alone[:count])
            assert torch.equal(product(num_rows - count, count), alone[num_rows - count :])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("off", "HARDPOINT_KERNELS is off"),
        (
            "sse",
            f"HARDPOINT_KERNELS is 'sse', expected one of {', '.join(cpu.PATHS)}, off",
        ),
    ],
)
def test_auto_uses_torch_where_kernels_cannot_run(choose, path, reason):
    choose(path)
    ops = load_ops(torch.bfloat16, use="auto")
    assert ops.describe() == f"torch (ops.use: 'native_cpu' cannot be used: {reason})"
    with pytest.raises(ModelError, match="'native_cpu' cannot be used: HARDPOINT_KERNELS is"):
        load_ops(torch.bfloat16, use="native_cpu")


def test_missing_kernels_are_reported(choose, monkeypatch, tmp_path):
    choose("")
    monkeypatch.setattr("hardpoint.kernels.cpu._FOLDER", tmp_path)
    with pytest.raises(cpu.KernelsUnavailableError, match="not compiled when hardpoint was insta"):
        cpu.load()


def test_a_path_that_was_not_compiled_is_named(choose, monkeypatch, tmp_path, caplog):
    """The best compiled one runs, and the log names the missing one and how to get it."""
    choose("")
    monkeypatch.setattr("hardpoint.kernels.cpu._FOLDER", tmp_path)
    shutil.copy(Path(cpu.__file__).with_name("cpu_plain.so"), tmp_path)
    absent = [path for path in cpu.PATHS if cpu.Library("plain").supports(path)][:-1]
    assert cpu.load().path == "plain"
    assert [record.getMessage() for record in caplog.records] == [
        f"kernels of instruction set plain are used; {path}: it was not compiled: install with "
        f"HARDPOINT_BUILD_KERNELS={path} (or =all), and install a wheel or with a C++ compiler "
        "(g++ or clang++) that knows it"
        for path in absent
    ]
    if absent:
        choose(absent[0])
        with pytest.raises(cpu.KernelsUnavailableError, match=f"^{absent[0]}: it was not compil"):
            cpu.load()


@pytest.fixture
def build(monkeypatch):
    """The names that setup.py defines; nothing is built."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("HARDPOINT_BUILD_KERNELS", raising=False)
    return runpy.run_path("setup.py")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("sse4_2", "plain"),
        ("avx2", "plain"),  # without fma
        ("avx2 fma", "plain"),  # without f16c
        ("avx2 fma f16c", "plain avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512vl", "plain avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "plain avx512"),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512vbmi",
            "plain avx512_bf16",
        ),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512vbmi "
            "amx_tile amx_bf16",  # without amx_int8
            "plain avx512_bf16",
        ),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512vbmi "
            "amx_tile amx_bf16 amx_int8",
            "plain amx_bf16",
        ),
    ],
)
def test_an_installation_compiles_the_best_path_and_plain(build, flags, expected):
    assert build["native_paths"](set(flags.split())) == expected.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other paths than plain are for x86-64")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", "plain avx2 avx512 avx512_bf16 amx_bf16"),
        ("none", ""),
        ("avx512", "plain avx512"),
        ("avx512, avx2", "plain avx2 avx512"),
        ("plain", "plain"),
    ],
)
def test_a_variable_names_what_is_compiled(build, monkeypatch, value, expected):
    monkeypatch.setenv("HARDPOINT_BUILD_KERNELS", value)
    assert build["chosen_paths"]() == expected.split()


def test_an_unknown_path_to_compile_is_an_error(build, monkeypatch):
    monkeypatch.setenv("HARDPOINT_BUILD_KERNELS", "avx2,sse")
    with pytest.raises(SystemExit, match=r"HARDPOINT_BUILD_KERNELS: expected all.* got 'sse'"):
        build["chosen_paths"]()


def test_the_best_compiled_path_is_the_one_that_runs(build):
    best = build["native_paths"](build["processor_flags"]())[-1]
    supported = [path for path in cpu.PATHS if cpu.Library("plain").supports(path)]
    assert supported[0] == best


def test_other_dtypes_are_left_to_torch():
    ops = load_ops(torch.float16, use="auto")
    expected = "computes in bfloat16, float32, the model's dtype is float16"
    assert ops.describe() == f"torch (ops.use: 'native_cpu' {expected})"


def test_a_wrong_product_is_noticed(monkeypatch):
    """A path that the processor has, but that computes wrongly, is passed over."""
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    check = "hardpoint.kernels.cpu._multiplies_rightly"
    monkeypatch.setattr(check, lambda library: library.path == "plain")
    cpu.load.cache_clear()
    try:
        assert cpu.load().path == "plain"
    finally:
        cpu.load.cache_clear()


def test_the_context_is_kept():
    ops = load_ops(torch.float32, use="native_cpu")
    assert isinstance(ops.context, OpsContext)
    assert ops.describe() == f"native_cpu ({cpu.load().path})"
