"""The built-in poolers pass the suite."""

from __future__ import annotations

from hypothesis import strategies as st

from hardpoint.builtin_plugins.poolers import All, Cls, Last, Mean, Step
from hardpoint.testing import PoolerSuite


class TestLast(PoolerSuite):
    pooler = Last


class TestCls(PoolerSuite):
    pooler = Cls


class TestMean(PoolerSuite):
    pooler = Mean


class TestAll(PoolerSuite):
    pooler = All


class TestStep(PoolerSuite):
    pooler = Step
    arguments = st.builds(dict, step_tag_id=st.none() | st.integers(0, 4))
