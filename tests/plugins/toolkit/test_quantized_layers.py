"""Layers with quantized matrices compute the same as with the dequantized tensors."""

from __future__ import annotations

import pytest
import torch
from support.broken.quantizations import Numbers

from hardpoint.plugins import ModelConfig, ModelContext
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.quantization import AffineCodes, DenseMatrix
from hardpoint.testing import load_ops, run_ranks
from hardpoint.testing.ops.code_matrices import FORMS
from hardpoint.toolkit.layers import Embedding, Linear, LMHead

COLUMNS = 64


def context(tensor=None, ops="auto"):
    config = ModelConfig(architecture="Layers", hf={}, vocab_size=7, max_position_embeddings=16)
    place = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 16}
    parallel = Parallel() if tensor is None else Parallel(tensor=tensor)
    made = load_ops(torch.float32, use=ops)
    return ModelContext(
        name="layers", options=None, config=config, ops=made, parallel=parallel, **place
    )


def codes(rows, form=0):
    return FORMS[form].draw(rows, COLUMNS, torch.Generator().manual_seed(form))


def own(rows):
    return Numbers(codes(rows).dequantize())


def dense(rows):
    return DenseMatrix(codes(rows).dequantize())


def tensor(rows):
    return codes(rows).dequantize()


def load(layer, name, weight):
    if isinstance(weight, torch.Tensor):
        layer.load(name, weight)
    else:
        layer.load_quantized(name, weight)


@pytest.mark.parametrize("ops", ["torch", "auto"])
@pytest.mark.parametrize(
    "weights",
    [
        (codes(5), codes(3, 2), codes(2, 5)),
        (codes(5), tensor(3), codes(2, 4)),
        (tensor(5), own(3), codes(2)),
        (own(5), own(3), tensor(2)),
    ],
    ids=["codes", "a tensor between", "of each", "own"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_products_of_mixed_matrices(ops, weights, bias):
    made = context(ops=ops)
    parts = [(name, weight.shape[0]) for name, weight in zip("abc", weights, strict=True)]
    layer = Linear(parts, COLUMNS, made, bias=bias)
    biases = torch.arange(10.0)
    start = 0
    for (name, rows), weight in zip(parts, weights, strict=True):
        load(layer, f"{name}.weight", weight)
        if bias:
            layer.load(f"{name}.bias", biases[start : start + rows])
        start += rows
    numbers = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in weights]
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(1))
    expected = x @ torch.cat(numbers).T + (biases if bias else 0)
    torch.testing.assert_close(
        layer(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )
    is_kept = not any(isinstance(weight, Numbers) for weight in weights)
    assert (layer.packed() is not None) == is_kept
    if is_kept:
        packed = layer.packed()
        again = Linear(parts, COLUMNS, made, bias=bias)
        again.load_packed(packed)
        assert torch.equal(again(x), layer(x))
        assert again.packed().keys() == packed.keys()
        del packed["a.packed"]
        with pytest.raises((KeyError, ValueError), match=r"a\.packed|rows 0 to 5 are in no matrix"):
            again.load_packed(packed)


@pytest.mark.parametrize(
    ("ranks", "vocab"), [(1, 7), (2, 7), (3, 7), (4, 9)], ids=["1", "2", "3", "4, one without rows"]
)
@pytest.mark.parametrize("make", [codes, own, dense], ids=["codes", "own", "dense"])
@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabularies(ranks, vocab, make, tied):
    whole = make(vocab)
    ids = torch.arange(vocab)

    def run(communicator):
        made = context(communicator)
        share = made.parallel.padded_share(vocab)
        part = whole.rows(share.start, share.stop)
        embedding, head = (
            Embedding("embed", vocab, COLUMNS, made),
            LMHead("head", vocab, COLUMNS, made),
        )
        embedding.load_quantized("embed.weight", part)
        if tied:
            head.tie(embedding)
        else:
            head.load_quantized("head.weight", part)
        x = embedding(ids)
        logits = head(x)
        if not tied and make is not own:
            again = LMHead("head", vocab, COLUMNS, made)
            again.load_packed(head.packed())
            assert torch.equal(again(x), logits)
        return x, logits

    results = [run(None)] if ranks == 1 else run_ranks(ranks, run)
    table = whole.dequantize()
    limit = 1e-4 * float((table @ table.T).abs().max())
    for x, logits in results:
        torch.testing.assert_close(x, table, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, table @ table.T, rtol=1e-4, atol=limit)


def test_a_part_that_is_missing_is_named():
    layer = Linear([("a", 5), ("b", 3)], COLUMNS, context())
    layer.load_quantized("a.weight", codes(5))
    with pytest.raises(RuntimeError, match=r"weights were not loaded: b\.weight"):
        layer(torch.zeros(1, COLUMNS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits: expected 4, 5, 6 or 8, got 3"),
        ({"group": 48}, "group: expected 16 or a multiple of 32, got 48"),
        ({"codes": torch.zeros(4)}, r"codes: expected \[rows, columns\], got torch.float32 \[4\]"),
        ({"codes": torch.zeros(4, 64)}, r"codes: expected torch.uint8 \[4, 64\], got"),
        ({"scales": torch.zeros(4, 1)}, r"scales: expected .*float16 or torch.float32 \[4, 2\]"),
        ({"scales": torch.zeros(4, 2).int()}, r"scales: expected .*, got torch.int32 \[4, 2\]"),
        ({"offsets": torch.zeros(2, 2)}, r"offsets: expected .* \[4, 2\], got .* \[2, 2\]"),
        ({"outer_scales": torch.ones(4, 1).half()}, r"scales: expected torch.int8 or torch.uint8"),
        ({"outer_offsets": torch.ones(4, 1).half()}, "there are no offsets that they multiply"),
        ({"values": torch.zeros(8)}, r"values: expected torch.float32 \[16\], got .* \[8\]"),
        ({"values": torch.full((16,), 0.1)}, "values: expected finite numbers that bfloat16 hol"),
        ({"values": torch.full((16,), torch.inf)}, "values: expected finite .* holds, got .inf"),
    ],
)  # fmt: skip
def test_codes_of_wrong_shapes_and_dtypes_are_refused(changes, message):
    fields = {"codes": torch.zeros(4, 64).byte(), "bits": 4, "group": 32}
    fields["scales"] = torch.ones(4, 2)
    AffineCodes(**fields)
    with pytest.raises(ValueError, match=f"AffineCodes.*{message}"):
        AffineCodes(**{**fields, **changes})


def test_a_table_that_was_not_loaded_cannot_be_tied():
    made = context()
    head = LMHead("head", 5, COLUMNS, made)
    with pytest.raises(RuntimeError, match=r"weights were not loaded: embed\.weight"):
        head.tie(Embedding("embed", 5, COLUMNS, made))
