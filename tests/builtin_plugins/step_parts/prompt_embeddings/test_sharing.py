"""Blocks are shared by prompts of the same ids, numbers and places alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.embedded import prompt_of

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.prompt_embeddings.engine_half import EmbeddedPrompts
from hardpoint.plugins import EngineCoreRequest

PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
STORES = {
    "kv_connector": {"stores": ["memory"], "load_seconds": 120.0},
    "plugin": {
        "memory": {"size_bytes": 1 << 20},
        "prompt_embeddings": {"enabled": True},
        "stores": {"timeout_seconds": 60.0},
    },
}


def cached(llm, prompt, **options):
    return llm.generate([prompt], PARAMS, **options)[0].num_cached_tokens


@pytest.mark.parametrize("stores", [False, True])
def test_equal_prompts_share_and_others_do_not(embedded, stores):
    """Of 40 tokens in blocks of 8, at most the first 4 blocks are shared: one token is computed."""
    ids = prompt_of(40)
    rows = embedded.table[ids]
    other = rows.clone()
    other[17, 3] += 1.0
    with LLM(config=embedded.settings(STORES if stores else {})) as llm:

        def shared(prompt, expected, **options):
            """Return how many tokens are shared; blocks are stored in a thread, so try again."""
            deadline = time.monotonic() + 60
            while True:
                if stores:  # what the engine itself has is forgotten
                    llm.reset_prefix_cache()
                num_cached = cached(llm, prompt, **options)
                if not stores or num_cached >= expected or time.monotonic() > deadline:
                    return num_cached

        assert shared(ids, 0) == 0
        assert (
            shared({"prompt_embeds": rows}, 0) == 0
        )  # ids share nothing with their own embeddings
        assert shared({"prompt_embeds": rows}, 32) == 32
        assert shared({"prompt_embeds": rows.numpy()}, 32) == 32
        halves = rows.bfloat16()
        assert shared({"prompt_embeds": halves}, 0) == 0  # rounded
        assert shared({"prompt_embeds": halves}, 32) == 32
        assert shared({"prompt_embeds": halves.float()}, 32) == 32  # the same numbers
        assert shared({"prompt_embeds": other}, 16) == 16  # the blocks before the other row
        assert shared({"prompt_embeds": other}, 32) == 32
        assert shared([0] * 40, 0) == 0  # what stands there is no token 0
        assert shared({"prompt_embeds": rows}, 0, cache_salt="s") == 0
        parts = {"prompt_parts": [ids[:12], rows[12:]]}
        assert shared(parts, 8) == 8  # of the ids above
        assert shared(parts, 32) == 32
        zeros = {"prompt_parts": [ids[:12], [0], rows[13:]]}
        assert shared(zeros, 8) == 8


def test_keys_have_the_places_and_the_numbers():
    half = EmbeddedPrompts(2, 1 << 20, lambda message: [])

    def keys(rows, mask=None, length=8):
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[0] * length,
            params=PARAMS,
            prompt_embeds=np.asarray(rows, dtype=np.float32),
            prompt_is_token_ids=mask,
        )
        spans = [range(0, 4), range(4, 8), range(8, 12)]
        return [half.block_key(request, span) for span in spans]

    rows = [[float(n), 1.0] for n in range(8)]
    whole = keys(rows)
    assert whole == keys(rows)
    assert None not in whole[:2]
    assert whole[2] is None  # of the output
    mask = [True, True, False, True, True, True, True, True]
    moved = [True, False, True, True, True, True, True, True]
    first, second = keys(rows[:1], mask), keys(rows[:1], moved)
    assert first[0] != second[0]  # the same row at another place
    assert (first[1], second[1]) == (None, None)
    other = keys([*rows[:7], [7.0, 2.0]])
    assert (other[0] == whole[0], other[1] == whole[1]) == (True, False)
    halves = keys([*rows[:4]], [False] * 4 + [True] * 4)
    assert halves[:2] == [whole[0], None]
