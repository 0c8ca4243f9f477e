"""Messages between the halves of KV transfer arrive as they were sent."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.builtin_plugins.step_parts.kv_transfer.messages import TransferReport
from hardpoint.plugins import KVTierStats
from hardpoint.plugins.kv_cache import AllBlocksCleared, BlockRemoved

names = st.frozensets(st.text(max_size=4), max_size=3)
hashes = st.lists(st.binary(max_size=4), max_size=2)


@given(
    st.builds(
        TransferReport,
        loaded=names,
        saved=names,
        invalid_block_ids=st.frozensets(st.integers(0, 9), max_size=3),
        failure=st.none() | st.text(max_size=4),
        left_out=st.booleans(),
        message=st.none() | st.binary(max_size=4),
        faults=st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=2),
        tiers=st.none()
        | st.dictionaries(st.text(max_size=3), st.builds(KVTierStats, hits=st.integers(0, 9))),
        events=st.lists(
            st.builds(AllBlocksCleared) | st.builds(BlockRemoved, block_hashes=hashes), max_size=2
        ),
    )
)
def test_a_report_arrives_as_it_was_sent(report):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=TransferReport) == report
