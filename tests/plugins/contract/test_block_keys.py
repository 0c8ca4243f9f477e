"""Keys of KV blocks: all that the bytes of a block depend on, and each part on its own."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from hardpoint.plugins import EngineCoreRequest, SamplingParams
from hardpoint.plugins.kv_cache.block_hash import (
    HASH_VERSION,
    NO_PARENT,
    block_key,
    extra_keys,
    hash_block,
)
from hardpoint.plugins.kv_connector import BlockIdentity
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature

IDENTITY = BlockIdentity(
    weights="w",
    config="c",
    architecture="LlamaForCausalLM",
    dtype="torch.float32",
    kv_layout="l",
    kv_layout_version=1,
    block_size=16,
    layer_bytes=(64, 64),
    hash_algorithm="sha256",
)
HASH = bytes(range(32))
DIGESTS = {
    2: {
        "identity": "011d0e963bafb95872ecc2850357f7d51a124ee0f92bfc9187d37682c9d46e02",
        "tokens": "bf253c42347d31cced241f70bdffe015f0ed3ab76102b6600cefe1fdb7666223",
        "salt": "72efa2db4d57443d06cc02dfd2d3a574df734acdbd427fd7d4b3e0e8c097fc5a",
        "feature": "6185ac2648dc2e4ca8437b035e7aa3e72d06bd00793725a1bf53cea7750ee723",
        "adapter": "d34655e9dc055da31a0b1cd396a27aacc3a1793a3ccaebac3c1def2c9ef8d90a",
        "adapter by name": "431a5cf322591f0be818e6a21f3ce98f5ef1d2159f04a06d9f58e1e53e6be574",
        "second block": "1d88ca112fd60fb1ac1442bcfc44ca3c50eca6c03803290bdca5ae0f8e3adbdf",
        "key": "dabd012e7c530e07d84da2d75aeafd4b7167e3da107ec34142351c4a03e5040b",
        "key of a part": "01f781830d0d4139ce83e80fc18eac760c879ace46fc11762a8ba4a38b1a0952",
    },
}
"""By version of the formula; what was is kept, so that no version comes twice."""
PARTS = {
    "block_hash": [bytes(32), HASH[:31]],
    "layers": [(0, 1), (1, 2), (0, 2)],
    "secret": [b"s", b"t"],
}


def changed(value):
    """Return other values of a field."""
    if isinstance(value, str):
        return [value + "x", ""]
    if isinstance(value, int):
        return [value + 1]
    return [(64, 65), (64,), (64, 64, 64), (128,)]


@pytest.mark.parametrize("field", BlockIdentity.__struct_fields__)
def test_each_field_of_the_identity_counts(field):
    digests = {IDENTITY.digest()}
    for value in changed(getattr(IDENTITY, field)):
        digests.add(msgspec.structs.replace(IDENTITY, **{field: value}).digest())
    assert len(digests) == 1 + len(changed(getattr(IDENTITY, field)))


def test_fields_do_not_run_into_each_other():
    names = [n for n in BlockIdentity.__struct_fields__ if isinstance(getattr(IDENTITY, n), str)]
    digests = set()
    for first, other in itertools.permutations(names, 2):
        empty = dict.fromkeys(names, "")
        for values in (empty | {first: "ab"}, empty | {first: "a", other: "b"}):
            digests.add(msgspec.structs.replace(IDENTITY, **values).digest())
    count = len(names)
    assert len(digests) == count + count * (count - 1)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_key_counts(part):
    keys = {block_key(IDENTITY.digest(), HASH)}
    for value in PARTS[part]:
        keys.add(block_key(IDENTITY.digest(), **{"block_hash": HASH} | {part: value}))
    assert len(keys) == 1 + len(PARTS[part])


def test_no_two_combinations_have_a_key():
    choices = [[HASH, bytes(32)], [None, (0, 1)], [b"", b"a"]]
    keys = set()
    for block_hash, layers, secret in itertools.product(*choices):
        key = block_key(IDENTITY.digest(), block_hash, layers=layers, secret=secret)
        assert len(key) == 32
        keys.add(key)
    assert len(keys) == 2**3


def test_the_identity_counts():
    other = msgspec.structs.replace(IDENTITY, tensor_rank=1)
    assert block_key(IDENTITY.digest(), HASH) != block_key(other.digest(), HASH)


def hashed(lora=None, salt=None, features=(), tokens=b"\1\0\0\0\2\0\0\0"):
    """Return the hash of a first block of two tokens."""
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(),
        lora=lora,
        cache_salt=salt,
        features=features,
    )
    return hash_block(NO_PARENT, tokens, extra_keys(request, 0, 1, 2).get(0, b""))


def test_an_adapter_is_keyed_by_its_content_and_not_by_its_name():
    key = hashed(LoRARequest("poet", 1, content_hash="aa"))
    assert hashed(LoRARequest("other", 2, content_hash="aa")) == key
    assert hashed(LoRARequest("poet", 1, content_hash="bb")) != key
    keys = {
        block_key(IDENTITY.digest(), hashed(LoRARequest("poet", 1, content_hash=content)))
        for content in ("aa", "bb", "")
    }
    assert len(keys) == 3


def test_an_adapter_without_a_hash_of_its_content_never_meets_one_that_has_it():
    loras = [
        None,
        LoRARequest("aa", 1),
        LoRARequest("aa", 2),
        LoRARequest("ab", 1),
        LoRARequest("content", 1),
        LoRARequest("x", 1, content_hash="aa"),
        LoRARequest("x", 1, content_hash="name"),
    ]
    assert len({hashed(lora) for lora in loras}) == len(loras)


def test_who_changes_the_formula_gives_it_another_version():
    """Blocks outlive the engine: a new formula must not find old blocks under its keys."""
    feature = MultiModalFeature("image", 0, 1)
    digests = {
        "identity": IDENTITY.digest(),
        "tokens": hashed(),
        "salt": hashed(salt="s"),
        "feature": hashed(features=[feature]),
        "adapter": hashed(LoRARequest("poet", 1, content_hash="aa")),
        "adapter by name": hashed(LoRARequest("poet", 1)),
        "second block": hash_block(hashed(), b"\3\0\0\0\4\0\0\0"),
        "key": block_key(IDENTITY.digest(), HASH),
        "key of a part": block_key(IDENTITY.digest(), HASH, layers=(0, 1), secret=b"s"),
    }
    assert {name: digest.hex() for name, digest in digests.items()} == DIGESTS[HASH_VERSION]
