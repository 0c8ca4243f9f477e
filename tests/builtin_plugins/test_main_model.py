"""The engine's own model inside of plugins: sequences, products and the unembedding."""

from __future__ import annotations

import pytest
import torch
from support.adapters import write_model, write_two_models
from support.parallel import write_random_model

from hardpoint import LLM, HardpointError, ModelError, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

HERE, LENS = "support.plugins.main_model", "support.plugins.lens"


@pytest.fixture(scope="module")
def scripted_folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory, scripted_folder):
    folder = write_random_model(tmp_path_factory.mktemp("real"), "LlamaForCausalLM", vocab_size=257)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((scripted_folder / name).read_bytes())
    return folder


def _real_config(folder, **tables):
    extra = {"attention": {"use": "native_cpu"}, **tables}
    config = scripted_config(folder, extra)
    config["plugins"]["enable"] = config["plugins"]["enable"][1:]
    return config


def test_drafts_of_the_model_itself_are_all_accepted(scripted_folder):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["one", "another one"]
    with LLM(config=scripted_config(scripted_folder)) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    speculation = {"speculation": {"use": [f"{HERE}:SelfDraft"], "adaptive": False}}
    with LLM(config=scripted_config(scripted_folder, speculation)) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.engines.scheduler_stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert stats.num_accepted_drafts > 30
    assert stats.num_accepted_drafts >= stats.num_drafts - 8  # the end of each cuts some


def test_logits_of_all_rows_are_those_of_the_engine(real_folder):
    config = _real_config(real_folder, plugins={"enable": [f"{HERE}:Scores"]})
    texts = {"a": [1, 2, 3, 4, 5], "b": [9], "c": [7, 7, 8]}
    with LLM(config=config) as llm:
        rows = llm.plugins.call_part("scores", "rows", texts)
        last = llm.plugins.call_part("scores", "last", texts)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids in texts.values()]
        outputs = llm.generate(prompts, params)
    assert len(rows) == sum(map(len, texts.values()))
    ends = [4, 5, 8]
    assert [rows[end] for end in ends] == last
    first = 0
    for ids, output in zip(texts.values(), outputs, strict=True):
        logprobs = torch.tensor(rows[first : first + len(ids)]).log_softmax(-1)
        for place, token in enumerate(ids[1:]):
            known = output.prompt_logprobs[place + 1][token].logprob
            assert float(logprobs[place, token]) == known
        assert int(logprobs[-1].argmax()) == output.outputs[0].token_ids[0]
        first += len(ids)


def test_ranks_that_divide_the_model_are_refused(real_folder):
    config = _real_config(
        real_folder,
        plugins={"enable": [f"{HERE}:Scores"]},
        executor={"use": "multiproc"},
        parallel={"tensor": 2},
    )
    with pytest.raises(Exception, match="expected one rank for sequences of the engine's own"):
        LLM(config=config).close()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_first_layers_have_the_logits_of_a_truncated_model(tmp_path, num_layers):
    reference = write_model(tmp_path / "model")
    options = {"plugin": {"scores": {"num_layers": num_layers}}}
    plugins = {"plugins": {"enable": [f"{HERE}:Scores"]}}
    tokens = [5, 17, 200, 31, 8]
    with LLM(str(tmp_path / "model"), config=plugins | options, max_model_len=64) as llm:
        rows = llm.plugins.call_part("scores", "rows", {"a": tokens})
        part = llm.plugins.call_part("scores", "last", {"a": tokens[:3]})
        assert llm.plugins.call_part("scores", "num_layers", {}) == 3
    del reference.model.layers[num_layers:]
    with torch.no_grad():
        expected = reference.double()(torch.tensor([tokens])).logits[0].float()
    torch.testing.assert_close(torch.tensor(rows), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(part[0]), expected[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_layers", [0, 4])
def test_a_number_of_layers_that_the_model_lacks_is_refused(real_folder, num_layers):
    options = {"plugin": {"scores": {"num_layers": num_layers}}}
    config = _real_config(real_folder, plugins={"enable": [f"{HERE}:Scores"]}, **options)
    with pytest.raises(ModelError) as error:
        LLM(config=config).close()
    assert str(error.value) == (
        f"plugin 'scores' ({HERE}:Scores), asked for by plugins.enable[0] (argument "
        f"LLM(config=...)): num_layers: expected 1..3, got {num_layers}"
    )


def test_a_draft_model_that_does_not_open_names_its_speculator(scripted_folder):
    speculation = {"use": [f"{HERE}:NoDraft"], "adaptive": False}
    with pytest.raises(ModelError) as error:
        LLM(config=scripted_config(scripted_folder, {"speculation": speculation})).close()
    assert str(error.value) == (
        f"plugin 'no_draft' ({HERE}:NoDraft), asked for by speculation.use[0] (argument "
        "LLM(config=...)): model: found no file or directory './nowhere'"
    )


def test_a_cache_that_memory_has_no_room_for_is_refused(scripted_folder):
    speculation = {"use": [f"{HERE}:HugeCache"], "adaptive": False}
    message = (
        r"'huge_cache' \(.*speculation.use\[0\].*: num_tokens: expected at most \d+, .* got 10{15}"
    )
    with pytest.raises(ModelError, match=message):
        LLM(config=scripted_config(scripted_folder, {"speculation": speculation})).close()


def test_tokens_without_room_in_the_cache_are_refused(scripted_folder):
    settings = {"plugins": {"enable": [f"{HERE}:Scores"]}}
    with LLM(config=scripted_config(scripted_folder, settings)) as llm:
        llm.plugins.call_part("scores", "last", {"a": [1] * 100})
        message = r"token_ids\['b'\]: expected 1 to 400 tokens, .* room for, got 401"
        with pytest.raises(HardpointError, match=message):
            llm.plugins.call_part("scores", "last", {"b": [1] * 401})
        with pytest.raises(HardpointError, match=r"expected 1 to 400 tokens, .*, got 0"):
            llm.plugins.call_part("scores", "last", {"b": []})


def test_a_model_that_computes_all_layers_is_refused(tmp_path):
    write_model(tmp_path / "model")
    config = {
        "models": {"use": "transformers"},
        "plugins": {"enable": [f"{HERE}:Scores"]},
        "plugin": {"scores": {"num_layers": 1}},
    }
    with pytest.raises(
        Exception, match="num_layers: expected None for a model that ignores .*, got 1"
    ):
        LLM(str(tmp_path / "model"), config=config, max_model_len=64).close()


def test_sequences_of_a_model_with_groups_of_layers_are_those_of_the_engine(tmp_path):
    types = ["sliding_attention", "full_attention"] * 2
    write_model(tmp_path / "model", "Gemma3", num_hidden_layers=4, layer_types=types)
    tokens = [(7 * place) % 251 for place in range(60)]
    settings = {"plugins": {"enable": [f"{HERE}:Scores"]}}
    with LLM(str(tmp_path / "model"), config=settings, max_model_len=256) as llm:
        rows = llm.plugins.call_part("scores", "one by one", {"a": tokens})
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate([tokens], params)
    logprobs = torch.tensor(rows).log_softmax(-1)
    for place, token in enumerate(tokens[1:]):
        known = output.prompt_logprobs[place + 1][token].logprob
        assert float(logprobs[place, token]) == known


@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_updated_weights_compute_sequences_again(tmp_path, in_process, num_layers):
    first, second = write_two_models(tmp_path)
    settings = {
        "plugins": {"enable": [f"{HERE}:Scores"]},
        "plugin": {"scores": {"num_layers": num_layers}},
        "engine": {"in_process": in_process},
    }
    texts = {"a": [(7 * place) % 251 for place in range(300)], "b": [9], "c": [4, 4, 8]}
    following = {"c": [1], "a": [5, 6], "b": [7], "new": [2, 3]}
    whole = {name: texts.get(name, []) + tokens for name, tokens in following.items()}
    longer = {name: [*tokens, 1] for name, tokens in whole.items()}
    with LLM(str(second), config=settings, max_model_len=400) as llm:
        expected = [llm.plugins.call_part("scores", "last", each) for each in (whole, longer)]
    with LLM(str(first), config=settings, max_model_len=400) as llm:
        known = {name: whole[name] for name in texts}
        assert llm.plugins.call_part("scores", "last", known) != expected[0][:3]
        llm.plugins.call_part("scores", "last", texts)
        llm.weights.update(second)
        assert llm.plugins.call_part("scores", "continued", following) == expected[0]
        llm.weights.update(first)
        llm.weights.update(second)
        again = {name: [1] for name in whole}
        assert llm.plugins.call_part("scores", "continued", again) == expected[1]


def test_lens_after_the_last_layer_predicts_what_the_model_samples(real_folder):
    lens = {"plugin": {"lens": {"layers": [0, 2]}}}
    config = _real_config(real_folder, plugins={"enable": [f"{LENS}:Lens"]}, **lens)
    params = SamplingParams(max_tokens=4, temperature=0, plugin_args={"lens": {}})
    with LLM(config=config) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], params)
    (completion,) = output.outputs
    arrays = completion.part_arrays["activation_taps"]
    assert sorted(arrays) == ["lens/0/layer_output", "lens/2/layer_output"]
    last, first = arrays["lens/2/layer_output"], arrays["lens/0/layer_output"]
    assert last.values[4:, 0].tolist() == completion.token_ids
    assert first.values.shape == last.values.shape == (8, 3)
    assert first.values.tolist() != last.values.tolist()


def test_probe_has_the_same_product_alone_and_in_a_batch(real_folder):
    config = _real_config(real_folder, plugins={"enable": [f"{LENS}:Probe"]})
    params = SamplingParams(max_tokens=3, temperature=0, plugin_args={"probe": {}})
    prompts = [{"prompt_token_ids": [seed, 5, seed, 9, 2, seed]} for seed in range(5)]
    with LLM(config=config) as llm:
        together = [_probe(output) for output in llm.generate(prompts, params)]
    with LLM(config=config) as llm:
        alone = [_probe(llm.generate([prompt], params)[0]) for prompt in prompts]
    assert together == alone


def _probe(output):
    return output.outputs[0].part_arrays["activation_taps"]["probe/1/layer_output"].values.tolist()
