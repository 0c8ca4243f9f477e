"""Keys of KV blocks: all that the bytes of a block depend on, and each part on its own."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from hardpoint.plugins.kv_connector import BlockIdentity, block_key

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
DIGEST = "011d0e963bafb95872ecc2850357f7d51a124ee0f92bfc9187d37682c9d46e02"
KEY = "d9b95d62583f86f0852fab8a03bbe2bd5b3c64bef70f31066bd8e0c210796d31"
PARTS = {
    "block_hash": [bytes(32), HASH[:31]],
    "layers": [(0, 1), (1, 2), (0, 2)],
    "adapter": ["", "a", "ab"],
    "features": [["a"], ["a", "b"], ["ab"], ["b", "a"]],
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
    for one, other in itertools.permutations(names, 2):
        empty = dict.fromkeys(names, "")
        for values in (empty | {one: "ab"}, empty | {one: "a", other: "b"}):
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
    choices = [[HASH, bytes(32)], [None, (0, 1)], [None, "a"], [[], ["a"]], [b"", b"a"]]
    keys = set()
    for block_hash, layers, adapter, features, secret in itertools.product(*choices):
        key = block_key(
            IDENTITY.digest(),
            block_hash,
            layers=layers,
            adapter=adapter,
            features=features,
            secret=secret,
        )
        assert len(key) == 32
        keys.add(key)
    assert len(keys) == 2**5


def test_the_identity_counts():
    other = msgspec.structs.replace(IDENTITY, tensor_rank=1)
    assert block_key(IDENTITY.digest(), HASH) != block_key(other.digest(), HASH)


def test_keys_are_those_of_other_processes_and_versions():
    """Blocks outlive the engine: who changes what a key is made of gives it another version."""
    assert IDENTITY.digest().hex() == DIGEST
    assert block_key(IDENTITY.digest(), HASH).hex() == KEY
