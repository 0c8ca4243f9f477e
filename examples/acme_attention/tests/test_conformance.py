"""The package keeps every rule of the engine for its kind: the conformance kit checks it."""

from acme_attention.by_sequence import BySequence
from hypothesis import strategies as st

from hardpoint.testing import AttentionBackendSuite

pytest_plugins = ["hardpoint.testing"]


class TestBySequence(AttentionBackendSuite):
    backend = BySequence
    arguments = st.builds(BySequence.Arguments, window=st.integers(1, 12))
