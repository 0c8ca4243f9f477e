"""Several engines of one program that exchange blocks of their KV caches."""

from __future__ import annotations

import itertools
import tempfile

from support.process.harness import process_config
from support.waiting import PATIENCE_S, wait_until

from hardpoint import LLM, SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def test_each_engine_has_an_id_and_an_address_of_its_own(scripted):
    """One table for all; the second engine is `a-1`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        address = f"ipc://{folder}/{{engine_id}}"
        peers = {"a": address, "a-1": address}
        config = process_config(
            scripted,
            {
                "parallel": {"data": 2},
                "kv_cache": {"block_size": 4, "num_blocks": 200},
                "kv_connector": {"stores": ["p2p"], "engine_id": "a"},
                "plugin": {"p2p": {"listen": address, "peers": peers}},
            },
        )
        with LLM(config=config) as llm:
            numbers = itertools.count(1000)  # prompts of 26 tokens: six blocks and two more

            def cached(rank: int, prompt: str) -> int:
                (output,) = llm.generate(prompt, ONE_TOKEN, data_parallel_rank=rank)
                return output.num_cached_tokens

            def is_exchanged() -> bool:
                """Compute a new prompt at one engine; return whether the other one loads it."""
                prompt = f"{next(numbers)} blocks of four tokens"
                assert cached(0, prompt) == 0
                return cached(1, prompt) == 24

            wait_until(is_exchanged, PATIENCE_S, "blocks of the other engine")
