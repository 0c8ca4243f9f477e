"""vLLM's KV connectors as KV connectors of an engine."""

import importlib.util
import re
import sys

import numpy as np
import pytest
import torch
from hardpoint_vllm.connectors.encoding import Encoding
from hardpoint_vllm.stand_ins import stand_ins

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError
from hardpoint.testing import scripted_config
from hardpoint.vllm import LLM as VLLM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)

with stand_ins():
    import vllm_connecting

HERE = "vllm_connecting"
PROMPT = "What was computed once need not be computed again."
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BLOCK_SIZE = 4


def config_with(model, folder, name="FolderConnector", **extra):
    """Return a configuration of an engine that stores blocks in a folder."""
    folder.mkdir(exist_ok=True)
    options = {"extra_config": {"path": str(folder)}}
    plugin = {snake_case(name): options}
    settings = {
        "plugins": {"enable": ["vllm"]},
        "kv_cache": {"block_size": BLOCK_SIZE, "num_blocks": 140},
        "kv_connector": {"use": f"{HERE}:{name}"},
        "plugin": plugin,
        **extra,
    }
    return scripted_config(model, settings)


def snake_case(name):
    """Return `FolderConnector` as `folder_connector`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def output_of(llm, prompt=PROMPT):
    """Return the number of cached tokens, and the tokens."""
    (output,) = llm.generate([prompt], PARAMS)
    return output.num_cached_tokens, output.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(scripted):
    """The tokens of an engine without a connector."""
    with LLM(config=scripted_config(scripted)) as llm:
        return output_of(llm)[1]


@pytest.mark.parametrize("name", ["FolderConnector", "BetweenSteps"])
@pytest.mark.parametrize("in_process", [True, False])
def test_another_engine_loads_the_blocks(scripted, tmp_path, expected, name, in_process):
    config = config_with(scripted, tmp_path / "kept", name, engine={"in_process": in_process})
    results = []
    for _ in range(2):
        with LLM(config=config) as llm:
            results.append(output_of(llm))
            assert not llm.plugins.health().fallbacks
    assert results == [(0, expected), (48, expected)]


def test_loads_between_steps_report_to_the_scheduler(scripted, tmp_path, expected):
    config = config_with(scripted, tmp_path / "kept", "BetweenSteps")
    vllm_connecting.BetweenSteps.outputs.clear()
    for _ in range(2):
        with LLM(config=config) as llm:
            assert output_of(llm)[1] == expected
    (output,) = vllm_connecting.BetweenSteps.outputs
    (request_id,) = output.finished_recving
    assert output.kv_connector_worker_meta == vllm_connecting.Done((request_id,))
    assert output.finished_sending == output.invalid_block_ids == set()


def test_a_failed_load_is_computed(scripted, tmp_path, expected):
    config = config_with(scripted, tmp_path / "kept")
    with LLM(config=config) as llm:
        output_of(llm)
    (folder,) = (tmp_path / "kept").iterdir()
    for file in folder.iterdir():
        file.unlink()
    with LLM(config=config) as llm:
        assert output_of(llm)[1] == expected
    assert list(folder.iterdir()) == []


def test_preempted_requests_and_many_prompts(scripted, tmp_path):
    prompts = [f"{PROMPT} {'again ' * (index % 5)}" for index in range(12)]
    with LLM(config=scripted_config(scripted)) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    config = config_with(scripted, tmp_path / "kept")
    for _ in range(2):
        with LLM(config=config) as llm:
            outputs = llm.generate(prompts, PARAMS)
            assert [output.outputs[0].token_ids for output in outputs] == tokens
            assert not llm.plugins.health().fallbacks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PartialBlocks", "get_num_new_matched_tokens: expected whole blocks of 4 tokens, got 46"),
        ("ReadsStatus", "the Request given to KV connectors of vLLM has no 'status'"),
        ("SendsLock", "metadata.lock: expected plain data, arrays, tensors, .* got lock"),
    ],
)
def test_a_fault_is_counted_and_the_prompt_computed(scripted, tmp_path, expected, name, message):
    config = config_with(scripted, tmp_path / "kept", name)
    with LLM(config=config) as llm:
        assert output_of(llm)[1] == expected
        (fault,) = llm.plugins.health().fallbacks.values()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(fault.message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeedsPool", "its bind_gpu_block_pool has no counterpart: the block pool is not shared"),
        ("NeedsLayout", "get_required_kvcache_layout: expected None, got 'HND'"),
        ("Unfinished", "it lacks build_connector_meta, get_num_new_matched_tokens"),
    ],
)
def test_a_class_that_cannot_run_stops_the_start(scripted, tmp_path, name, message):
    with pytest.raises(HardpointError, match=message):
        LLM(config=config_with(scripted, tmp_path / "kept", name))


def test_programs_name_a_connector_by_its_module(scripted, tmp_path, expected):
    (tmp_path / "kept").mkdir()
    arguments = {
        "block_size": BLOCK_SIZE,
        "kv_transfer_config": {
            "kv_connector": "FolderConnector",
            "kv_connector_module_path": HERE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": str(tmp_path / "kept")},
        },
        "hardpoint_config": scripted_config(scripted),
    }
    for _ in range(2):
        with VLLM(str(scripted), **arguments) as llm:
            assert output_of(llm.native)[1] == expected
    assert llm.native.config.kv_connector.use == f"{HERE}:FolderConnector"


def test_metadata_survives_encoding():
    encoding = Encoding(HERE)
    slots = torch.arange(6).reshape(2, 3)
    meta = vllm_connecting.Jobs([vllm_connecting.Job("r", "f", slots, True)])
    meta.more = {"set": {1}, 2: (None, 1.5, b"x"), "kind": vllm_connecting.KVConnectorRole.WORKER}
    meta.array, meta.number = np.ones((2, 0), dtype=np.float32), np.int64(3)
    decoded = encoding.decode(encoding.encode(meta, "metadata"))
    assert type(decoded) is vllm_connecting.Jobs
    assert decoded.jobs[0].slots.equal(slots)
    assert decoded.more == meta.more
    assert (decoded.array.shape, decoded.array.dtype, decoded.number) == ((2, 0), np.float32, 3)


def test_classes_of_other_packages_are_not_imported():
    encoded = {"object": ["subprocess:Popen", {}]}
    with pytest.raises(TypeError, match="expected a class of hardpoint_vllm, .* got subprocess"):
        Encoding(HERE).decode(encoded)
    assert "vllm" not in sys.modules
