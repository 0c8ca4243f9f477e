"""The processor keeps every rule of the engine: the conformance kit checks it."""

from hardpoint_wasm import Wasm, WasmSenders
from hypothesis import strategies as st
from modules import COUNTING, SUCCESSOR, text

from hardpoint.plugins import SamplingParams
from hardpoint.testing import HookSuite, LogitsProcessorSuite

pytest_plugins = ["hardpoint.testing"]


class TestWasm(LogitsProcessorSuite):
    processor = Wasm
    options = {"accept": "any"}
    examples = 0.3
    arguments = st.sampled_from(
        [Wasm.Arguments(module=text(SUCCESSOR)), Wasm.Arguments(module=text(COUNTING))]
    )
    params = st.builds(SamplingParams, max_tokens=st.none())


class TestWasmSenders(HookSuite):
    hooks = WasmSenders
    options = {"senders": ["ann"]}
