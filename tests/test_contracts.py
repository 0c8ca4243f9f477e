"""The interfaces of each contract number are those that were recorded when it was published."""

from __future__ import annotations

import copy

import pytest
from support.interfaces import (
    DATA,
    NAMES,
    USED_BY,
    breaking,
    changelog,
    data,
    interfaces,
    recorded,
    unexplained,
    updated,
)

from hardpoint.host.registry.kinds import KINDS

HELP = "PYTHONPATH=tests python -m support.interfaces"


def test_no_interface_has_changed_without_a_new_number():
    _, changes = updated(recorded())
    assert not changes, (
        "\n".join(changes)
        + "\nraise the contract of the kind in host/registry/kinds.py, adapt what "
        f"states the one before in host/registry/adapters/, and run {HELP}"
    )


def test_the_record_is_up_to_date():
    record, _ = updated(recorded())
    assert record == recorded(), f"run {HELP}"


def test_every_accepted_number_is_recorded():
    accepted = {
        name: {str(n) for n in (kind.contract - 1, kind.contract) if n > 0}
        for name, kind in KINDS.items()
    }
    record = recorded()
    assert {name: set(record[name]) for name in KINDS} == accepted


def test_numbers_before_the_previous_one_leave_the_record():
    record = recorded()
    record["schedulers"]["0"] = record["schedulers"]["1"]
    assert updated(record) == (recorded(), [])


BEFORE = {
    "Policy": {"key": "abstract method (request: Request) -> Any", "group": "method () -> str"},
    "Context": {"name": "required str", "seed": "optional int"},
}


def changed(owner, name, text):
    now = copy.deepcopy(BEFORE)
    if text is None:
        del now[owner][name]
    else:
        now[owner][name] = text
    return breaking(BEFORE, now)


@pytest.mark.parametrize(
    ("owner", "name", "text", "message"),
    [
        ("Policy", "group", None, "Policy.group is gone"),
        ("Context", "seed", None, "Context.seed is gone"),
        ("Policy", "drop", "abstract method () -> None", "Policy.drop is new and abstract"),
        ("Context", "ops", "required Ops", "Context.ops is new and required"),
        ("Context", "seed", "required int", "'optional int' and is 'required int'"),
        ("Policy", "group", "method (request: Request) -> str", "Policy.group was"),
        ("Policy", "group", "abstract method () -> str", "Policy.group was"),
    ],
)
def test_a_change_that_breaks_plugins_is_found(owner, name, text, message):
    (change,) = changed(owner, name, text)
    assert message in change


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        ("Policy", "admit", "method () -> None"),
        ("Context", "clock", "optional Clock"),
    ],
)
def test_an_optional_addition_breaks_nothing(owner, name, text):
    assert changed(owner, name, text) == []


def test_a_member_of_a_real_kind_that_goes_is_found():
    record = recorded()
    record["eviction_policies"]["2"]["EvictionPolicy"]["replaced"] = "method () -> None"
    record[NAMES]["NoSuchName"] = ""
    missing = "eviction_policies: EvictionPolicy.replaced changed, and its section of "
    missing += "docs/contract-history.md "
    assert updated(record)[1] == [
        "eviction_policies, contract 2: EvictionPolicy.replaced is gone",
        f"{missing}has neither name",
        "hardpoint.plugins.NoSuchName is gone",
    ]
    sections = {"eviction_policies": "### `eviction_policies`\n\n- `replaced(block_id)` is gone.\n"}
    assert updated(record, ["eviction_policies"], sections)[1] == [
        "hardpoint.plugins.NoSuchName is gone"
    ]


ADDED = {"Policy": BEFORE["Policy"] | {"admit": "method () -> None"}, "Context": BEFORE["Context"]}


@pytest.mark.parametrize(
    ("before", "section", "expected"),
    [
        (BEFORE, "### `ops`: contract 1\n\n- New: `admit`.\n", []),
        (BEFORE, "### `ops`: contract 1\n\n- `Policy` has more.\n", []),
        (BEFORE, "### `ops`: contract 1\n\n- They admit requests.\n", ["Policy.admit changed"]),
        (BEFORE, "", ["Policy.admit changed"]),
        (None, "", []),
    ],
)
def test_an_addition_needs_a_line_under_its_kind(before, section, expected):
    found = unexplained("ops", before, ADDED, {"ops": section})
    assert [text.partition(",")[0] for text in found] == expected


def test_a_new_number_needs_a_heading():
    sections = changelog()
    for kind in KINDS.values():
        assert unexplained(kind.name, None, {}, sections) == []
    assert unexplained("executors", None, {}, {"executors": "### `executors`: contract 1\n"}) == [
        "docs/contract-history.md has no heading with `executors`, contract 2"
    ]


def test_interfaces_have_methods_and_contexts():
    eviction = interfaces()["eviction_policies"]
    assert eviction["EvictionPolicy"]["evict"] == "abstract method (count: int) -> Sequence[int]"
    assert eviction["EvictionContext"]["name"] == "required str"
    assert interfaces()["hooks"]["request_finished"] == {"output": "argument RequestOutput"}


@pytest.mark.parametrize(
    ("owner", "name", "text", "kinds"),
    [
        ("Request", "num_blocks", "attribute int", "schedulers 2, scheduling_policies 1"),
        ("KVCacheManager", "touch", "method () -> None", "schedulers 2"),
        ("SchedulerOutput", "num_draft_tokens", "attribute int", "executors 2, kv_connectors 1"),
        ("CachedRequests", "resumed", "attribute int", "executors 2, kv_connectors 1"),
        ("ModelRunnerOutput", "hidden", "optional Any", "executors 2, schedulers 2"),
        ("PrefixCacheStats", "misses", "attribute int", "hooks 1, schedulers 2, stat_sinks 1"),
        ("RequestStatus", "SWAPPED", "member", "schedulers 2, scheduling_policies 1"),
    ],
)
def test_a_member_of_data_that_goes_is_found(owner, name, text, kinds):
    record = recorded()
    record[DATA][owner][name] = text
    (change,) = updated(record)[1]
    assert change.startswith(f"{owner}.{name} is gone; contracts that use it: ")
    assert kinds in change
    used_by = list(record[DATA][owner][USED_BY])
    assert updated(record, used_by)[1] == []
    for kind in used_by:  # the record is of the numbers before
        record[DATA][owner][USED_BY][kind] -= 1
    assert updated(record)[1] == []


def test_data_that_components_make_may_get_no_required_member():
    now = data()
    assert now["Edits"]["row"] == "required Sequence[int]"  # plugins make them
    assert now["GrammarState"]["advance"].startswith("abstract method ")
    assert now["SamplingRows"]["seeds"] == "torch.Tensor"  # the engine does
    assert now["KVCacheManager"]["admit"].startswith("method ")


def test_a_class_of_data_that_goes_is_found():
    record = recorded()
    record[DATA]["Gone"] = {USED_BY: {"schedulers": 2}, "x": "attribute int"}
    assert updated(record)[1] == ["Gone is gone; contracts that use it: schedulers 2"]
