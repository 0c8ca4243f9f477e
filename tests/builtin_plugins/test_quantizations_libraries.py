"""FP8, bitsandbytes and others: files of their libraries, as the libraries dequantize them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.builtins import library_checkpoints as libraries
from support.builtins.quantized_checkpoints import build_scheme, integers_config

from hardpoint.builtin_plugins.quantizations.bitsandbytes import BitsAndBytes
from hardpoint.builtin_plugins.quantizations.compressed_tensors import CompressedTensors
from hardpoint.builtin_plugins.quantizations.fp8 import FP8
from hardpoint.builtin_plugins.quantizations.torchao import TorchAO
from hardpoint.plugins import ModelError
from hardpoint.plugins.quantization import AffineCodes, DenseMatrix, QuantizedWeight
from hardpoint.testing.model.quantization_rules import num_bytes

SCHEMES = {
    "transformers": FP8,
    "compressed_tensors": CompressedTensors,
    "bitsandbytes": BitsAndBytes,
    "torchao": TorchAO,
}
CASES = {f"{name}: {c.name}": (name, c) for name in SCHEMES for c in libraries.read(name)}
INTEGERS = [key for key in CASES if key.startswith("torchao: int")]
CODES = {"bitsandbytes: int8", "compressed_tensors: int8 row", *INTEGERS}


def stored(case, **changes):
    tensors = {k: t for k, t in (case.tensors | changes).items() if t is not None}
    return QuantizedWeight("any", tuple(case.numbers.shape), tensors, "model.m.weight")


def scheme_of(key, **fields):
    library, case = CASES[key]
    return build_scheme(SCHEMES[library], case.config | fields), case


@pytest.mark.parametrize("key", CASES)
def test_what_a_library_wrote_is_read_as_it_dequantises_it(key):
    scheme, case = scheme_of(key)
    outline = {name: tensor.to("meta") for name, tensor in case.tensors.items()}
    scheme.check(stored(case, **outline))
    matrix = scheme.read(stored(case))
    rounding = 2e-7 if "zeros" in key else 0  # offsets are rounded apart
    assert torch.allclose(matrix.dequantize(), case.numbers, rtol=3e-7, atol=rounding)
    assert isinstance(matrix, AffineCodes if key in CODES else DenseMatrix)
    assert torch.equal(matrix.columns(0, 32).dequantize(), matrix.dequantize()[:, :32])
    if key in CODES:
        assert scheme.stored_bytes(matrix.shape) == pytest.approx(num_bytes(matrix), rel=0.05)
    if key in INTEGERS and "groups" not in key:
        assert matrix.bits == (4 if "int4" in key else 8)


@pytest.mark.nightly
@pytest.mark.parametrize("library", SCHEMES)
def test_the_files_are_what_the_libraries_write(library):
    pytest.importorskip(library)
    written = {case.name: case for case in libraries.LIBRARIES[library]()}
    for case in libraries.read(library):
        other = written.pop(case.name)
        assert other.config == case.config
        assert torch.equal(other.numbers, case.numbers)
        assert other.tensors.keys() == case.tensors.keys()
        for name, tensor in case.tensors.items():
            same = other.tensors[name].reshape(-1).view(torch.uint8)
            assert torch.equal(same, tensor.reshape(-1).view(torch.uint8))
    assert not written


@pytest.mark.parametrize("how", ["cut", "dtype", "missing", "unknown"])
@pytest.mark.parametrize("key", CASES)
def test_wrong_tensors_are_named_by_their_headers(key, how):
    scheme, case = scheme_of(key)
    for last, tensor in case.tensors.items():
        if how == "cut":
            if not tensor.dim() or last.startswith("bitsandbytes__"):
                continue  # a shorter text is no header's fault
            changes = {last: tensor[:-1].to("meta")}
        elif how == "dtype":
            changes = {last: torch.empty(tensor.shape, dtype=torch.int16, device="meta")}
        elif how == "missing":
            if last in ("weight_format", "_weight_zero_point"):
                continue
            changes = {last: None}
        else:
            changes = {"input_scale": torch.empty(1, device="meta")}
        wrong = stored(case, **changes)
        match = f"'?{min(changes)}"
        if changes == {"weight_packed": None} or changes == {"weight_scale_inv": None}:
            match = "missing"
        for call in (scheme.check, scheme.read):
            with pytest.raises(ValueError, match=match):
                call(wrong)


FLOATS = [key for key in CASES if ": float" in key or key.startswith("transformers")]


@pytest.mark.parametrize("key", FLOATS)
def test_numbers_that_are_not_finite_are_refused(key):
    scheme, case = scheme_of(key)
    codes = min(case.tensors.keys() & {"weight", "_weight_qdata"})
    (scale,) = case.tensors.keys() - {codes}
    scales = case.tensors[scale].clone()
    scales.view(-1)[-1] = math.nan
    with pytest.raises(ValueError, match="the scales have numbers that are not finite"):
        scheme.read(stored(case, **{scale: scales}))
    numbers = case.tensors[codes].clone()
    numbers.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(ValueError, match="the weight has numbers that are not finite"):
        scheme.read(stored(case, **{codes: numbers}))


def test_scales_of_fp8_by_other_names_and_shapes():
    scheme, case = scheme_of("transformers: matrix")
    scale = case.tensors["weight_scale_inv"]
    for shape in ((), (1,), (1, 1)):
        other = stored(case, weight_scale=scale.reshape(shape), weight_scale_inv=None)
        assert torch.equal(scheme.read(other).dequantize(), case.numbers)
    rows = torch.linspace(0.1, 0.2, len(case.numbers)).bfloat16()
    expected = case.tensors["weight"].float() * rows.float()[:, None]
    for shape in ((-1,), (-1, 1)):
        other = stored(case, weight_scale_inv=rows.reshape(shape))
        assert torch.equal(scheme.read(other).dequantize(), expected)


def state(change):
    """A state of nf4 with other fields; of a text, that text."""
    text = change
    if not isinstance(change, str):
        _, case = CASES["bitsandbytes: nf4 nested"]
        fields = json.loads(bytes(case.tensors["bitsandbytes__nf4"].tolist()))
        text = json.dumps(fields | change)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocksize": 32}, "blocksize: expected 64, got 32"),
        ({"blocksize": "64"}, "blocksize: expected 64, got '64'"),
        ({"shape": [100, 18]}, r"shape: expected \[18, 100\], got \[100, 18\]"),
        ({"nested_blocksize": 128}, "nested_blocksize: expected 256, got 128"),
        ({"nested_offset": None}, "nested_offset: expected a number, got None"),
        ({"nested_offset": math.nan}, "nested_offset: expected a number, got nan"),
        ("{", "bitsandbytes__nf4: expected a table as JSON: Expecting"),
        ("[" * 4000, "bitsandbytes__nf4: expected a table as JSON"),
        ("3", "bitsandbytes__nf4: expected a table as JSON, got 3"),
        ("3" * 4097, r"bitsandbytes__nf4: expected uint8 \[4096\]"),
    ],
)
def test_a_wrong_state_of_bitsandbytes_is_refused(change, message):
    scheme, case = scheme_of("bitsandbytes: nf4 nested")
    with pytest.raises(ValueError, match=message):
        scheme.read(stored(case, bitsandbytes__nf4=state(change)))


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("nf4", {"quant_map": torch.full((16,), math.inf)}, "quant_map: .* not finite"),
        ("nf4", {"absmax": torch.full((16,), math.nan)}, "the scales .* not finite"),
        ("nf4 nested", {"nested_absmax": torch.full((1,), math.nan)}, "the scales .* not finite"),
        ("int8", {"SCB": torch.full((16,), math.nan)}, "the scales .* not finite"),
        (
            "int8",
            {"weight_format": torch.tensor(2, dtype=torch.uint8)},
            "weight_format: expected 0, rows one after the other, got 2",
        ),
    ],
)
def test_wrong_content_of_bitsandbytes_is_refused(key, changes, message):
    scheme, case = scheme_of(f"bitsandbytes: {key}")
    with pytest.raises(ValueError, match=message):
        scheme.read(stored(case, **changes))


FLOAT = integers_config(type="float", num_bits=8, strategy="tensor", symmetric=True)


def floats(**fields):
    group = FLOAT["config_groups"]["group_0"]
    group = group | {"format": "float-quantized", "weights": group["weights"] | fields}
    return FLOAT | {"format": "float-quantized", "config_groups": {"group_0": group}}


def ao(**fields):
    config = {"_type": "IntxWeightOnlyConfig", "_version": 2}
    config["_data"] = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}} | fields
    return {"quant_method": "torchao", "quant_type": {"default": config}}


PACKED = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}
COLUMN = {"_type": "PerAxis", "_data": {"axis": 1}}


BYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (FP8, BLOCKS | {"activation_scheme": "static"}, "activation_scheme: expected dynamic, got"),
        (FP8, BLOCKS | {"fmt": "e5m2"}, "fmt: expected e4m3 or float8_e4m3fn, got 'e5m2'"),
        (FP8, BLOCKS | {"scale_fmt": "x"}, "scale_fmt: expected float or ue8m0, got 'x'"),
        (FP8, BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype: expected fp8, got 'fp4'"),
        (FP8, BLOCKS | {"weight_block_size": 128}, "weight_block_size: expected two whole numbers"),
        (FP8, BLOCKS | {"weight_block_size": [0, 1]}, "two whole numbers >= 1, got .0, 1."),
        (FP8, BLOCKS | {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: the field is unknown"),
        (CompressedTensors, floats(num_bits=4), "weights: num_bits: expected 8, got 4"),
        (CompressedTensors, floats(symmetric=False), "symmetric: expected True, got False"),
        (CompressedTensors, floats(strategy="group"), "strategy: expected tensor or channel or bl"),
        (CompressedTensors, floats(strategy="block"), "block_structure: missing, the strategy 'bl"),
        (CompressedTensors, floats(actorder="group"), "actorder: expected none, got 'group'"),
        (BitsAndBytes, BYTES | {"load_in_8bit": True}, "or load_in_8bit to be true, got both True"),
        (BitsAndBytes, BYTES | {"load_in_4bit": False}, "or load_in_8bit to be true, got both Fal"),
        (BitsAndBytes, BYTES | {"bnb_4bit_quant_type": "int4"}, "quant_type: expected nf4 or fp4"),
        (BitsAndBytes, BYTES | {"bnb_4bit_quant_storage": "bfloat16"}, "storage: expected uint8"),
        (
            TorchAO,
            ao() | {"quant_type": {"default": PACKED}},
            "_type: expected Int8WeightOnlyConfig",
        ),
        (
            TorchAO,
            ao() | {"quant_type": {"re:a": PACKED}},
            "quant_type: expected the table defa",
        ),
        (TorchAO, ao() | {"quant_type": "int4_weight_only"}, "quant_type: expected a table"),
        (TorchAO, ao() | {"quant_type_kwargs": {"a": 1}}, "quant_type_kwargs: expected {}, got"),
        (TorchAO, ao(weight_dtype={"_data": "int1"}), "weight_dtype: expected int2 or int3"),
        (TorchAO, ao(granularity=COLUMN), "granularity: axis: expected 0, got 1"),
        (
            TorchAO,
            ao(granularity={"_type": "PerBlock"}),
            "granularity: _type: expected PerG",
        ),
        (TorchAO, ao(granularity={"_type": "PerGroup"}), "granularity: group_size: expected"),
        (BitsAndBytes, BYTES | {"rotation": 1}, "rotation: the field is unknown"),
    ],
)
def test_configs_that_mean_something_else_are_refused_by_name(kind, config, message):
    with pytest.raises(ModelError, match=message) as raised:
        build_scheme(kind, config)
    assert "config.json: quantization_config" in str(raised.value)


def test_weights_alone_are_read_where_activations_are_dynamic_and_not_where_they_are_static():
    settings = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    for activations in (settings, settings | {"dynamic": False}, settings | {"num_bits": 4}):
        config = floats(dynamic=False)
        group = config["config_groups"]["group_0"] | {"input_activations": activations}
        config["config_groups"] = {"group_0": group}
        if activations is settings:
            assert isinstance(build_scheme(CompressedTensors, config), CompressedTensors)
            continue
        with pytest.raises(
            ModelError, match="input_activations: .* expected none, or dynamic eight bits"
        ):
            build_scheme(CompressedTensors, config)


def test_numbers_of_torchao_that_four_bits_do_not_hold_are_refused():
    scheme, case = scheme_of("torchao: int4 zeros")
    for last in ("_weight_qdata", "_weight_zero_point"):
        wrong = torch.full_like(case.tensors[last], 8)
        with pytest.raises(ValueError, match=f"{last}: expected numbers of 4 bits, -8 to 7, got 8"):
            scheme.read(stored(case, **{last: wrong}))
    without = scheme.read(stored(case, _weight_zero_point=None)).dequantize()
    scales = case.tensors["_weight_scale"].repeat_interleave(32, 1)
    assert torch.allclose(without, case.tensors["_weight_qdata"] * scales)
