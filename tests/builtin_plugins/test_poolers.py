"""The built-in poolers pass the suite."""

from __future__ import annotations

from hypothesis import strategies as st
from support.searching import kit_examples

from hardpoint.builtin_plugins.poolers import All, Cls, Last, Mean, Step
from hardpoint.testing import PoolerSuite

EXAMPLES = kit_examples(0.2)


class TestLast(PoolerSuite):
    examples = EXAMPLES
    pooler = Last


class TestCls(PoolerSuite):
    examples = EXAMPLES
    pooler = Cls


class TestMean(PoolerSuite):
    examples = EXAMPLES
    pooler = Mean


class TestAll(PoolerSuite):
    examples = EXAMPLES
    pooler = All


class TestStep(PoolerSuite):
    examples = EXAMPLES
    pooler = Step
    arguments = st.builds(dict, step_tag_id=st.none() | st.integers(0, 4))
