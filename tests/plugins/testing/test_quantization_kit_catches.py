"""Quantisation schemes with one mistake each fail the rule that they break."""

from __future__ import annotations

import pytest
from support.broken import quantizations as broken
from support.kit_suites import assert_fails, each_broken, message_of, messages_of, suite_tests

from hardpoint.testing import QuantizationSuite

# component, test that it fails, rule, pattern of the message
SCHEMES = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.ReturnsNumbers, "quantize", "result", r"quantize returned torch.float32 \[2, 64\]"),
    (broken.Transposes, "quantize", "result", r"a matrix \(64, 64\), expected \(2, 64\)"),
    (broken.Dithers, "quantize", "deterministic", "a second call of quantize gave other numbers"),
    (broken.RoundsToSixteens, "quantize", "error", r"missed by 0\.\d+ of its norm, max_error is"),
    (broken.ScalesInPlace, "quantize", "unchanged", "quantize changed the weight"),
    (broken.HalfScales, "extremes", "finite", r"1e38 gave \d+ numbers that are not finite"),
    (broken.NeverZero, "extremes", "error", "zeros gave 1e-05"),
    (broken.SilentlyRefuses, "extremes", "errors", r"up to 1e38, raised ValueError\(''\)"),
    (broken.ForgetsTheSign, "read", "read", "what was read differs by 128, the largest"),
    (broken.ReadsInPlace, "read", "unchanged", "read changed the stored tensors"),
    (broken.LooksUp, "damage", "damage", "with codes missing, read raised KeyError: 'codes'"),
    (broken.RefusesWithoutNames, "damage", "damage", "'the stored matrix is damaged', which does"),
    (broken.TakesAnyDtype, "damage", "damage", "codes in torch.float64, read raised nothing"),
    (broken.TrustsScales, "damage", "damage", "with NaN scales, read raised nothing"),
    (broken.SaysNoAlignment, "parts", "parts", "alignment is None, expected a whole number"),
    (broken.CutsAnywhere, "parts", "parts", r"columns\(1, 64\) of 64 .* 32 raised nothing"),
    (broken.AssertsAlignment, "parts", "parts", r"columns\(1, 64\) .* raised AssertionError"),
    (broken.RowsFromTheStart, "parts", "parts", r"rows \d to 2 have other numbers than the same"),
    (broken.AllColumns, "parts", "parts", r"columns \d+ to \d+ are \(2, 64\), expected a matrix"),
    (broken.JoinsBackwards, "parts", "parts", "joined rows have other numbers"),
    (broken.SaysWiderGroups, "alignment", "alignment", r"alignment of \(2, 64\) is 64, .* 32"),
    (broken.SaysHalfGroups, "alignment", "alignment", "is 16, .*, which cannot be cut there: col"),
    (broken.SaysNothing, "alignment", "alignment", "alignment gave 0, expected a whole number"),
    (broken.ScaleOfTheRow, "parts_of_weights", "parts of weights", "columns, quantized alone, dif"),
    (broken.InHalf, "dequantize", "dequantize", r"dequantize returned torch.float16 \[2, 64\]"),
    (broken.SharesMemory, "dequantize", "dequantize", "writing to the numbers changed the matrix"),
    (broken.Doubts, "dequantize", "finite", "is_finite returned False for its numbers"),
    (broken.WideCodes, "dequantize", "codes", r"bits is 4, and there is a code 2\d\d"),
    (broken.ForgetsTheBias, "linear", "linear", r"linear differs by \d"),
    (broken.IgnoresOutDtype, "linear", "linear", "linear returned torch.bfloat16 .* torch.float32"),
    (broken.TransposesResults, "linear", "linear", r"returned strides \(1, 5\) for x \[5, 6"),
    (broken.FlattensSingleRows, "linear", "linear", r" \[2\] .*x \[1, 64\], expected .* \[1, "),
    (broken.EditsX, "linear", "unchanged", "linear changed x"),
    (broken.ReadsContiguousRows, "linear", "linear", r"linear differs by \d"),
    (broken.AddsTheBatch, "linear", "rows", "row 0 of 5 differs from the same row alone by"),
    (broken.CountsBits, "stored_bytes", "bytes", r"of \(2, 64\) is 1152, codes and scales"),
    (broken.SaysItReads, "layers", "layers", r"\w+ in one rank, torch.float32, differs|two ranks"),
]  # fmt: skip

ATTRIBUTES = {
    "max_error": 0.01,
    "shapes": broken.SHAPES,
    "samples": broken.samples,
    "batch_invariant": True,
}


@each_broken(SCHEMES)
def test_a_broken_scheme_fails_its_rule(cls, test, rule, pattern):
    assert_fails(QuantizationSuite, {"quantization": cls, **ATTRIBUTES}, test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Right, broken.Own])
def test_right_schemes_pass(cls):
    assert messages_of(QuantizationSuite, {"quantization": cls, **ATTRIBUTES}) == {}


def test_a_suite_without_anything_to_check_fails():
    message = message_of(QuantizationSuite, {"quantization": broken.Right}, "contract")
    assert "TestComponent has neither max_error nor samples" in message


def test_a_suite_has_to_have_a_matrix_that_two_ranks_can_cut():
    attributes = {"quantization": broken.Right, "max_error": 0.01, "shapes": [(4, 32)]}
    message = message_of(QuantizationSuite, attributes, "layers")
    assert "two ranks can divide the columns of no matrix of the suite" in message


def test_every_test_catches_a_scheme():
    assert {test for _, test, _, _ in SCHEMES} == suite_tests(QuantizationSuite)
