"""Pairs of texts: how they are cut, and what identifies their tokens."""

from __future__ import annotations

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.pairs import write_tokenizer

from hardpoint.builtin_plugins.step_parts.pooling.folder import ModelPooling
from hardpoint.builtin_plugins.step_parts.pooling.requests import PooledRequests, PooledResults
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.errors import RequestError
from hardpoint.plugins import (
    EngineCoreRequest,
    ModelFiles,
    SamplingParams,
    TokenizerContext,
)
from hardpoint.plugins.kv_cache.block_hash import extra_keys, sharing_key
from hardpoint.plugins.params import PoolingParams


@pytest.fixture(scope="module", params=["Bert", "Roberta", "Llama"])
def tokenizers(request, tmp_path_factory):
    """The tokenizer of a folder, and that of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param)
    files = ModelFiles(name=folder.name, path=folder)
    options = TransformersTokenizer.Options()
    own = TransformersTokenizer(TokenizerContext(name="own", options=options, files=files))
    return own, transformers.AutoTokenizer.from_pretrained(str(folder))


TEXTS = st.text("abc ", min_size=1, max_size=12)


def test_pairs_are_those_of_transformers_cut_or_not(tokenizers):
    own, other = tokenizers

    @given(TEXTS, TEXTS, st.integers(1, 20))
    def check(first, second, room):
        pair = own.encode_pair(first, second)
        special = len(pair.token_ids) - len(pair.first) - len(pair.second)
        limit = special + room
        expected = other(first, second, truncation="longest_first", max_length=limit)
        found = pair.cut(limit)
        assert found.token_ids == expected["input_ids"]
        texts = expected.sequence_ids()
        assert [*found.first] == [at for at, text in enumerate(texts) if text == 0]
        assert [*found.second] == [at for at, text in enumerate(texts) if text == 1]
        count = len(found.token_ids)
        start = found.second_type_start
        types = expected.get("token_type_ids", [0] * count)
        assert [int(at >= start) for at in range(count)] == types

    check()


def test_a_cut_without_room_for_a_text_is_refused(tokenizers):
    pair = tokenizers[0].encode_pair("ab", "c")
    special = len(pair.token_ids) - 3
    with pytest.raises(RequestError, match=f"expected more than {special}, the special tokens"):
        pair.cut(special)


def request_of(start, **fields):
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=list(range(20)),
        params=SamplingParams(),
        second_type_start=start,
        **fields,
    )


def test_types_of_tokens_are_part_of_what_blocks_depend_on():
    keys = {start: extra_keys(request_of(start), 0, 5, 4) for start in (None, 20, 9, 10, 12)}
    assert keys[None] == keys[20] == {}
    assert [set(keys[start]) for start in (9, 10, 12)] == [{2}, {2}, {3}]
    assert keys[9] != keys[10]
    assert extra_keys(request_of(9), 3, 5, 4) == {}  # those before have it
    salted = extra_keys(request_of(2, cache_salt="s"), 0, 5, 4)
    assert salted[0] not in (extra_keys(request_of(None, cache_salt="s"), 0, 5, 4)[0], keys[9][2])
    shared = [sharing_key(request_of(start)) for start in (None, 20, 9)]
    assert shared[0] == shared[1] != shared[2]


@pytest.mark.parametrize("start", [-1, 21])
def test_types_begin_inside_of_the_prompt(start):
    half = PooledResults("pooling", ["cls"], ModelPooling(token_types=True))
    pooled = PoolingParams(task="score", pooler="cls")
    half.check(request_of(20, pooling_params=pooled))
    with pytest.raises(RequestError, match=f"second_type_start: .* from 0 to 20, got {start}"):
        half.check(request_of(start, pooling_params=pooled))
    with pytest.raises(RequestError, match=f"second_type_start: .* from 0 to 20, got {start}"):
        PooledRequests(None, ModelPooling()).prepare(request_of(start), None)
    with pytest.raises(RequestError, match="second_type_start: expected none, no model here"):
        RequestCheck(100)(request_of(5))
