"""Two changes of a text are merged as git merges them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hardpoint.builtin_plugins.scaffold.merging import conflict_line, merge

TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "d"]), max_size=8).map("".join)


@given(TEXTS, TEXTS)
def test_a_change_of_one_side_alone_is_taken(base, changed):
    assert merge(base, changed, base, "new") == (changed, 0)
    assert merge(base, base, changed, "new") == (changed, 0)
    assert merge(base, changed, changed, "new") == (changed, 0)


@given(TEXTS, TEXTS, TEXTS)
def test_sides_may_be_exchanged(base, ours, other):
    (merged, conflicts), exchanged = (
        merge(base, ours, other, "new"),
        merge(base, other, ours, "new"),
    )
    assert conflicts == exchanged[1]
    assert (conflict_line(merged) is not None) == bool(conflicts)
    if not conflicts:
        assert merged == exchanged[0]


@given(st.lists(TEXTS, min_size=3, max_size=3), TEXTS, TEXTS)
def test_changes_apart_are_both_made(parts, ours, other):
    fixed = [f"{number}\n" * 2 for number in range(4)]

    def text(first, last):
        return "".join((fixed[0], first, fixed[1], parts[1], fixed[2], last, fixed[3]))

    whole = [
        part if part.endswith("\n") or not part else f"{part}\n" for part in (*parts, ours, other)
    ]
    parts[1] = whole[1]
    base = text(whole[0], whole[2])
    merged = merge(base, text(whole[3], whole[2]), text(whole[0], whole[4]), "new")
    assert merged == (text(whole[3], whole[4]), 0)


def test_a_conflict_has_both_sides_between_markers():
    merged, conflicts = merge("a\nb\nc", "a\nx\nc", "a\ny\nc", "template 2")
    assert conflicts == 1
    assert merged == "a\n<<<<<<< yours\nx\n=======\ny\n>>>>>>> template 2\nc"
    assert conflict_line(merged) == 2
