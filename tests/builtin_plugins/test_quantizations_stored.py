"""AWQ, GPTQ and compressed-tensors: matrices as their formats pack them, read exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builtins import quantized_checkpoints as checkpoints
from support.builtins.quantized_checkpoints import (
    auto_round_config,
    awq_config,
    build_scheme,
    gptq_config,
    integers_config,
    random_matrix,
    stored,
)

from hardpoint.builtin_plugins.quantizations.awq import AWQ
from hardpoint.builtin_plugins.quantizations.compressed_tensors import CompressedTensors
from hardpoint.builtin_plugins.quantizations.gptq import GPTQ, AutoRound
from hardpoint.plugins import ModelError
from hardpoint.plugins.quantization import AffineCodes, DenseMatrix, QuantizedWeight

GROUPS = [-1, 16, 32, 64, 96]
ODD = [8, 24, 48]


def check(scheme, matrix, tensors):
    """Check that a matrix is read exactly, whole and in parts; return it."""
    outline = {name: tensor.to("meta") for name, tensor in tensors.items()}
    scheme.check(stored(matrix, outline))
    codes = scheme.read(stored(matrix, tensors))
    assert codes.shape == matrix.shape
    assert torch.equal(codes.dequantize(), matrix.weight)
    middle = matrix.shape[0] // 2
    assert torch.equal(codes.rows(middle, matrix.shape[0]).dequantize(), matrix.weight[middle:])
    return codes


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5).map(lambda n: 8 * n),
    groups=st.integers(1, 4),
    group=st.sampled_from(GROUPS + ODD),
    seed=st.integers(0, 9),
)
def test_awq(rows, groups, group, seed):
    columns = 40 * groups if group == -1 else group * groups
    matrix = random_matrix(rows, columns, group=group, seed=seed)
    codes = check(build_scheme(AWQ, awq_config(group)), matrix, checkpoints.awq(matrix))
    is_together = groups == 1 or group in GROUPS
    assert isinstance(codes, AffineCodes if is_together else DenseMatrix)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 24).map(lambda n: 8 * n)),
    group=st.sampled_from(GROUPS + ODD),
    form=st.sampled_from(["gptq", "gptq_v2"]),
    symmetric=st.booleans(),
    shuffled=st.booleans(),
)
def test_gptq(bits, shape, group, form, symmetric, shuffled):
    matrix = random_matrix(*shape, bits=bits, group=group, symmetric=symmetric, shuffled=shuffled)
    config = gptq_config(group, bits, checkpoint_format=form, desc_act=shuffled, sym=symmetric)
    tensors = checkpoints.gptq(matrix, less=int(form == "gptq"))
    codes = check(build_scheme(GPTQ, config), matrix, tensors)
    if symmetric and isinstance(codes, AffineCodes):
        assert codes.offsets is None
        assert codes.scales.dtype == torch.float16


RULES = {
    r"-:.*\.k_proj": {},
    r"+:.*\.down_proj$": {"bits": 8, "group_size": 64, "mse": 2.0},
    ".*proj": {"group_size": 16},
}


def test_rules_of_gptq_change_how_modules_are_stored():
    scheme = build_scheme(GPTQ, gptq_config(dynamic=RULES))
    for name, fields in (
        ("mlp.down_proj", {"bits": 8, "group": 64}),
        ("self_attn.q_proj", {"group": 16}),
        ("lm_head", {"group": 32}),
    ):
        matrix = random_matrix(8, 128, **fields)
        weight = QuantizedWeight("x", matrix.shape, checkpoints.gptq(matrix), f"{name}.weight")
        assert torch.equal(scheme.read(weight).dequantize(), matrix.weight)
        assert scheme.alignment(weight.shape, weight) is None  # g_idx may reorder
    assert scheme.stored_bytes((8, 128)) is None
    other = QuantizedWeight("x", weight.shape, weight.tensors, "self_attn.k_proj.weight")
    with pytest.raises(
        ValueError, match=r"dynamic: '-:.*k_proj' leaves it as it was, expected a w"
    ):
        scheme.check(other)


def test_auto_round_packs_as_gptq_does():
    extra = {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.1": {"bits": 4}}
    scheme = build_scheme(AutoRound, auto_round_config(extra_config=extra))
    assert isinstance(check(scheme, MATRIX, checkpoints.gptq(MATRIX)), AffineCodes)


def test_a_zero_of_gptq_that_borrowed_from_the_next_one_is_read_rightly():
    matrix = random_matrix(8, 32, group=32)
    matrix.zeros[3] = 0
    check(build_scheme(GPTQ, gptq_config()), matrix, checkpoints.gptq(matrix))


def test_columns_of_a_group_that_are_apart_are_dequantised():
    matrix = random_matrix(8, 128, group=32, shuffled=True)
    scheme = build_scheme(GPTQ, gptq_config(desc_act=True))
    codes = check(scheme, matrix, checkpoints.gptq(matrix))
    assert isinstance(codes, DenseMatrix)
    assert torch.equal(codes.columns(3, 50).dequantize(), matrix.weight[:, 3:50])
    together = random_matrix(8, 128, group=32)
    assert isinstance(check(scheme, together, checkpoints.gptq(together)), AffineCodes)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 200)),
    group=st.sampled_from(GROUPS + ODD),
    symmetric=st.booleans(),
    is_packed=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_compressed_tensors(bits, shape, group, symmetric, is_packed, dtype):
    matrix = random_matrix(*shape, bits=bits, group=group, symmetric=symmetric)
    store = checkpoints.packed_integers if is_packed else checkpoints.plain_integers
    tensors = store(matrix, symmetric=symmetric)
    tensors["weight_scale"] = matrix.scales.to(dtype)
    matrix.scales.copy_(tensors["weight_scale"])  # bfloat16 rounds
    form = "pack-quantized" if is_packed else "int-quantized"
    config = integers_config(group, bits, form=form, symmetric=symmetric)
    check(build_scheme(CompressedTensors, config), matrix, tensors)


def test_compressed_tensors_packs_as_its_library_does():
    """Numbers of compressed_tensors 0.20: `pack_to_int32` of -8 to 7, then of -128 and others."""
    four = QuantizedWeight(
        "x",
        (1, 16),
        {
            "weight_packed": torch.tensor([[1985229328, -19088744]], dtype=torch.int32),
            "weight_scale": torch.ones(1, 1),
            "weight_shape": torch.tensor([1, 16]),
        },
    )
    config = integers_config(-1, symmetric=True)
    weights = build_scheme(CompressedTensors, config).read(four).dequantize()
    assert weights.tolist() == [list(range(-8, 8))]
    eight = QuantizedWeight(
        "x",
        (1, 5),
        {
            "weight_packed": torch.tensor([[-8356096, 131]], dtype=torch.int32),
            "weight_scale": torch.ones(1, 1),
            "weight_shape": torch.tensor([1, 5]),
        },
    )
    config = integers_config(-1, 8, symmetric=True)
    weights = build_scheme(CompressedTensors, config).read(eight).dequantize()
    assert weights.tolist() == [[-128, -1, 0, 127, 3]]


def test_one_scale_of_a_whole_matrix():
    matrix = random_matrix(6, 40, bits=8, symmetric=True)
    tensors = checkpoints.plain_integers(matrix, symmetric=True)
    tensors["weight_scale"] = matrix.scales[:1, 0].clone()
    matrix.scales.copy_(tensors["weight_scale"].expand(6, 1))
    config = integers_config(-1, 8, symmetric=True, strategy="tensor")
    check(build_scheme(CompressedTensors, config), matrix, tensors)


def test_reordered_columns_of_compressed_tensors():
    matrix = random_matrix(6, 64, group=32, shuffled=True)
    tensors = checkpoints.packed_integers(matrix) | {"weight_g_idx": matrix.group_of.int()}
    config = integers_config(actorder="group")
    assert isinstance(check(build_scheme(CompressedTensors, config), matrix, tensors), DenseMatrix)


def test_several_groups_of_the_config_are_distinguished_by_what_they_store():
    config = integers_config(32)
    other = integers_config(-1, 8, symmetric=True)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other | {"format": "int-quantized"}
    config["format"] = "mixed-precision"
    scheme = build_scheme(CompressedTensors, config)
    first = random_matrix(6, 64, group=32)
    check(scheme, first, checkpoints.packed_integers(first))
    second = random_matrix(6, 64, bits=8, symmetric=True)
    check(scheme, second, checkpoints.plain_integers(second, symmetric=True))
    assert scheme.stored_bytes((8, 64)) is None


def test_groups_of_the_config_that_read_a_matrix_alike_are_one():
    config = integers_config()
    other = integers_config(symmetric=True)["config_groups"]["group_0"]
    whole = integers_config(-1)["config_groups"]["group_0"]
    config["config_groups"] |= {"group_1": other, "group_2": whole}
    matrix = random_matrix(6, 32, group=32)  # of one group of columns
    scheme = build_scheme(CompressedTensors, config)
    check(scheme, matrix, checkpoints.packed_integers(matrix))


def with_targets(first, second):
    """Two groups that differ in the size of groups of columns, 64 and 96."""
    config = integers_config(64)
    other = integers_config(96)["config_groups"]["group_0"]
    config["config_groups"]["group_0"]["targets"] = first
    config["config_groups"]["group_1"] = other | {"targets": second}
    return build_scheme(CompressedTensors, config)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["Linear"], ["re:.*down_proj"]),
        (["re:.*q_proj", "Linear"], ["re:.*layers\\.[0-9]+\\.(mlp|moe)\\..*"]),
        (["re:.*_proj"], ["a.mlp.down_proj", "layers.0.mlp.down_proj"]),
        (["re:.*q_proj"], ["Linear"]),
    ],
)
def test_targets_choose_between_groups_that_differ(first, second):
    matrix = random_matrix(6, 128, group=96)  # two groups of either size
    tensors = checkpoints.packed_integers(matrix)
    name = "layers.0.mlp.down_proj.weight"
    weight = QuantizedWeight("any", matrix.shape, tensors, name)
    codes = with_targets(first, second).read(weight)
    assert torch.equal(codes.dequantize(), matrix.weight)
    swapped = with_targets(second, first).read(weight)
    assert not torch.equal(swapped.dequantize(), matrix.weight)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Linear", "it fits 2 of the config_groups, which differ; expected targets of which one"),
        ("re:(a|b", "targets of the config_groups: 're:.*' is no pattern: missing"),
        ("re:(a+)+x", "expected patterns with at most 4 repeats, none of them of a group, got 're"),
        ("re:" + ".*" * 5, "expected patterns with at most 4 repeats, none of them of a group"),
        ("re:" + "a?" * 9, "expected patterns with at most 4 repeats, none of them of a group"),
    ],
)
def test_targets_that_do_not_choose_are_refused(target, message):
    matrix = random_matrix(6, 128, group=96)
    weight = QuantizedWeight("any", matrix.shape, checkpoints.packed_integers(matrix), "a.weight")
    with pytest.raises(ValueError, match=message):
        with_targets(["Linear"], [target]).check(weight)


@pytest.mark.parametrize("group", [32, -1])
def test_columns_are_cut_where_groups_end_or_anywhere_in_a_group_of_a_row(group):
    matrix = random_matrix(8, 128, group=group)
    codes = check(build_scheme(AWQ, awq_config(group)), matrix, checkpoints.awq(matrix))
    assert torch.equal(codes.columns(32, 96).dequantize(), matrix.weight[:, 32:96])
    if group == -1:
        assert torch.equal(codes.columns(5, 50).dequantize(), matrix.weight[:, 5:50])
    else:
        with pytest.raises(ValueError, match="cannot be cut from blocks of 32 columns"):
            codes.columns(16, 96)


@pytest.mark.parametrize(
    ("scheme", "shape", "expected"),
    [
        (build_scheme(AWQ, awq_config(128)), (8, 256), 8 * (128 + 16)),
        (build_scheme(GPTQ, gptq_config(128, sym=True)), (8, 256), 8 * (128 + 4)),
        (build_scheme(GPTQ, gptq_config(desc_act=True)), (8, 256), None),
        (build_scheme(CompressedTensors, integers_config(-1, 8, symmetric=True)), (4, 9), 4 * 11),
    ],
)
def test_bytes_in_memory(scheme, shape, expected):
    assert scheme.stored_bytes(shape) == expected


MATRIX = random_matrix(16, 64, group=32)
SCHEMES = {
    "awq": (AWQ, awq_config(), checkpoints.awq(MATRIX)),
    "gptq": (GPTQ, gptq_config(), checkpoints.gptq(MATRIX)),
    "auto_round": (AutoRound, auto_round_config(), checkpoints.gptq(MATRIX)),
    "packed": (CompressedTensors, integers_config(), checkpoints.packed_integers(MATRIX)),
    "plain": (
        CompressedTensors,
        integers_config(form="int-quantized"),
        checkpoints.plain_integers(MATRIX),
    ),
}


def damaged(tensor, how):
    if how == "cut":
        return tensor[:-1]
    if how == "dtype":
        return tensor.to(torch.int16 if not tensor.is_floating_point() else torch.float64)
    assert how == "flat"
    return tensor.flatten()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("how", ["cut", "dtype", "flat", "missing", "unknown"])
def test_wrong_tensors_are_named_by_their_headers(name, how):
    kind, config, tensors = SCHEMES[name]
    scheme = build_scheme(kind, config)
    for last in tensors:
        wrong = {key: tensor.to("meta") for key, tensor in tensors.items()}
        message = f"{last}: expected .*got "
        if how == "missing":
            del wrong[last]
            message = f"'{last}' is missing; there are |'weight_packed' is missing"
            if last == "g_idx":
                continue
        elif how == "unknown":
            wrong["input_scale"] = torch.ones(1)
            message = "'input_scale' is not known; expected "
        elif how == "flat" and wrong[last].dim() == 1:
            continue
        else:
            wrong[last] = damaged(wrong[last], how)
        for call in (scheme.check, scheme.read):
            with pytest.raises(ValueError, match=message):
                call(stored(MATRIX, wrong))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(name, number):
    kind, config, tensors = SCHEMES[name]
    last = "scales" if "scales" in tensors else "weight_scale"
    wrong = tensors[last].clone()
    wrong[1, 1] = number
    with pytest.raises(ValueError, match="the scales have numbers that are not finite"):
        build_scheme(kind, config).read(stored(MATRIX, tensors | {last: wrong}))


@pytest.mark.parametrize("group", [16, 64, -1])
def test_a_size_of_groups_that_the_shapes_contradict_is_refused(group):
    for kind, config, last, tensors in (
        (AWQ, awq_config(group), "qzeros", checkpoints.awq(MATRIX)),
        (GPTQ, gptq_config(group), "qzeros", checkpoints.gptq(MATRIX)),
        (
            CompressedTensors,
            integers_config(group),
            "weight_scale",
            checkpoints.packed_integers(MATRIX),
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"{last}: expected .* \[.*\] for a matrix \[16, 64\]"
        ):
            build_scheme(kind, config).read(stored(MATRIX, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "g_idx: expected .* 0 to 1, got 2"),
        ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "0 to 1, got -1 to -1"),
    ],
)
def test_groups_of_columns_that_do_not_exist_are_refused(change, message):
    tensors = checkpoints.gptq(MATRIX) | change
    with pytest.raises(ValueError, match=message):
        build_scheme(GPTQ, gptq_config()).read(stored(MATRIX, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_shape": torch.tensor([16, 63])}, r"weight_shape: expected \[16, 64\], got \[16"),
        ({"weight_zero_point": torch.full((2, 3), 1)}, "weight_zero_point: expected int32"),
    ],
)
def test_wrong_content_of_packed_integers_is_refused(change, message):
    tensors = checkpoints.packed_integers(MATRIX) | change
    with pytest.raises(ValueError, match=message):
        build_scheme(CompressedTensors, integers_config()).read(stored(MATRIX, tensors))


@pytest.mark.parametrize("last", ["weight", "weight_zero_point"])
def test_integers_out_of_range_are_refused(last):
    tensors = checkpoints.plain_integers(MATRIX)
    wrong = tensors[last].clone()
    wrong[0, 0] = 8
    config = integers_config(form="int-quantized")
    with pytest.raises(ValueError, match=f"{last}: expected numbers of 4 bits, -8 to 7, got"):
        build_scheme(CompressedTensors, config).read(stored(MATRIX, tensors | {last: wrong}))


def changed(config, **weights):
    """Change fields of the first group's weights."""
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"a": group | {"weights": group["weights"] | weights}}}


INTEGERS = integers_config()


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (AWQ, awq_config(bits=3), "quantization_config: bits: expected 4, got 3"),
        (AWQ, awq_config(bits=None), "bits: expected 4, got None"),
        (AWQ, awq_config(bits=True), "bits: expected 4, got True"),
        (AWQ, awq_config(0), "group_size: expected a whole number >= 1, or -1, got 0"),
        (AWQ, awq_config(zero_point=False), "zero_point: expected True, got False"),
        (AWQ, awq_config(version="gemv"), "version: expected gemm, got 'gemv'"),
        (AWQ, awq_config(rotation="hadamard"), "rotation: the field is unknown and may change"),
        (GPTQ, gptq_config(bits=3), "bits: expected 4 or 8, got 3"),
        (GPTQ, gptq_config(group_size="x"), "group_size: expected a whole number"),
        (GPTQ, gptq_config(desc_act="x"), "desc_act: expected true or false"),
        (GPTQ, gptq_config(checkpoint_format="marlin"), "expected gptq or gptq_v2, got 'marlin'"),
        (
            GPTQ,
            gptq_config(dynamic={"+:.*": {"bits": 2}}),
            r"dynamic.\+:.\*: bits: expected 4 or 8",
        ),
        (
            GPTQ,
            gptq_config(dynamic={".*": {"rotation": 1}}),
            r"dynamic.\.\*: rotation: the field is",
        ),
        (GPTQ, gptq_config(dynamic={"+:.*": 8}), "dynamic: .*expected a table"),
        (GPTQ, gptq_config(dynamic={"-:(a+)+": {}}), "dynamic: expected patterns with at most 4"),
        (GPTQ, gptq_config(dynamic={"-:(a": {}}), r"dynamic: '-:\(a' is no pattern: missing"),
        (GPTQ, gptq_config(pack_dtype="int64"), "pack_dtype: expected int32"),
        (CompressedTensors, changed(INTEGERS, num_bits=3), "weights: num_bits: expected 4 or 8"),
        (CompressedTensors, changed(INTEGERS, type="x"), "type: expected int or float, got 'x'"),
        (CompressedTensors, changed(INTEGERS, type="float"), "num_bits: expected 8, got 4"),
        (CompressedTensors, changed(INTEGERS, strategy="block"), "strategy: expected group or"),
        (CompressedTensors, changed(INTEGERS, dynamic=True), "dynamic: the field is unknown"),
        (CompressedTensors, changed(INTEGERS, group_size=-5), "group_size: expected a whole"),
        (CompressedTensors, changed(INTEGERS, actorder="x"), "actorder: expected none or weight"),
        (CompressedTensors, INTEGERS | {"config_groups": {}}, "config_groups: expected at least"),
        (
            CompressedTensors,
            INTEGERS | {"config_groups": {"a": {"weights": {"num_bits": 8}, "targets": "Linear"}}},
            "config_groups.a: targets: expected a list of strings, got 'Linear'",
        ),
        (CompressedTensors, INTEGERS | {"config_groups": {"W4A16": ["Linear"]}}, "a table, got"),
        (CompressedTensors, INTEGERS | {"format": "marlin-24"}, "format: expected pack-quan"),
        (CompressedTensors, INTEGERS | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: ex"),
        (CompressedTensors, INTEGERS | {"transform_config": {"a": 1}}, "transform_config: expect"),
        (
            CompressedTensors,
            INTEGERS | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config.format: expected dense",
        ),
        (
            CompressedTensors,
            INTEGERS
            | {"config_groups": {"a": {"weights": {}, "input_activations": {"num_bits": 8}}}},
            "config_groups.a: input_activations: activations that are quantized are not supported, "
            "expected none, or dynamic eight bits, with only the weights quantized here; got "
            "{'num_bits': 8}",
        ),
        (AutoRound, auto_round_config(bits=2), "bits: expected 4 or 8, got 2"),
        (
            AutoRound,
            auto_round_config(packing_format="auto_round:auto_awq"),
            "packing_format: expected auto_round:auto_gptq or auto_round:gptq, got 'auto_round:au",
        ),
        (AutoRound, auto_round_config(data_type="mx_fp"), "data_type: expected int, got 'mx_fp'"),
        (AutoRound, auto_round_config(act_bits=8), "act_bits: expected 16 or 32, got 8"),
        (AutoRound, auto_round_config(super_bits=6), "super_bits: the field is unknown"),
        (
            AutoRound,
            auto_round_config(extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}}),
            r"extra_config.model.layers.0.mlp.up_proj: bits: expected 4 or 16, got 8",
        ),
        (
            AutoRound,
            auto_round_config(extra_config={"lm_head": {"group_size": 16}}),
            "extra_config.lm_head: group_size: expected 32, got 16",
        ),
        (AutoRound, auto_round_config(extra_config={"a": 4}), "extra_config.a: expected a table"),
    ],
)
def test_configs_that_mean_something_else_are_refused(kind, config, message):
    with pytest.raises(ModelError, match=message) as raised:
        build_scheme(kind, config)
    assert "config.json: quantization_config" in str(raised.value)


def test_a_matrix_without_a_config_is_refused():
    with pytest.raises(ValueError, match="config.json has no quantization_config of 'awq'"):
        build_scheme(AWQ).read(stored(MATRIX, checkpoints.awq(MATRIX)))
    assert build_scheme(AWQ).stored_bytes((8, 8)) is None


def test_awq_needs_rows_that_fill_words():
    with pytest.raises(ValueError, match="expected rows in multiples of 8, got 15"):
        build_scheme(AWQ, awq_config()).check(QuantizedWeight("awq", (15, 64), {}))
