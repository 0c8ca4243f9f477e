"""The checklist's lines on the batch update record, its builder and the state helper."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint import SamplingParams
from hardpoint.plugins import (
    BatchUpdate,
    Move,
    RowMap,
)
from hardpoint.plugins.sampling.rows import Added, Moved
from hardpoint.toolkit.batches.update_builder import BatchUpdateBuilder

PARAMS = SamplingParams()


def added(row: int, value: object = "state") -> Added:
    return Added(row, PARAMS, [1], [value])


def books(**states) -> RowMap:
    """A map with the given states, by `r<row>`; an added request's state is its only output."""
    rows = RowMap(lambda a: a.output_token_ids[0])
    adds = tuple(added(int(name[1:]), value) for name, value in states.items())
    rows.apply(BatchUpdate(len(adds), added=adds))
    return rows


def state(rows: RowMap) -> dict:
    return {row: rows[row] for row in rows}


class TestRecord:
    def test_rebinding_a_field_fails(self):
        update = BatchUpdate(1, (0,))
        with pytest.raises(dataclasses.FrozenInstanceError):
            update.removed = ()

    def test_it_is_hashable_and_its_sequences_are_immutable(self):
        update = BatchUpdate(2, (1,), (added(0),), (Moved(1, 0, Move.SWAP),))
        assert hash(update) == hash(update)
        for sequence in (update.removed, update.added, update.moved):
            assert isinstance(sequence, tuple)

    def test_the_output_list_is_live(self):
        outputs = [1]
        entry = Added(0, PARAMS, None, outputs)
        outputs.append(2)
        assert entry.output_token_ids == [1, 2]
        assert entry.prompt_token_ids is None  # a prompt that came as embeddings


class TestBuilder:
    def test_removing_after_the_removed_were_read_is_an_error(self):
        for read in (lambda b: b.peek_removed(), lambda b: b.pop_removed()):
            builder = BatchUpdateBuilder()
            builder.remove(3)
            read(builder)
            with pytest.raises(RuntimeError, match="row 4 cannot be removed"):
                builder.remove(4)

    def test_peek_leaves_pop_takes_the_lowest(self):
        builder = BatchUpdateBuilder()
        for row in (5, 2, 9):
            builder.remove(row)
        assert builder.peek_removed() == 2
        assert [builder.pop_removed() for _ in range(4)] == [2, 5, 9, None]
        assert builder.peek_removed() is None

    def test_reading_removals_locks_nothing_while_there_are_none(self):
        builder = BatchUpdateBuilder()
        assert builder.peek_removed() is None
        assert builder.pop_removed() is None
        builder.remove(1)
        builder.remove(2)

    def test_a_reused_row_is_an_addition_and_no_removal(self):
        builder = BatchUpdateBuilder()
        builder.remove(1)
        builder.remove(4)
        row = builder.pop_removed()
        builder.add(added(row))
        update = builder.get_and_reset(5)
        assert update.removed == (4,)
        assert [a.row for a in update.added] == [1]

    def test_removed_rows_are_issued_highest_first_even_if_nobody_read_them(self):
        builder = BatchUpdateBuilder()
        for row in (1, 7, 3):
            builder.remove(row)
        assert builder.get_and_reset(9).removed == (7, 3, 1)

    def test_nothing_gives_none_and_a_snapshot_stays_as_it_is(self):
        builder = BatchUpdateBuilder()
        assert builder.get_and_reset(0) is None
        builder.remove(1)
        first = builder.get_and_reset(1)
        builder.remove(2)
        builder.add(added(3))
        assert (first.removed, first.added) == ((1,), ())

    def test_after_a_reset_rows_may_be_removed_again(self):
        builder = BatchUpdateBuilder()
        builder.remove(1)
        assert builder.peek_removed() == 1
        assert builder.get_and_reset(2).removed == (1,)
        builder.remove(2)
        assert builder.get_and_reset(3).removed == (2,)

    def test_removals_that_were_all_taken_give_none(self):
        builder = BatchUpdateBuilder()
        builder.remove(0)
        builder.pop_removed()
        assert builder.get_and_reset(1) is None


class TestRowMap:
    def test_no_update_is_no_change(self):
        assert books(r0="a").apply(None) is False

    def test_adding_without_state_clears_and_tells_only_if_there_was_one(self):
        rows = books(r0="a")
        assert rows.apply(BatchUpdate(2, added=(added(1, None),))) is False
        assert rows.apply(BatchUpdate(2, added=(added(0, None),))) is True
        assert state(rows) == {}

    def test_removing_tells_only_if_it_was_tracked(self):
        rows = books(r0="a")
        assert rows.apply(BatchUpdate(1, removed=(5,))) is False
        assert rows.apply(BatchUpdate(0, removed=(0,))) is True

    def test_a_state_that_is_falsy_is_a_state(self):
        rows = books(r0=0, r1={})
        assert state(rows) == {0: 0, 1: {}}
        assert rows.apply(BatchUpdate(1, removed=(0,))) is True
        assert rows.apply(BatchUpdate(1, moved=(Moved(1, 0, Move.UNIDIRECTIONAL),))) is True
        assert state(rows) == {0: {}}

    def test_removed_then_added_keeps_a_new_request_in_a_row_of_both(self):
        rows = books(r1="old")
        assert rows.apply(BatchUpdate(2, removed=(1,), added=(added(1, "new"),))) is True
        assert state(rows) == {1: "new"}

    def test_one_way_moves_empty_their_source(self):
        rows = books(r0="a", r1="b")
        rows.apply(BatchUpdate(1, moved=(Moved(1, 0, Move.UNIDIRECTIONAL),)))
        assert state(rows) == {0: "b"}

    def test_a_one_way_move_from_an_empty_row_drops_the_destination_and_tells(self):
        rows = books(r0="a")
        assert rows.apply(BatchUpdate(1, moved=(Moved(3, 0, Move.UNIDIRECTIONAL),))) is True
        assert state(rows) == {}
        assert rows.apply(BatchUpdate(1, moved=(Moved(3, 0, Move.UNIDIRECTIONAL),))) is False

    def test_swaps_exchange_also_with_an_empty_side(self):
        rows = books(r0="a", r1="b")
        rows.apply(BatchUpdate(2, moved=(Moved(0, 1, Move.SWAP),)))
        assert state(rows) == {0: "b", 1: "a"}
        rows.apply(BatchUpdate(3, moved=(Moved(0, 2, Move.SWAP),)))
        assert state(rows) == {1: "a", 2: "b"}
        rows.apply(BatchUpdate(3, moved=(Moved(0, 1, Move.SWAP),)))
        assert state(rows) == {0: "a", 2: "b"}

    def test_chained_moves_apply_in_order(self):
        rows = books(r0="a", r1="b", r2="c")
        moves = (
            Moved(2, 0, Move.SWAP),
            Moved(0, 1, Move.SWAP),
            Moved(1, 3, Move.UNIDIRECTIONAL),
        )
        rows.apply(BatchUpdate(4, moved=moves))
        assert state(rows) == {0: "b", 2: "a", 3: "c"}

    def test_the_walk_through_of_the_text_ends_as_it_should(self):
        """Values 0.1, 0, 0.05; remove 1; add 1 with 0.2 and 3 with 0; move 2 to 3."""
        rows = books(r0=0.1, r2=0.05)
        update = BatchUpdate(
            4,
            removed=(1,),
            added=(added(1, 0.2), added(3, None)),
            moved=(Moved(2, 3, Move.UNIDIRECTIONAL),),
        )
        rows.apply(update)
        assert state(rows) == {0: 0.1, 1: 0.2, 3: 0.05}
        assert len(rows) == 3

    @examples(200)
    @given(st.data())
    def test_against_a_dict_of_rows(self, data):
        rows = RowMap(lambda a: a.output_token_ids[0])
        oracle: dict[int, object] = {}
        row = st.integers(0, 5)
        for _ in range(data.draw(st.integers(1, 8))):
            removed = data.draw(st.lists(row, unique=True, max_size=3))
            adds = data.draw(st.lists(st.tuples(row, st.none() | st.integers(0, 9)), max_size=3))
            moves = data.draw(st.lists(st.tuples(row, row, st.sampled_from(Move)), max_size=4))
            moves = [move for move in moves if move[0] != move[1]]
            before = dict(oracle)
            touched = False
            for place in removed:
                touched |= oracle.pop(place, None) is not None
            for place, value in adds:
                touched |= oracle.pop(place, None) is not None or value is not None
                if value is not None:
                    oracle[place] = value
            for source, target, kind in moves:
                one, other = oracle.pop(source, None), oracle.pop(target, None)
                touched |= one is not None or other is not None
                if one is not None:
                    oracle[target] = one
                if kind is Move.SWAP and other is not None:
                    oracle[source] = other
            changed = rows.apply(
                BatchUpdate(
                    6,
                    tuple(sorted(removed, reverse=True)),
                    tuple(added(*pair) for pair in adds),
                    tuple(Moved(*move) for move in moves),
                )
            )
            assert state(rows) == oracle
            assert changed == touched
            assert changed or oracle == before
