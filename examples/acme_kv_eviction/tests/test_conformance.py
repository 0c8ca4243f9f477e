"""The package keeps every rule of the engine for its kind: the conformance kit checks it."""

from acme_kv_eviction import SnapKV, StreamingLLM
from hypothesis import strategies as st

from hardpoint.testing import StepPartSuite

pytest_plugins = ["hardpoint.testing"]


class TestStreamingLLM(StepPartSuite):
    part = StreamingLLM
    arguments = st.just({"sinks": 16, "window": 16, "stride": 8})


class TestSnapKV(StepPartSuite):
    part = SnapKV
    arguments = st.just({"budget": 16, "observed": 4, "delay": 8})
