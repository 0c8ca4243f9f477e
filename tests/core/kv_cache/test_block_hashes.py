"""Block hashes: what they are, and what makes them differ."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.kv_cache_model import make_request
from support.searching import examples

from hardpoint.core.kv_cache.block_hashes import BlockHashes
from hardpoint.plugins.kv_cache.block_hash import NO_PARENT

TOKENS = list(range(100, 112))


def hashes_of(request, block_size=4, algorithm="sha256") -> list[bytes]:
    return BlockHashes(block_size, algorithm).of(request, request.num_tokens // block_size)


def packed(*tokens) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def test_formula():
    first = hashlib.sha256(NO_PARENT + packed(1, 2)).digest()
    second = hashlib.sha256(first + packed(3, 70_000)).digest()
    assert hashes_of(make_request(tokens=[1, 2, 3, 70_000, 5]), 2) == [first, second]


def test_formula_with_extra_keys():
    request = make_request(
        tokens=[1, 2, 3, 4], salt="s", lora="adapter", features=[("image", 1, 2)]
    )
    extra = msgspec.msgpack.encode([["name", "adapter", 1], "s", [["image", 1]]])
    first = hashlib.sha256(NO_PARENT + packed(1, 2) + extra).digest()
    extra = msgspec.msgpack.encode([["name", "adapter", 1], None, [["image", -1]]])
    second = hashlib.sha256(first + packed(3, 4) + extra).digest()
    assert hashes_of(request, 2) == [first, second]


def test_blake2b():
    expected = hashlib.blake2b(NO_PARENT + packed(*TOKENS), digest_size=32).digest()
    assert hashes_of(make_request(tokens=TOKENS), 12, "blake2b") == [expected]


def test_unknown_algorithm():
    words = "^hash_algorithm: expected one of sha256, blake2b, got 'md5'$"
    with pytest.raises(ValueError, match=words):
        BlockHashes(4, "md5")


@examples(60)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    block_size=st.sampled_from([1, 2, 4, 16]),
    salt=st.sampled_from([None, "s"]),
    features=st.lists(
        st.tuples(st.text(max_size=2), st.integers(0, 40), st.integers(1, 20)), max_size=3
    ),
    prompt=st.integers(1, 60),
)
def test_extending_is_like_starting_anew(tokens, cuts, block_size, salt, features, prompt):
    """However a request grows, its hashes are those of a prompt with the same tokens."""
    features.sort(key=lambda feature: feature[1])
    whole = make_request(tokens=tokens, salt=salt, features=features)
    request = make_request(tokens=tokens[:prompt], salt=salt, features=features)
    hashes = BlockHashes(block_size)
    for cut in [*sorted(cuts), len(tokens)]:
        for token in tokens[request.num_tokens : cut]:
            request.append(token)
        grown = hashes.of(request, request.num_tokens // block_size)
    assert grown == hashes_of(whole, block_size)
    assert len(grown) == len(tokens) // block_size


@pytest.mark.parametrize("block_size", [16, 128, 2048])
def test_long_prompts(block_size):
    """Prompts longer than what is turned into bytes at once."""
    tokens = [(7 * i) % 50_000 for i in range(5000)]
    parent, expected = NO_PARENT, []
    for start in range(0, 5000 - block_size + 1, block_size):
        parent = hashlib.sha256(parent + packed(*tokens[start : start + block_size])).digest()
        expected.append(parent)
    assert hashes_of(make_request(tokens=tokens), block_size) == expected


def test_a_token_changes_all_hashes_behind_it():
    changed = [*TOKENS[:5], 9, *TOKENS[6:]]
    one, other = hashes_of(make_request(tokens=TOKENS)), hashes_of(make_request(tokens=changed))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"salt": "s"}, [False] * 3),
        ({"salt": ""}, [False] * 3),
        ({"lora": "l"}, [False] * 3),
        ({"features": [("i", 0, 1)]}, [False] * 3),
        ({"features": [("i", 5, 2)]}, [True, False, False]),
        ({"features": [("i", 3, 1)]}, [False] * 3),
        ({"features": [("i", 8, 4)]}, [True, True, False]),
        ({"features": [("i", 12, 4)]}, [True] * 3),
    ],
)
def test_extra_keys(change, equal):
    """A key counts from the block on in which it begins."""
    plain = hashes_of(make_request(tokens=TOKENS))
    keyed = hashes_of(make_request(tokens=TOKENS, **change))
    assert [a == b for a, b in zip(plain, keyed, strict=True)] == equal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {"lora": "a"}),
        ({"salt": "ab", "lora": "c"}, {"salt": "a", "lora": "bc"}),
        ({"features": [("a", 1, 2)]}, {"features": [("a", 2, 1)]}),
        ({"features": [("a", 0, 1), ("b", 1, 1)]}, {"features": [("b", 0, 1), ("a", 1, 1)]}),
    ],
)
def test_different_keys_never_meet(one, other):
    first = hashes_of(make_request(tokens=TOKENS, **one))
    second = hashes_of(make_request(tokens=TOKENS, **other))
    assert not set(first) & set(second)


def test_hashes_are_computed_once():
    hashes, request = BlockHashes(4), make_request(tokens=TOKENS)
    first = hashes.of(request, 3)
    assert hashes.of(request, 3) is first
    assert len(hashes) == 1
    assert hashes.by_request.pop(request) == first
    assert hashes.of(request, 3) == first


def test_an_id_comes_back_with_other_tokens():
    hashes = BlockHashes(4)
    hashes.of(make_request("same", TOKENS), 3)
    other = make_request("same", [9] * 12)
    assert hashes.of(other, 3) == hashes_of(other)
