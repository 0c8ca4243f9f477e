"""Sequences of the engine's own model inside of plugins."""

from __future__ import annotations

import pytest
import torch
from support.parallel import write_random_model

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

HERE = "support.plugins.main_model"


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
