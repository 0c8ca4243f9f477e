"""WebAssembly modules as logits processors, with limits of fuel and memory."""

from .processor import Wasm
from .senders import WasmSenders

__all__ = ["Wasm", "WasmSenders"]
