"""A plugin of pytest that keeps the first test of each class and module that is no search."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first ones, and report the others as deselected."""
    firsts: dict[str, pytest.Item] = {}
    for item in sorted(items, key=_is_search):
        if item.get_closest_marker("skip") is None:
            firsts.setdefault(item.nodeid.rpartition("::")[0], item)
    selected = set(firsts.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = firsts.values()


def _is_search(item: pytest.Item) -> bool:
    """Return whether hypothesis calls the test many times."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
