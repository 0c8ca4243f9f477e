"""Requests that taps refuse, and taps that fail: one request ends, by name of the cause."""

from __future__ import annotations

import re

import pytest
from support.adapters import write_model
from support.plugins.tapping import TAPS

from hardpoint import LLM, ConfigError, PoolingParams, RequestError, SamplingParams
from hardpoint.testing import scripted_config

SETTINGS = {"plugins": TAPS, "kv_cache": {"num_blocks": 64}}
SOURCE = r"plugin 'faulty' \(.*support.plugins.tapping:Faulty\).*: "
FAULTS = {
    "raises": SOURCE + r"its read\(\) failed: KeyError: 'direction'",
    "short": SOURCE + r"its read\(\) gave \[\d+, 64\], expected \[\d+, ...\]",
    "no tensor": SOURCE + r"its read\(\) gave int, expected a tensor",
    "reads in place": SOURCE + r"its read\(\) changed its values in place, expected a new tensor",
    "grows": SOURCE
    + r"its read\(\) gave torch.float32 \[3\] for a position, expected torch.float32 \[2\]",
    "nan": SOURCE + r"its change\(\) gave numbers that are not finite",
    "exits raises": SOURCE + r"its exits\(\) failed: KeyError: 'threshold'",
    "exits by number": SOURCE
    + r"its exits\(\) gave torch.float32 \[\d+\], expected torch.bool \[\d+\]",
    "narrow": SOURCE + r"its change\(\) gave \[\d+, 3\], expected \[\d+, 64\]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taps") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["", "ahead"])
def llm(folder, request):
    """Also an LLM with overlapping steps, with the failed requests."""
    ahead = {"scheduler": {"asynchronous": request.param}}
    with LLM(str(folder), config=SETTINGS | ahead, max_model_len=64) as llm:
        yield llm


def params_of(**plugin_args):
    return SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, plugin_args=plugin_args)


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_ends_its_request_alone(llm, how):
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    others = [params_of(), params_of(faulty={"how": "fine"}), params_of(raw={"layers": [1]})]
    expected = llm.generate(prompts, others)
    *outputs, failed = llm.generate([*prompts, [1, 2]], [*others, params_of(faulty={"how": how})])
    assert failed.outputs[0].finish_reason == "error"
    assert re.search(FAULTS[how], failed.outputs[0].error)
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        arrays, before = output.outputs[0].part_arrays, other.outputs[0].part_arrays
        assert (arrays is None) == (before is None)
        for name, array in (arrays or {}).get("activation_taps", {}).items():
            assert (array.values == before["activation_taps"][name].values).all()


def test_requests_may_have_rows_of_different_forms(llm):
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    # With the last one, the tap is called for each on its own.
    hows = ["fine", "squares", "raises"]
    fine, squares, raises = llm.generate(prompts, [params_of(faulty={"how": how}) for how in hows])
    arrays = fine.outputs[0].part_arrays["activation_taps"]["faulty/0/layer_output"]
    assert arrays.values.shape == (7, 2)
    assert re.search(
        SOURCE + r"its read\(\) gave torch.float32 \[1\] for a position, expected torch.float32 "
        r"\[4\], as for earlier positions",
        squares.outputs[0].error,
    )
    assert "KeyError: 'direction'" in raises.outputs[0].error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"raw": {"layers": [3]}}, r"plugin_args.raw: expected layers in 0..2, which .* got 3"),
        ({"raw": {"layers": [0, 0]}}, r"'raw'.*its sites gave .*, expected TapSites, at least"),
        ({"raw": {"layers": "x"}}, r"plugin_args.raw.layers: expected"),
        ({"add": {}}, r"plugin_args.add"),
        ({"add": {"strength": 1, "place": "logits"}}, r"its sites gave .*TapSite\(layer=1"),
        ({"faulty": {"how": "sites"}}, r"'faulty'.*its sites failed: KeyError"),
        ({"faulty": {"how": "no sites"}}, r"'faulty'.*its sites gave \[\], expected TapSites"),
    ],
)
def test_bad_arguments_are_refused(llm, args, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2]], params_of(**args))
    assert llm.generate([[1, 2]], params_of())[0].outputs[0].finish_reason == "length"


def test_requests_that_pool_have_no_taps(llm):
    params = PoolingParams(plugin_args={"raw": {}})
    with pytest.raises(
        RequestError, match=r"plugin_args.raw: expected none, because the request pool"
    ):
        llm.embed([[1, 2]], params)


def test_more_than_a_request_may_read(folder):
    config = SETTINGS | {"plugin": {"activation_taps": {"max_bytes": 4096}}}
    with LLM(str(folder), config=config, max_model_len=64) as llm:
        few, many = llm.generate(
            [[1, 2], [3, 4, 5]], [params_of(places={}), params_of(raw={"layers": [0, 1]})]
        )
        assert few.outputs[0].finish_reason == "length"
        assert many.outputs[0].finish_reason == "error"
        assert "'raw'" in many.outputs[0].error
        assert "more than 4096 bytes of the request (plugin.activation_taps.max_bytes); read" in (
            many.outputs[0].error
        )


def test_stages_are_refused_by_name(folder):
    config = SETTINGS | {
        "executor": {"use": "multiproc"},
        "parallel": {"pipeline": 2},
    }
    message = (
        r"parallel.pipeline: expected 1 with activation taps \(raw, places, add, leave, faulty\)"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), config=config, max_model_len=64)


def test_a_model_without_the_hook_is_refused_by_name(scripted):
    config = scripted_config(scripted)
    config["plugins"]["enable"] += TAPS["enable"]
    message = r"'activation_taps'.*it changes what layers add, and plugin 'Scripted.* does not call"
    with pytest.raises(Exception, match=message):
        LLM(config=config)
