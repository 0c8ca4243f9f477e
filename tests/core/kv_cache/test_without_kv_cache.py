"""Models that keep nothing of one step for the next."""

from __future__ import annotations

import re

import pytest
import torch

from hardpoint import ConfigError, SamplingParams
from hardpoint.core.kv_cache import CacheSize, size_cache
from hardpoint.plugins import EngineConfig, WorkerInfo
from hardpoint.plugins.config_tables import KVCacheConfig, SchedulerConfig
from hardpoint.testing import ScriptedModel, scripted_engine, write_scripted_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class LastTokenModel(ScriptedModel):
    """Looks at nothing but the last token."""

    contract = 1

    def kv_specs(self):
        return []

    def forward(self, batch):
        return torch.stack((torch.zeros_like(batch.token_ids), batch.token_ids), 1).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("stateless"), max_position_embeddings=64)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("ScriptedForCausalLM", "LastToken"))
    return folder


def engine(folder, **tables):
    model = {"use": f"{__name__}:LastTokenModel", "name": "LastToken"}
    return scripted_engine(folder, {"plugins": {"enable": [model]}} | tables)


def tokens(engine, *prompts):
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    return [found[str(index)] for index in range(len(prompts))]


def test_it_runs_without_chunks_and_without_the_prefix_cache(folder, caplog):
    opened = engine(folder)
    (words,) = [r.getMessage() for r in caplog.records if "KV cache" in r.getMessage()]
    assert words == (
        f"the model {folder} has no KV cache: prompts are computed in one step each, without "
        "scheduler.chunked_prefill and kv_cache.prefix_caching"
    )
    long = [index % 250 for index in range(50)]
    first, second = tokens(opened, long, [1, 2, 49])
    assert first == second  # both end with the same token
    assert tokens(opened, long) == [first]
    assert opened.call_utility("scheduler_stats").prefix_cache.hit_tokens == 0
    opened.close()


def test_a_prompt_that_fits_no_step_is_an_error_that_names_the_model(folder):
    words = (
        f"model: '{folder}' has no KV cache, so that a prompt is computed in one step: "
        "scheduler.max_num_batched_tokens: expected at least max_model_len (64), got 63"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        engine(folder, scheduler={"max_num_batched_tokens": 63})


@pytest.mark.parametrize(("asked", "given"), [({}, 16), ({"num_blocks": 9}, 9)])
@pytest.mark.parametrize("memory", [{}, {"memory_bytes": 1}, {"memory_fraction": 0.1}])
def test_blocks_without_content_are_as_many_as_are_needed(asked, given, memory):
    config = EngineConfig(
        kv_cache=KVCacheConfig(**asked, **memory), scheduler=SchedulerConfig(max_num_seqs=4)
    )
    assert size_cache(config, 64, WorkerInfo(0, 0)) == CacheSize(given, 64)
