"""Memory of step parts that belongs to blocks: moved with these, and part of their identity."""

from __future__ import annotations

import pytest
from support.core.scripted_connector import Script, use

from hardpoint.errors import PluginFaultError
from hardpoint.testing import scripted_engine

HERE = "support.plugins.block_memory"
USES = {"kv_connector": {"use": "support.core.scripted_connector:ScriptedConnector"}}


def opened(scripted, *parts, **extra):
    return scripted_engine(
        scripted, USES | extra | {"plugins": {"enable": [f"{HERE}:{part}" for part in parts]}}
    )


def seen(scripted, *parts, **extra):
    """Return the widths of the views of the first layer, and the identity of the blocks."""
    script = use(Script())
    opened(scripted, *parts, **extra).close()
    (half,) = [half for half in script.halves if half.name == "worker"]
    return [view.shape[1] for view in half.registered], half.context.identity


def test_it_is_moved_and_part_of_the_identity(scripted):
    widths, identity = seen(scripted)
    with_memory, other = seen(scripted, "KeepsMemory")
    with_entries, canary = seen(scripted, debug={"kv_canary": True})
    assert with_memory == [*widths, 4]
    assert with_entries == [*widths, 8 * identity.block_size]
    assert other.layer_bytes == tuple(size + 4 for size in identity.layer_bytes)
    assert len({x.digest() for x in (identity, other, canary)}) == 3


EXPECTED = r"gave .*, expected 1 uint8 tensors \[num_blocks, bytes\]"
WRONG = {
    "KeepsTooFew": EXPECTED,
    "KeepsOtherBlocks": EXPECTED,
    "KeepsIntegers": EXPECTED,
    "KeepsNone": EXPECTED,
    "KeepsNothingThen": "failed: ValueError: no memory today",
}


@pytest.mark.parametrize(("part", "message"), WRONG.items(), ids=WRONG)
def test_a_wrong_one_is_refused_by_name(scripted, part, message):
    use(Script())
    with pytest.raises(PluginFaultError, match=rf"(?s){part}.*its block_memory\(\) {message}"):
        opened(scripted, part)


def test_it_is_not_asked_for_where_nothing_moves_blocks(scripted):
    scripted_engine(scripted, {"plugins": {"enable": [f"{HERE}:KeepsNothingThen"]}}).close()
