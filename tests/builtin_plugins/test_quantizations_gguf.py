"""Blocks of GGUF files: read exactly, cut with the ranks, mixed in one file, refused if damaged."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.checkpoint_harness import KINDS, SCALES, random_model, write_gguf
from support.builtins.model_harness import Runner, load_model, open_loader, scheme
from support.searching import examples

from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.loaders.gguf_tensors import StoredTensor
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.phi3 import Phi3
from hardpoint.builtin_plugins.models.qwen_moe import Qwen3Moe
from hardpoint.plugins import Model, ModelError, WeightLoader
from hardpoint.plugins.parallel import Communicator, Cut, Parallel
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing.model.quantization_rules import num_bytes
from hardpoint.testing.model.rank_threads import run_ranks

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
LOW = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4")
TOKENS = list(range(40))
# Widths that blocks of 256 columns divide.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}
# The columns of attention's outputs, too, are two blocks.
LARGE_EXPERTS = WIDE | {"num_attention_heads": 32}
FAMILIES = {"llama": ("Llama", Llama), "phi3": ("Phi3", Phi3)}


def stored(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> QuantizedWeight:
    weight = StoredTensor("test", kind, data).read(None, None)
    assert isinstance(weight, QuantizedWeight)
    return weight


@pytest.mark.parametrize("name", NAMES)
@examples(8)
@given(rows=st.integers(0, 5), count=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_any_bytes_are_read_as_the_library_does(name, rows, count, seed) -> None:
    check_bytes(name, rows, count, seed)


@pytest.mark.parametrize("name", LOW)
def test_any_bytes_of_few_bits_are_read_as_the_library_does(name) -> None:
    for rows, count, seed in ((0, 1, 0), (1, 1, 1), (5, 3, 2), (64, 2, 3)):
        check_bytes(name, rows, count, seed)


def check_bytes(name: str, rows: int, count: int, seed: int) -> None:
    kind = KINDS[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, count * size), np.uint8)
    if name == "MXFP4":
        data.reshape(-1, size)[:, 0] %= 253  # others are refused
    weight = stored(data, kind)
    matrix = scheme(weight.scheme).read(weight)
    assert matrix.shape == weight.shape == (rows, count * block)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind) if rows else np.empty(matrix.shape)
    weights = matrix.dequantize().numpy()
    assert np.array_equal(weights, expected, equal_nan=True)
    if np.isfinite(expected).all():
        assert matrix.is_finite()
    for start in range(0, count * block, matrix.alignment):
        part = matrix.columns(start, start + matrix.alignment).dequantize().numpy()
        expected_part = expected[:, start : start + matrix.alignment]
        assert np.array_equal(part, expected_part, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_as_stored_are_counted(name) -> None:
    block, size = gguf.GGML_QUANT_SIZES[KINDS[name]]
    assert scheme(name.lower()).stored_bytes((3, 4 * block)) == 3 * 4 * size


@pytest.mark.parametrize("name", LOW)
def test_bytes_in_memory_are_counted(name) -> None:
    block, size = gguf.GGML_QUANT_SIZES[KINDS[name]]
    weight = stored(np.zeros((3, 4 * size), np.uint8), KINDS[name])
    assert scheme(weight.scheme).stored_bytes((3, 4 * block)) == num_bytes(
        scheme(weight.scheme).read(weight)
    )


@pytest.mark.parametrize("exponent", [253, 255])
def test_exponents_of_mxfp4_that_make_no_numbers_are_refused(exponent) -> None:
    blocks = np.full((2, 17), exponent, np.uint8)
    with pytest.raises(ValueError, match=f"blocks: expected exponents up to 252, got {exponent}"):
        scheme("mxfp4_gguf").read(stored(blocks, KINDS.MXFP4))


@pytest.mark.parametrize(
    ("columns", "blocks", "message"),
    [
        (250, torch.zeros(2, 144, dtype=torch.uint8), "blocks of 256 columns, got 250 columns"),
        (256, torch.zeros(2, 143, dtype=torch.uint8), r"uint8 \[2, 144\] .* got torch.uint8 \[2, "),
        (256, torch.zeros(2, 144, dtype=torch.int8), r"got torch.int8 \[2, 144\]"),
        (256, None, "'blocks' is missing, expected torch.uint8"),
    ],
)
def test_blocks_of_another_shape_are_refused(columns, blocks, message) -> None:
    weight = QuantizedWeight("q4_k", (2, columns), {} if blocks is None else {"blocks": blocks})
    for method in ("check", "read"):
        with pytest.raises(ValueError, match=message):
            getattr(scheme("q4_k"), method)(weight)


def q4_k_m(name: str) -> str:
    """As llama.cpp mixes types: some matrices are more precise."""
    return "Q6_K" if name.endswith(("attn_v", "ffn_down", "token_embd", "output")) else "Q4_K"


def with_numbers(name: str) -> str:
    """Numbers among blocks, also of matrices that are multiplied together."""
    kinds = {"attn_k": "F16", "attn_output": "BF16", "ffn_gate": "F32", "token_embd": "Q8_0"}
    return kinds.get(name.rpartition(".")[2], "Q5_K")


def with_types_of_the_loader(name: str) -> str:
    """A type that no scheme reads, which the loader dequantises, among others."""
    kinds = {"attn_k": "IQ1_S", "attn_q": "IQ4_NL", "ffn_down": "Q3_K", "ffn_up": "Q5_1"}
    return kinds.get(name.rpartition(".")[2], "IQ4_XS" if "attn" in name else "Q5_0")


def of_few_bits(name: str) -> str:
    """Each type of few bits, in both blocks of layers."""
    kinds = {"attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "IQ2_XXS", "attn_output": "IQ2_XS"}
    kinds |= {"ffn_gate": "IQ2_S", "ffn_up": "IQ3_XXS", "ffn_down": "IQ3_S", "output": "MXFP4"}
    return kinds.get(name.rpartition(".")[2], "TQ1_0")


@functools.cache
def written(folder: Path, family: str, kinds, fields: tuple = ()) -> tuple[WeightLoader, Model]:
    """Write a random model with quantised matrices; return a loader and transformers' model."""
    name, _ = FAMILIES[family]
    model = random_model(name, **WIDE | dict(fields))
    path = folder / f"{family}-{kinds.__name__}-{len(fields)}.gguf"
    write_gguf(path, model, family, kinds=kinds)
    return open_loader(GGUFLoader, path), model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("use", ["auto", "none"])
@pytest.mark.parametrize("fields", [(), (("tie_word_embeddings", True),)], ids=["untied", "tied"])
@pytest.mark.parametrize("kinds", [q4_k_m, with_numbers, with_types_of_the_loader, of_few_bits])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_files_equal_the_dequantised_model(family, kinds, fields, use, folder) -> None:
    loader, reference = written(folder, family, kinds, fields)
    model = load_model(FAMILIES[family][1], loader, dtype=torch.float32, use=use)
    actual = Runner(model, dtype=torch.float32).logits([("a", TOKENS)])
    expected = reference(torch.tensor([TOKENS])).logits[0]
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


EXPERTS = {
    "plain": ("Q4_1", {"blk.0.ffn_down_exps": "Q8_0", "blk.1.ffn_gate_exps": "Q5_1"}),
    "few": ("TQ2_0", {"blk.0.ffn_down_exps": "Q3_K", "blk.1.ffn_gate_exps": "IQ2_XS"}),
    "mixed": ("Q4_K", {"blk.0.ffn_down_exps": "Q6_K", "blk.1.ffn_up_exps": "MXFP4"}),
}


@pytest.mark.parametrize("form", EXPERTS)
def test_experts_that_are_quantised_equal_the_dequantised_model(form, folder) -> None:
    # Their width: two ranks divide blocks of 256 columns.
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    reference = random_model("Qwen3Moe", **LARGE_EXPERTS | fields, norm_topk_prob=True, head_dim=16)
    other, kinds = EXPERTS[form]
    write_gguf(
        folder / "experts.gguf",
        reference,
        "qwen3moe",
        kinds=lambda name: "F32" if "inp" in name else kinds.get(name, other),
    )
    loader = open_loader(GGUFLoader, folder / "experts.gguf")
    expected = reference(torch.tensor([TOKENS])).logits[0]
    for ranks, expert in ((1, False), (2, False), (2, True)):
        run = functools.partial(logits, Qwen3Moe, loader, expert=expert)
        for rank_logits in run_ranks(ranks, run):
            assert (rank_logits - expected).abs().max() < 1e-4 * expected.abs().max()


def logits(
    kind: type[Model], loader: WeightLoader, rank: Communicator, use="auto", expert=False
) -> torch.Tensor:
    """Return the logits of TOKENS of a rank."""
    with torch.inference_mode():
        parallel = Parallel(rank, expert=expert)
        model = load_model(kind, loader, dtype=torch.float32, parallel=parallel, use=use)
        return Runner(model, dtype=torch.float32).logits([("a", TOKENS)])


def q4_1(name: str) -> str:
    return "Q4_1" if name else ""


def q6_k(name: str) -> str:
    return "Q6_K" if name else ""


LARGE = (("hidden_size", 512), ("num_attention_heads", 32), ("num_hidden_layers", 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", [q4_1, q6_k])
def test_two_ranks_equal_one(kinds, family, folder) -> None:
    loader, _ = written(folder, family, kinds, LARGE)
    kind = FAMILIES[family][1]
    (whole,) = run_ranks(1, lambda rank: logits(kind, loader, rank))
    for rank_logits in run_ranks(2, lambda rank: logits(kind, loader, rank)):
        assert (rank_logits - whole).abs().max() < 1e-4 * whole.abs().max()


def test_blocks_that_a_cut_divides_are_refused_or_dequantised(folder) -> None:
    loader, reference = written(folder, "llama", q6_k)
    with pytest.raises(ModelError) as refused:
        run_ranks(2, lambda rank: logits(Llama, loader, rank))
    assert "'model.layers.0.self_attn.o_proj.weight' of 'test': q6_k: columns " in str(
        refused.value
    )
    assert str(refused.value).endswith(
        " of 256 cannot be cut from blocks of 256 columns, the part that a rank has; expected "
        "fewer ranks (parallel.tensor), or quantization.use = 'none', which dequantizes"
    )
    expected = reference(torch.tensor([TOKENS])).logits[0]
    for rank_logits in run_ranks(2, lambda rank: logits(Llama, loader, rank, "none")):
        assert (rank_logits - expected).abs().max() < 1e-4 * expected.abs().max()


SCALED = ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_NL", "IQ4_XS")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "at"), [(n, p[0]) for n in SCALES if n.name in SCALED for p in SCALES[n]]
)
def test_scales_that_are_not_finite_are_refused_with_their_tensor(name, at, value, folder) -> None:
    path = folder / "damaged.gguf"
    write_gguf(path, random_model("Llama", **WIDE), "llama", kinds=lambda _: name.name)
    _, size = gguf.GGML_QUANT_SIZES[name]
    data = np.memmap(path, np.uint8, "r+")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    start = int(tensor.data_offset) + 7 * size + at
    data[start : start + 2] = np.array([value], np.float16).view(np.uint8)
    data.flush()
    with pytest.raises(
        ModelError,
        match=r"'model.layers.1.mlp.up_proj.weight' of 'test': i?q._[knxs][ls]?: a scale or offset",
    ):
        load_model(Llama, open_loader(GGUFLoader, path), dtype=torch.float32)


def test_blocks_are_not_read_before_they_are_used(folder) -> None:
    loader, _ = written(folder, "llama", q4_k_m)
    name = "model.layers.0.mlp.up_proj.weight"
    for cut in (None, Cut(0, 3, 60), Cut(1, 0, 256)):
        cuts = {} if cut is None else {name: cut}
        ((_, weight),) = loader.cut_weights({name: (512, 256)}, cuts)
        assert isinstance(weight, QuantizedWeight)
        blocks = weight.tensors["blocks"].numpy()
        whole = next(
            t
            for t in open_gguf(loader.context.files.path).tensors
            if t.name == "blk.0.ffn_up.weight"
        ).data
        assert np.shares_memory(blocks, whole)
