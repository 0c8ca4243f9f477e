"""Weights that change between steps: the tokens, the versions of each, and what is refused."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import write_model, write_two_models
from support.internals import engine_of
from support.waiting import PATIENCE_S, wait_until

from hardpoint import LLM, HardpointError, ModelError, RequestError, SamplingParams
from hardpoint.plugins import EngineCoreRequest, Model
from hardpoint.plugins.requests import ResumedOutputs, WeightRun

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=1)
PROMPTS = [[3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 6, [1, 6, 1, 8, 0, 3]]
SETTINGS = {
    "kv_cache": {"num_blocks": 64, "block_size": 16},
    "scheduler": {"max_num_seqs": 6},
    "weight_cache": {"path": "off"},
}
PROJECTION = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of two models that differ in their weights."""
    return write_two_models(tmp_path_factory.mktemp("weights"))


def opened(folder, **settings):
    return LLM(str(folder), config=SETTINGS | settings, max_model_len=128)


def results(llm, prompts=PROMPTS):
    """The tokens and logprobs of prompts."""
    found = llm.generate(prompts, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in found]


@pytest.fixture(scope="module")
def expected(folders):
    found = []
    for folder in folders:
        with opened(folder) as llm:
            found.append(results(llm))
    assert found[0] != found[1]
    return found


def file_of(folder):
    return folder / "model.safetensors"


def runs(output):
    return [(run.start, run.version, run.kv_version) for run in output.outputs[0].weight_runs or ()]


@pytest.mark.parametrize("given", ["file", "folder", "tensors"])
def test_an_updated_engine_is_one_of_the_new_weights(folders, expected, given):
    first, second = folders
    weights = {"file": file_of(second), "folder": second, "tensors": load_file(file_of(second))}
    with opened(first) as llm:
        for _ in range(4):  # steps are recorded by now
            assert results(llm) == expected[0]
        assert llm.weights.update(weights[given]) == "1"
        for _ in range(4):
            assert results(llm) == expected[1]
        assert llm.weights.update(file_of(first), version="back") == "back"
        assert results(llm) == expected[0]
        assert llm.engines.scheduler_stats().weight_version == "back"
        llm.sleep(2)
        llm.wake_up()
        assert results(llm) == expected[0]


def test_some_tensors_are_enough_and_later_ones_win(folders, expected, tmp_path):
    first, second = folders
    tensors = load_file(file_of(second))
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, tmp_path / "some.safetensors")
    with opened(first) as llm:
        llm.weights.update(tmp_path / "some.safetensors")
        changed = results(llm)
        assert changed not in expected
        llm.weights.update({name: tensors[name] for name in names[5:]})
        assert results(llm) == expected[1]
        load = engine_of(llm).parts.config.load
        assert [Path(path).name for path in load.updates] == [
            "some.safetensors",
            "weights.safetensors",
        ]
        held = Path(load.updates[1])
        llm.weights.update(tensors)  # all of them: neither of the earlier files is needed
        (last,) = engine_of(llm).parts.config.load.updates
        assert not held.exists()
        assert Path(last).exists()
    assert not Path(last).parent.exists()


@pytest.mark.parametrize("use", ["int8", "int4"])
def test_few_bits_follow(folders, use):
    first, second = folders
    with opened(second, quantization={"use": use}) as llm:
        expected = results(llm)
    with opened(first, quantization={"use": use}) as llm:
        assert results(llm) != expected
        llm.weights.update(second)
        assert results(llm) == expected


def test_kept_requests_go_on_as_with_the_new_weights_from_the_start(folders):
    first, second = folders
    with opened(second) as llm:

        def continued(tokens):
            return llm.generate([PROMPTS[0] + tokens], PARAMS)[0].outputs[0].token_ids

        with opened(first) as changing:
            stream = changing.stream(PROMPTS[0], PARAMS)
            tokens = [token for _ in range(4) for token in next(stream).outputs[0].token_ids]
            changing.weights.update(second)
            last = None
            for last in stream:
                tokens += last.outputs[0].token_ids
            count = runs(last)[1][0]
            assert runs(last) == [(0, "0", "0"), (count, "1", "1")]
            assert 4 <= count < 10
            assert tokens[count:] == continued(tokens[:count])[: 10 - count]
            assert runs(changing.generate([PROMPTS[1]], PARAMS)[0]) == [(0, "1", "1")]


def test_keys_and_values_that_are_kept_are_marked_and_shared_with_nobody(folders, expected):
    first, second = folders
    with opened(first) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS)
        for _ in range(3):
            next(stream)
        llm.weights.update(second, recompute=False)
        *_, last = stream
        assert [run[1:] for run in runs(last)] == [("0", "0"), ("1", "0")]
        assert results(llm) == expected[1]  # the first prompt is the one that was kept


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("0", "0")], [(0, "0", "0"), (4, "1", "1")]),
        ([("1", "1")], [(0, "1", "1")]),
        ([("1", "0")], [(0, "1", "0"), (4, "1", "1")]),
        ([], [(4, "1", "1")]),
    ],
)
def test_versions_of_tokens_of_another_engine(folders, given, expected):
    with opened(folders[0]) as llm:
        llm.weights.update(folders[1])
        before = [WeightRun(0, *versions) for versions in given]
        for name, max_tokens in (("many", 10), ("last", 5)):
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=PROMPTS[0],
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                resumed=ResumedOutputs([1, 2, 3, 4], weight_runs=before),
            )
            engine = engine_of(llm)
            engine.add_request(name, request)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            assert runs(outputs[-1]) == expected


def test_requests_that_an_update_ends(folders):
    first, second = folders
    with opened(first) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS)
        next(stream)
        llm.weights.update(second, mode="abort")
        *_, last = stream
        assert last.outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match="mode: expected 'abort' or 'keep' in an engine"):
            llm.weights.update(first, mode="wait")


def test_a_paused_engine_stays_paused(folders, expected):
    first, second = folders
    with opened(first) as llm:
        llm.engines.pause()
        llm.weights.update(second)
        assert llm.engines.is_paused()
        llm.engines.resume()
        assert results(llm) == expected[1]
        llm.sleep()
        with pytest.raises(HardpointError, match=r"the engine sleeps \(weights, kv_cache\); call"):
            llm.weights.update(first)
        llm.wake_up()
        assert results(llm) == expected[1]


def test_prepared_weights_do_not_outlive_the_model(folders, expected):
    """After a sleep that releases the model, workers have nothing prepared."""
    first, second = folders
    with opened(first) as llm:

        def call(method, **arguments):
            return llm.plugins.call_part("weight_updates", method, arguments)

        how = {"ticket": 1, "mode": "keep", "recompute": True}
        for wakes_before in (True, False):
            call("prepare", updates=[str(file_of(second))], version="1", **how)
            llm.sleep(2)
            if wakes_before:
                llm.wake_up()
            with pytest.raises(HardpointError, match="no weights are prepared|has no model"):
                call("poll", ticket=1)
            assert call("drop")
            if not wakes_before:
                llm.wake_up()
            assert results(llm) == expected[0]
        assert llm.weights.update(second) == "1"
        llm.sleep(2)
        llm.wake_up()
        assert results(llm) == expected[1]


def test_calls_name_the_update_that_they_mean(folders, expected):
    with opened(folders[0]) as llm:

        def call(method, **arguments):
            return llm.plugins.call_part("weight_updates", method, arguments)

        how = {"mode": "keep", "recompute": True}
        call("prepare", ticket=1, updates=[str(file_of(folders[1]))], version="1", **how)
        wait_until(lambda: call("poll", ticket=1))
        for method, arguments in (("poll", {}), ("use", how)):
            with pytest.raises(HardpointError, match="no weights are prepared: prepare"):
                call(method, ticket=2, **arguments)
        with pytest.raises(RequestError, match="ticket: expected a whole number, got 'x'"):
            call("poll", ticket="x")
        with pytest.raises(RequestError, match="method: expected one of prepare, poll, use, drop"):
            call("begin")
        assert call("use", ticket=1, **how)
        assert results(llm) == expected[1]


def test_earlier_weights_are_released(folders):
    def models():
        gc.collect()
        return [found for found in gc.get_objects() if isinstance(found, Model)]

    first, second = folders
    with opened(first) as llm:
        results(llm)
        earlier = [weakref.ref(model) for model in models()]
        llm.weights.update(second)
        results(llm)
        count = len(models())
        assert count <= len(earlier)
        assert None in [model() for model in earlier]


def test_what_is_given_up_while_it_is_read_holds_nobody_up(folders, expected, monkeypatch):
    from hardpoint.core.worker import loaded_model

    go_on, reading, models = threading.Event(), [], []
    load = loaded_model.load_weights

    def held(spec, planned, cache, any_rank):
        reading.append(1)
        models.append(weakref.ref(planned.model))
        assert go_on.wait(PATIENCE_S)
        load(spec, planned, cache, any_rank)
        reading.pop()

    monkeypatch.setattr(loaded_model, "load_weights", held)
    with opened(folders[0]) as llm:

        def call(method, **arguments):
            return llm.plugins.call_part("weight_updates", method, arguments)

        how = {"ticket": 1, "mode": "keep", "recompute": True}
        weights = {"updates": [str(file_of(folders[1]))], "version": "1"}
        for _ in range(2):  # the second waits for the first
            call("prepare", **weights, **how)
            wait_until(lambda: reading)
            call("drop")
        assert results(llm) == expected[0]
        call("prepare", **weights, **how)
        assert not call("poll", ticket=1)
        assert len(reading) == 1
        go_on.set()
        wait_until(lambda: call("poll", ticket=1))
        gc.collect()
        assert [model() is None for model in models] == [True, False]
        call("use", **how)
        assert results(llm) == expected[1]


def wrong(**changes):
    """Return a change of tensors, by which they are wrong."""

    def change(tensors):
        return tensors | changes

    return change


NAN = torch.full((64, 96), float("nan"))
BAD = {
    "a name": (
        wrong(**{"model.layers.7.mlp.down_proj.weight": torch.zeros(64, 96)}),
        r"the model has no weight 'model.layers.7.mlp.down_proj.weight'; it has model.embed_tokens",
    ),
    "a shape": (
        wrong(**{PROJECTION: torch.zeros(96, 64)}),
        r"'model.layers.1.mlp.down_proj.weight' has shape \[96, 64\], the model needs \[64, 96\]",
    ),
    "a dtype": (
        wrong(**{PROJECTION: torch.zeros(64, 96, dtype=torch.int32)}),
        r"has the dtype I32, expected F64, F32, F16, BF16",
    ),
    "NaN in the last tensor": (
        wrong(**{PROJECTION: NAN}),
        r"'model.layers.1.mlp.down_proj.weight' has numbers that are not finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_tensors_change_nothing(folders, expected, tmp_path, case):
    change, message = BAD[case]
    save_file(change(load_file(file_of(folders[1]))), tmp_path / "bad.safetensors")
    with opened(folders[0]) as llm:
        with pytest.raises(ModelError, match=message):
            llm.weights.update(tmp_path / "bad.safetensors")
        assert results(llm) == expected[0]
        assert llm.weights.update(folders[1]) == "1"
        assert results(llm) == expected[1]


def test_what_the_start_left_out_is_left_out_again(folders, expected, tmp_path):
    """As layers that predict further tokens, which many checkpoints have."""
    extra = {"model.layers.9.eh_proj.weight": torch.ones(2, 4), "mtp.fc.weight": torch.ones(2)}
    for name, folder in zip(("first", "second"), folders, strict=True):
        shutil.copytree(folder, tmp_path / name)
        path = file_of(tmp_path / name)
        save_file(load_file(path) | extra, path)
    with opened(tmp_path / "first") as llm:
        wrong = {"mtp.fc.bias": torch.ones(2)}
        with pytest.raises(ModelError, match=r"the model has no weight 'mtp.fc.bias'"):
            llm.weights.update(wrong)
        with pytest.raises(ModelError, match=r"no weights of the model: .* lacks 1 .*mtp.fc.bias"):
            llm.weights.update(wrong | extra)
        assert results(llm) == expected[0]
        llm.weights.update(tmp_path / "second")
        assert results(llm) == expected[1]


def test_what_is_no_weights_is_refused_by_field(folders, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04\x95" + bytes(50))
    (tmp_path / "cut.safetensors").write_bytes(file_of(folders[1]).read_bytes()[:5000])
    bad = {
        str(tmp_path / "none.safetensors"): r"none.safetensors: expected a safetensors file, there",
        str(tmp_path / "empty"): "empty: expected a safetensors file, or a folder of them; it has",
        str(tmp_path / "pickle.bin"): "pickle.bin: expected a safetensors file; it cannot be read",
        str(
            tmp_path / "cut.safetensors"
        ): "cut.safetensors: expected a safetensors file; it cannot",
    }
    with opened(folders[0]) as llm:
        for path, message in bad.items():
            with pytest.raises(ModelError, match=message):
                llm.weights.update(path)
        with pytest.raises(RequestError, match="weights: expected tensors by their names, got no"):
            llm.weights.update({})
        with pytest.raises(
            RequestError, match="weights: expected tensors by their names, got 1 for"
        ):
            llm.weights.update({"a": 1})
        with pytest.raises(RequestError, match="weights: expected a path, or tensors by their"):
            llm.weights.update(7)
        with pytest.raises(RequestError, match=r"version: .*length"):
            llm.weights.update(folders[1], version="")
        with pytest.raises(RequestError, match='mode: expected "abort" or "wait" or'):
            llm.weights.update(folders[1], mode="later")
        llm.weights.update(folders[1], version="a name")
        with pytest.raises(RequestError, match="version: expected one, since the current version"):
            llm.weights.update(folders[0])
        assert results(llm) == expected[1]


def test_memory_is_checked_before_anything_is_read(folders, expected, monkeypatch):
    from hardpoint.core.worker import worker
    from hardpoint.host.system.memory import MemoryLimit

    with opened(folders[0]) as llm:
        monkeypatch.setattr(worker, "share_of_memory", lambda *_: MemoryLimit(1000, "a test"))
        with pytest.raises(
            ModelError, match=r"weights: .* are needed in addition to the current ones, 1.* \(a"
        ):
            llm.weights.update(folders[1])
        assert results(llm) == expected[0]


def test_a_head_that_is_the_table_is_taken_once(tmp_path):
    model = write_model(tmp_path / "tied", tie_word_embeddings=True)
    table = model.model.embed_tokens.weight.detach() * 0.5
    settings = SETTINGS
    with LLM(str(tmp_path / "tied"), config=settings, max_model_len=128) as llm:
        before = results(llm)
        llm.weights.update({"model.embed_tokens.weight": table, "lm_head.weight": table})
        assert results(llm) != before
        with pytest.raises(ModelError, match="'lm_head.weight': the model's head is 'model.embed"):
            llm.weights.update({"lm_head.weight": table * 2})


def test_an_engine_starts_with_updates(folders, expected):
    load = {"updates": [str(file_of(folders[1]))], "version": "7"}
    with opened(folders[0], load=load) as llm:
        assert results(llm) == expected[1]
        assert runs(llm.generate([PROMPTS[0]], PARAMS)[0]) == [(0, "7", "7")]
        assert llm.weights.update(folders[0]) == "8"


def test_stored_blocks_of_earlier_weights_are_not_found(folders, expected):
    stores = {"kv_connector": {"stores": ["memory"]}}
    with opened(folders[0], **stores) as llm:
        for _ in range(2):
            assert results(llm) == expected[0]
        with pytest.raises(RequestError, match="recompute: expected true: a kv_connector would"):
            llm.weights.update(folders[1], recompute=False)
        for folder, of in ((folders[1], expected[1]), (folders[0], expected[0])) * 2:
            llm.weights.update(folder)
            for _ in range(2):
                assert results(llm) == of


def test_no_blocks_are_stored_as_those_of_a_file_that_was_replaced(folders, expected, tmp_path):
    """Weights of the first model are read; then the file is that of the second one."""
    path = tmp_path / "latest.safetensors"
    shutil.copy(file_of(folders[0]), path)
    store = {"disk": {"path": str(tmp_path / "blocks"), "size_bytes": 1 << 24}}
    with opened(folders[0], kv_connector={"stores": ["disk"]}, plugin=store) as llm:

        def call(method, **arguments):
            return llm.plugins.call_part("weight_updates", method, arguments)

        how = {"ticket": 1, "mode": "keep", "recompute": True}
        call("prepare", updates=[str(path)], version="1", **how)
        wait_until(lambda: call("poll", ticket=1))
        shutil.copy(file_of(folders[1]), path)
        call("use", **how)
        assert results(llm) == expected[0]
        llm.weights.update(path)
        for _ in range(2):
            assert results(llm) == expected[1]
