"""Two engines; one computes prompts for the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.testing import scripted_config
from support.waiting import PATIENCE_S

PREFILL, DECODE = "prefill", "decode"
REMOTE = {"do_remote_decode": True}
PATIENT = {"lookup_seconds": 60.0, "connect_seconds": 60.0, "wait_seconds": 60.0}
"""Options of the store with which no answer comes too late."""


def split_config(
    base: Mapping[str, Any], sockets: Path, name: str, **connector: Any
) -> dict[str, Any]:
    """Return the configuration of one of two engines that exchange blocks.

    Args:
        base: configuration of both.
        sockets: folder of their sockets.
        name: name of the engine.
        connector: options of the connector; `p2p` has those of the store, `kv_connector` more of
            that table.
    """
    p2p = {
        "listen": f"ipc://{sockets}/{name}.{{rank}}",
        "peers": {role: f"ipc://{sockets}/{role}.{{rank}}" for role in (PREFILL, DECODE)},
        "size_bytes": 1 << 24,
        "connect_seconds": 3.0,
        "wait_seconds": 3.0,
        **connector.pop("p2p", {}),
    }
    more = connector.pop("kv_connector", {})
    plugin = {**base.get("plugin", {}), "p2p": p2p, "stores": connector}
    return {
        **base,
        "kv_connector": {"engine_id": name, "stores": ["p2p"], **more},
        "plugin": plugin,
    }


def params(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **fields})


class Split:
    """Both engines in this process, and how a prompt goes through them."""

    def __init__(self, model: Path, sockets: Path, base: Mapping[str, Any] | None = None) -> None:
        self.model, self.sockets = model, sockets
        self.base = base or {**scripted_config(model), "kv_cache": {"num_blocks": 96}}
        self.engines: dict[str, LLM] = {}

    def open(self, name: str, **connector: Any) -> LLM:
        base = {**self.base, **connector.pop("base", {})}
        connector["p2p"] = {**PATIENT, **connector.get("p2p", {})}
        connector["kv_connector"] = {"load_seconds": 120.0, **connector.get("kv_connector", {})}
        connector.setdefault("timeout_seconds", 60.0)
        config = split_config(base, self.sockets, name, **connector)
        self.engines[name] = LLM(str(self.model), config=config)
        return self.engines[name]

    def both(self, **connector: Any) -> tuple[LLM, LLM]:
        return self.open(PREFILL, **connector), self.open(DECODE, **connector)

    def close(self, name: str) -> None:
        self.engines.pop(name).close()

    def close_all(self) -> None:
        for name in list(self.engines):
            self.close(name)

    def compute(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Let the first engine compute a prompt; return the parameters for the other one."""
        (output,) = self.engines[PREFILL].generate(
            [prompt], params(1, **fields), kv_transfer_params=REMOTE
        )
        assert output.kv_transfer_params is not None
        return output.kv_transfer_params

    def go_on(
        self, prompt: Any, transfer: Mapping[str, Any] | None, **fields: Any
    ) -> RequestOutput:
        """Let the other one go on with it."""
        (output,) = self.engines[DECODE].generate(
            [prompt], params(**fields), kv_transfer_params=transfer
        )
        return output


def tokens(output: RequestOutput) -> Sequence[int]:
    return output.outputs[0].token_ids


def steps_until(llm: LLM, condition: Callable[[], bool]) -> None:
    """Run steps until the threads' results were reported."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        llm.generate("x", params(1))
        time.sleep(0.01)
