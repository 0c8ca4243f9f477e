"""Weights on their way to the model are read, quantised and cut by schemes, which may fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.broken import quantizations as schemes

from hardpoint import typed
from hardpoint.core.weights.quantized_weights import QuantizedWeights
from hardpoint.errors import PluginFaultError, PluginNotFoundError
from hardpoint.plugins import ConfigError, EngineConfig, ModelError, QuantizationContext
from hardpoint.plugins.component import Source
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.parallel import Cut, SingleRank
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight
from hardpoint.testing import load_ops
from hardpoint.testing.model.quantized_layers import build_layers

SHAPE = (4, 64)
SAMPLE = schemes.SAMPLE
SOURCE = Source(name="fake", value="acme:Fake", distribution="acme", version="1", origin="test")


def stream(cls=schemes.Right, *, use="auto", skip=(), model=None, cuts=None, find=None, whole=None):
    """Return a stream whose only scheme is `cls`, and the model that it loads."""
    model = model or build_layers(SHAPE, load_ops(torch.float32), SingleRank())
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    made = cls(QuantizationContext(name="fake", options=cls.Options(), **place))
    tree = {"model": "folder", "quantization": {"use": use, "skip": list(skip)}}
    config = typed.convert(tree, EngineConfig, path="")
    find = find or (lambda _: (made, SOURCE))
    return QuantizedWeights(config, model, cuts or {}, find, whole), model


def weights(stored=None):
    """Yield tensors; `stored` is that of all matrices."""
    generator = torch.Generator().manual_seed(0)
    for name in ("embed", "first", "second", "down"):
        drawn = torch.randn(SHAPE, generator=generator)
        yield f"{name}.weight", drawn if stored is None else stored
    for name in ("first", "second"):
        yield f"{name}.bias", torch.zeros(SHAPE[0])


def load(cls=schemes.Right, stored=None, **more):
    """Load a model; return its description, and the names that came as tensors."""
    passed, _ = stream(cls, **more)
    given = dict(passed.pass_on(weights(stored)))
    passed.check_used(passed.is_used)
    return passed.describe(), sorted(name for name in given if name.endswith("weight"))


def failing(error):
    """Return a scheme whose methods raise."""

    def fail(self, argument):
        raise error

    return type("Failing", (schemes.Right,), {"contract": 1, "quantize": fail, "read": fail})


def reading(matrix):
    """Return a scheme that gives something for each weight."""
    give = {"quantize": lambda self, _: matrix, "read": lambda self, _: matrix}
    return type("Giving", (schemes.Right,), {"contract": 1, **give})


class ReadsOnly(schemes.Right):
    contract = 1
    quantizes = False


def test_tensors_pass_unless_a_scheme_is_used():
    description, tensors = load()
    assert description is None
    assert len(tensors) == 4


def test_stored_matrices_stay_as_they_are():
    without = "4 of them dequantized to float32, because the operations have no kernel for them"
    assert load(stored=SAMPLE) == (f"4 in right, {without}", [])


def test_none_dequantises_stored_matrices():
    description, tensors = load(stored=SAMPLE, use="none")
    assert description == "4 in right dequantized"
    assert len(tensors) == 4


def test_a_scheme_quantises_tensors_and_stored_matrices():
    description, tensors = load(use="fake")
    assert description.startswith("4 in fake, 4 of them dequantized to float32")
    assert tensors == []
    description, tensors = load(stored=SAMPLE, use="fake")  # which is stored in another one
    assert description.startswith("4 in fake, ")
    assert description.endswith("4 in right dequantized")


def test_a_scheme_that_the_checkpoint_has_is_not_quantised_again():
    description, _ = load(stored=replace(SAMPLE, scheme="fake"), use="fake", cls=ReadsOnly)
    assert description.startswith("4 in fake")
    assert "right" not in description


def test_matrices_that_multiply_themselves_are_not_kept():
    description, _ = load(schemes.Own, use="fake")
    assert description == "4 in fake, not kept in the weight cache, for they multiply themselves"


def test_patterns_leave_weights_out():
    description, tensors = load(use="fake", skip=["embed.*", "second.weight"])
    assert tensors == ["embed.weight", "second.weight"]
    assert description.startswith("2 in fake")
    description, tensors = load(stored=SAMPLE, skip=["down*"])
    assert tensors == ["down.weight"]
    assert description.startswith("3 in right")
    assert description.endswith("1 in right dequantized")


def test_a_model_without_such_matrices_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"quantization\.use: 'fake' has no weights to quantize"):
        stream(use="fake", skip=["*"])


@pytest.mark.parametrize("use", ["auto", "fake"])
def test_a_pattern_that_matches_nothing_is_refused(use):
    message = r"quantization\.skip: 'frist\.\*' matches no weight of .*zed are embed.weight, f"
    with pytest.raises(ConfigError, match=message):
        stream(use=use, skip=["embed.*", "frist.*"])


def test_the_name_of_the_head_is_that_of_a_table_that_is_the_head():
    model = build_layers(SHAPE, load_ops(torch.float32), SingleRank())
    shapes = {name: (2, *shape[1:]) for name, shape in model.weight_shapes().items()}
    for head, found in (({}, None), ({"lm_head.weight": SHAPE}, "fake")):
        wide = {**shapes, "embed.weight": SHAPE, **head}
        model.weight_shapes = lambda wide=wide: wide
        passed, _ = stream(use="fake", skip=["lm_head.*"], model=model)
        assert passed.scheme_of("embed.weight", None) == found
        assert passed.scheme_of("first.weight", None) == "fake"


def test_stages_decide_together():
    whole = build_layers(SHAPE, load_ops(torch.float32), SingleRank())
    stage = build_layers(SHAPE, load_ops(torch.float32), SingleRank())
    shapes = {name: stage.weight_shapes()[name] for name in ("first.weight", "first.bias")}
    stage.weight_shapes, stage.quantizable = lambda: shapes, lambda: ["first.weight"]
    passed, _ = stream(ReadsOnly, use="fake", skip=["down.*"], model=stage, whole=whole)
    assert passed.whole_shapes == whole.weight_shapes()
    formats = {
        "embed.weight": WeightFormat("fake", 1, replace(SAMPLE, scheme="fake")),
        "first.weight": WeightFormat("float32", 1),
    }
    passed.check_stored(formats)
    with pytest.raises(ConfigError, match="'fake' does not quantize weights, and 'folder' has n"):
        passed.check_stored({name: WeightFormat("float32", 1) for name in formats})
    shapes = {"first.bias": (4,)}
    stage.quantizable = list
    for cls in (ReadsOnly, schemes.Right):
        passed, _ = stream(cls, use="fake", model=stage, whole=whole)
        list(passed.pass_on([("first.bias", torch.zeros(4))]))
        assert not passed.is_used
        passed.check_used(True)


def test_a_scheme_that_quantised_nothing_is_refused():
    passed, _ = stream(use="fake")
    with pytest.raises(ConfigError, match="'fake' has quantized no weight of 'folder'"):
        passed.check_used(passed.is_used)


def test_schemes_are_built_once_and_closed_once():
    closed = []
    cls = type(
        "Closing", (schemes.Right,), {"contract": 1, "close": lambda self: closed.append(self)}
    )
    passed, _ = stream(cls, use="fake")
    list(passed.pass_on(weights(replace(SAMPLE, scheme="fake"))))
    assert closed == []
    passed.close()
    passed.close()
    assert len(closed) == 1


def test_bytes_of_codes_are_not_those_of_other_matrices():
    members = {"contract": 1, "stored_bytes": lambda self, shape: 1}
    with pytest.raises(PluginFaultError, match=r"its stored_bytes\(\) is of codes, and its"):
        load(type("Own", (schemes.Own,), members), use="fake")
    description, _ = load(type("Own", (schemes.Own,), members | {"own_linear": True}), use="fake")
    assert description.startswith("4 in fake")


def test_a_required_scheme_has_to_be_there():
    with pytest.raises(ConfigError, match="'fake' does not quantize weights, and 'folder' has n"):
        load(ReadsOnly, use="fake")


@pytest.mark.parametrize("stored", [None, SAMPLE], ids=["quantize", "read"])
def test_what_a_scheme_refuses_names_the_weight_and_the_scheme(stored):
    cls = failing(ValueError("expected four wheels"))
    message = "model: weight 'embed.weight' of 'folder': fake: expected four wheels"
    with pytest.raises(ModelError, match=message):
        load(cls, stored=stored, use="auto" if stored else "fake")


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("blocks"), SystemExit(3)])
def test_other_errors_name_the_plugin_and_its_method(error):
    with pytest.raises(PluginFaultError, match=r"fake.*: its read\(\) failed for 'embed.weight': "):
        load(failing(error), stored=SAMPLE)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (None, "None, expected a QuantizedMatrix"),
        (torch.zeros(SHAPE), ".*expected a QuantizedMatrix"),
        (schemes.Numbers(torch.zeros(4, 32)), r".*expected a matrix of shape \(4, 64\)"),
    ],
)
def test_results_that_are_no_matrix_of_the_shape_name_the_plugin(matrix, expected):
    for more in ({"use": "fake"}, {"stored": SAMPLE}):
        method = "quantize" if "use" in more else "read"
        with pytest.raises(PluginFaultError, match=rf"its {method}\(\) gave {expected}"):
            load(reading(matrix), **more)


def test_dequantised_numbers_of_a_wrong_dtype_name_the_plugin():
    with pytest.raises(PluginFaultError, match=r"its dequantize\(\) gave .*float32 \[4, 64\]"):
        load(schemes.InHalf, stored=SAMPLE, use="none")


@pytest.mark.parametrize("cls", [schemes.Right, schemes.Own])
def test_numbers_that_are_not_finite_are_refused(cls):
    bad = {**SAMPLE.tensors, "scales": SAMPLE.tensors["scales"] * math.nan}
    with pytest.raises(ModelError, match="'embed.weight' of 'folder': fake: a scale or offset is"):
        load(cls, stored=replace(SAMPLE, tensors=bad))


def test_a_tensor_that_is_not_finite_is_not_quantised():
    passed, _ = stream(use="fake")
    items = [("embed.weight", torch.full(SHAPE, math.inf))]
    with pytest.raises(ModelError, match="numbers that are not finite, which 'fake' cannot quant"):
        list(passed.pass_on(items))


def test_a_stored_matrix_of_another_shape_is_refused():
    wide = {"codes": torch.zeros(4, 128, dtype=torch.int8), "scales": torch.zeros(4, 4)}
    stored = QuantizedWeight("right", (4, 128), wide)
    with pytest.raises(
        ModelError, match=r"has shape \(4, 128\) in 'right', QuantizedLayers needs \(4, 64\)"
    ):
        load(stored=stored)


def test_stored_matrices_are_cut_and_cuts_within_groups_are_refused():
    for cut, error in ((Cut(1, 32, 64), None), (Cut(0, 1, 3), None), (Cut(1, 16, 48), "16 to 48")):
        passed, model = stream(cuts={"down.weight": cut})
        taken = {}
        model.load_quantized = taken.__setitem__
        items = [("down.weight", SAMPLE)]
        if error is None:
            list(passed.pass_on(items))
            assert taken["down.weight"].shape == cut.shape(SHAPE)
        else:
            with pytest.raises(ModelError, match=f"'down.weight' of 'folder': fake: .*{error}"):
                list(passed.pass_on(items))


def test_a_rank_whose_columns_are_no_groups_is_refused():
    passed, _ = stream(schemes.Own, use="fake", cuts={"down.weight": Cut(1, 0, 48)})
    message = "'fake' has groups of 32 columns, which do not divide columns 0 to 48 of 64"
    with pytest.raises(ConfigError, match=message):
        list(passed.pass_on([("down.weight", torch.ones(4, 48))]))


def test_weights_that_the_model_does_not_have_are_passed_over():
    passed, _ = stream()
    assert list(passed.pass_on([("absent.weight", SAMPLE)])) == []


def raising(_self):
    raise RuntimeError("broken")


@pytest.mark.parametrize("more", [{"use": "fake"}, {"stored": SAMPLE}], ids=["made", "read"])
def test_a_matrix_whose_shape_raises_names_the_plugin(more):
    cls = schemes.own(shape=property(raising))
    with pytest.raises(PluginFaultError, match=r"'fake' .*its shape\(\) failed for 'embed.weight'"):
        load(cls, **more)


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        (property(raising), r"its alignment\(\) failed for 'down.weight': RuntimeError: broken"),
        (0, r"its alignment\(\) gave 0, expected a whole number >= 1, for 'down.weight'"),
    ],
)
@pytest.mark.parametrize("more", [{"use": "fake"}, {"use": "none", "stored": SAMPLE}])
def test_a_wrong_alignment_of_a_matrix_names_the_plugin(alignment, message, more):
    cls = schemes.own(alignment=alignment)
    with pytest.raises(PluginFaultError, match=message):
        load(cls, cuts={"down.weight": Cut(1, 0, 32)}, **more)


def declaring(given):
    """Return a scheme that declares before it reads where matrices can be cut."""
    members = {"contract": 1, "alignment": lambda self, shape, stored=None: given(stored)}
    return type("Declaring", (schemes.Right,), members)


def check(cls, *, stored=SAMPLE, **more):
    """Check what files store, "down" alone."""
    meta = replace(stored, tensors={n: t.to("meta") for n, t in stored.tensors.items()})
    passed, _ = stream(cls, **more)
    passed.check_stored({"down.weight": WeightFormat(stored.scheme, 9, True, meta)})


def test_cuts_within_groups_are_refused_before_weights_are_read():
    cls = declaring(lambda stored: 32 if stored is None else 8 * stored.tensors["scales"].shape[1])
    check(cls, cuts={"down.weight": Cut(1, 16, 48)})
    check(cls, cuts={"down.weight": Cut(0, 1, 3)})
    message = "'down.weight' of 'folder': right: columns 8 to 48 of 64 cannot be cut from blocks "
    with pytest.raises(ModelError, match=f"{message}of 16 .*fewer ranks"):
        check(cls, cuts={"down.weight": Cut(1, 8, 48)})
    check(cls, cuts={"down.weight": Cut(1, 8, 48)}, use="none")  # dequantises
    with pytest.raises(ConfigError, match="'fake' has groups of 32 columns, which do not divide c"):
        check(cls, cuts={"down.weight": Cut(1, 16, 48)}, use="fake")
    passed, _ = stream(cls, cuts={"down.weight": Cut(1, 16, 48)}, use="fake")
    with pytest.raises(ConfigError, match="'fake' has groups of 32 columns"):
        passed.check_stored({})  # not known


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda _: 0, r"gave 0, expected a whole number >= 1, for 'down.weight'"),
        (raising, r"failed for 'down.weight': RuntimeError: broken"),
    ],
)
def test_a_scheme_with_a_wrong_alignment_is_named(given, message):
    with pytest.raises(PluginFaultError, match=rf"'fake' .*its alignment\(\) {message}"):
        check(declaring(given), cuts={"down.weight": Cut(1, 0, 32)})


def test_schemes_that_are_not_there_are_named_with_the_weight():
    def absent(name):
        raise PluginNotFoundError(f"the loader 'acme' says that it is stored in {name!r}")

    passed, _ = stream(find=absent)
    message = "model: weight 'down.weight' of 'folder': the loader 'acme' says that it .* 'right'"
    formats = {"down.weight": WeightFormat("right", 9, True)}
    with pytest.raises(ModelError, match=message):
        passed.check_stored(formats)
    with pytest.raises(ModelError, match=message):
        list(passed.pass_on([("down.weight", SAMPLE)]))


def test_a_norm_is_no_matrix_that_may_have_few_bits():
    passed, _ = stream()
    message = r"'first.bias' of 'folder' is stored in 'right', but it is no matrix .* shape \(4,\)"
    with pytest.raises(ModelError, match=message):
        list(passed.pass_on([("first.bias", SAMPLE)]))
    with pytest.raises(ModelError, match=message):
        passed.check_stored({"first.bias": WeightFormat("right", 9, True, SAMPLE)})


def test_weights_that_came_are_counted_not_those_declared():
    passed, _ = stream()
    passed.check_stored({name: WeightFormat("q2_k", 9) for name, _ in weights()})
    assert passed.describe() is None
    list(passed.pass_on([("embed.weight", torch.zeros(SHAPE)), ("down.weight", SAMPLE)]))
    assert passed.describe().startswith("1 in right")
    assert passed.describe().endswith("1 in q2_k dequantized")


def test_faults_show_no_numbers_of_tensors():
    with pytest.raises(PluginFaultError) as caught:
        load(reading(SAMPLE), stored=SAMPLE)
    text = "QuantizedWeight('right', (4, 64), {'codes': torch.int8 [4, 64], 'scales': torch.float32"
    assert f"its read() gave {text} [4, 2]}}), expected a QuantizedMatrix, for" in str(caught.value)


def multiplying(product):
    """Return a scheme whose matrices multiply themselves by a function of x and W."""

    def linear(self, bias, out_dtype):
        weight = self.weight
        return lambda x: product(x, weight) if bias is None else product(x, weight) + bias

    return schemes.own(linear=linear)


def results(cls):
    passed, model = stream(cls, use="fake")
    model.load_weights(passed.pass_on(weights()))
    return model.results()


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (lambda x, w: (x @ w.T).double(), r"gave a torch.float64 .*expected torch.float32 \[4, 4"),
        (lambda x, w: x[:, : len(w)].T[:1], r"gave .* \[1, 4\] .*expected torch.float32 \[4, 4\]"),
        (lambda x, w: (x @ w.T).to("meta"), r"gave .* on meta\), expected .* on cpu, for 'down.w"),
        (lambda x, w: None, r"gave None, expected torch.float32 \[4, 4\] on cpu, for 'down.weight"),
        (lambda x, w: {}[3], r"failed for 'down.weight': KeyError: 3"),
        (lambda x, w: x @ w, r"failed for 'down.weight': RuntimeError: mat1 and mat2"),
    ],
)  # fmt: skip
def test_products_that_fail_or_give_something_else_name_the_scheme(product, message):
    passed, model = stream(multiplying(product), use="fake", skip=["embed*", "first*", "second*"])
    model.load_weights(passed.pass_on(weights()))
    with pytest.raises(PluginFaultError, match=rf"fake.*: its linear\(\) {message}"):
        model.results()


def test_rows_of_products_are_made_contiguous():
    class Transposed(schemes.Numbers):
        def linear(self, bias, out_dtype):
            weight, given = self.weight, 0 if bias is None else bias.unsqueeze(1)
            return lambda x: (weight @ x.T + given).T

    transposed = type("Other", (schemes.Own,), {"contract": 1, "matrix": Transposed})
    passed, model = stream(transposed, use="fake")
    taken = {}
    model.load_quantized = taken.__setitem__
    list(passed.pass_on(weights()))
    multiply = taken["down.weight"].linear(None, torch.float32)
    assert multiply(torch.ones(3, 64)).is_contiguous()


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        (lambda self, bias, out_dtype: 7, "gave 7, expected a function, or None, for 'down.wei"),
        (lambda self, bias, out_dtype: 1 / 0, "failed for 'down.weight': ZeroDivisionError"),
        (lambda self, bias, out_dtype: int("x"), "failed for 'down.weight': ValueError"),
    ],
)
def test_a_linear_that_fails_or_is_no_function_names_the_scheme(linear, message):
    with pytest.raises(PluginFaultError, match=rf"fake.*: its linear\(\) {message}"):
        results(schemes.own(linear=linear))


def test_a_matrix_whose_linear_is_none_is_dequantised_and_checked():
    found = results(schemes.own(linear=lambda self, bias, out_dtype: None))
    for what, expected in results(schemes.Own).items():
        torch.testing.assert_close(found[what], expected, rtol=1e-4, atol=1e-4)
    message = r"its dequantize\(\) gave .*expected torch.float32 \[4, 64\], for 'embed.weight'"
    with pytest.raises(PluginFaultError, match=message):
        results(schemes.InHalf)


@pytest.mark.parametrize("stored", [None, SAMPLE], ids=["quantize", "read"])
def test_codes_that_do_not_fit_their_bits_name_the_plugin(stored):
    codes = torch.zeros(SHAPE, dtype=torch.uint8)
    codes[3, 63] = 16
    cls = reading(AffineCodes(codes, 4, 32, torch.ones(4, 2)))
    method = "quantize" if stored is None else "read"
    message = rf"its {method}\(\) gave 16, expected codes of 4 bits, at most 15, for 'embed.weight'"
    with pytest.raises(PluginFaultError, match=message):
        load(cls, stored=stored, use="fake" if stored is None else "auto")
