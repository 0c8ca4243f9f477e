"""A client that checks nothing: raw sockets before a real engine process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from hardpoint import typed
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, EngineCoreRequest, SamplingParams
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.launch import Launch
from hardpoint.process.protocol import (
    END_MARKERS,
    EngineAddresses,
    RequestType,
    UtilityCall,
    UtilityOutput,
)

IDENTITY = b"\x00\x00"
_LIMIT_MS = 60_000


@contextlib.contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Redirect the standard error of processes that start now to a file."""
    saved = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class RawClient:
    """Sends raw frames, and reads the answers."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        log_level: str = "WARNING",
        waits: bool = True,
        **options: Any,
    ) -> None:
        """Start an engine, with `options` of EngineProcess.start; wait for its first word."""
        self.context = zmq.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="raw-")
        folder = Path(self._folder.name)
        addresses = EngineAddresses(inputs=[f"ipc://{folder}/in"], outputs=[f"ipc://{folder}/out"])
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(addresses.inputs[0])
        self.pull = self.context.socket(zmq.PULL)
        self.pull.bind(addresses.outputs[0])
        typed_config = typed.convert(config, EngineConfig, path="")
        manifest = resolve_plugins(typed_config, ConfigSources()).manifest
        self.log = folder / "log"
        with _standard_error_to(self.log):
            self.process = EngineProcess.start(
                Launch(
                    address=msgspec.json.encode(addresses).decode(),
                    manifest=manifest,
                    config=msgspec.to_builtins(typed_config),
                    log_level=log_level,
                ),
                **options,
            )
        self._decoder: Decoder[Any] = Decoder(EngineCoreOutputs | UtilityOutput)
        self._calls = self._read = 0
        if not waits:
            return
        assert self.router.poll(60_000), "the engine said nothing"
        assert self.router.recv_multipart()[0] == IDENTITY

    def logged(self) -> str:
        """The standard error of the engine since the last call."""
        lines = self.log.read_text()[self._read :]
        self._read += len(lines)
        return lines

    def send(self, *frames: bytes) -> None:
        """Send frames; the first should be a request type."""
        self.router.send_multipart([IDENTITY, *frames])

    def send_message(self, kind: RequestType, message: Any) -> None:
        """Send a message that is well formed, with any contents."""
        self.send(kind, *map(bytes, Encoder().encode(message)))

    def add(self, request_id: str, **fields: Any) -> None:
        """Send a request; every field may be anything."""
        self.send_message(RequestType.ADD, request(request_id, **fields))

    def receive(self, limit_ms: int = _LIMIT_MS) -> EngineCoreOutputs | UtilityOutput:
        """Wait for the next message."""
        assert self.pull.poll(limit_ms), "the engine said nothing"
        frames = self.pull.recv_multipart()
        assert frames[0] not in END_MARKERS, f"the engine ended:\n{self.logged()[-4000:]}"
        return self._decoder.decode(frames)

    def call(self, method: str, *args: Any) -> UtilityOutput:
        """Call a utility and wait for its answer; earlier messages are dropped."""
        self._calls += 1
        self.send_message(RequestType.UTILITY, UtilityCall(0, self._calls, method, list(args)))
        while True:
            answer = self.receive()
            if isinstance(answer, UtilityOutput) and answer.call_id == self._calls:
                return answer

    def ends(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """Wait until requests end; return their last outputs with all their tokens."""
        wanted = set(request_ids)
        tokens: dict[str, list[int]] = {name: [] for name in wanted}
        ended: dict[str, Any] = {}
        until = time.monotonic() + 60
        while len(ended) < len(wanted):
            assert time.monotonic() < until, f"only {sorted(ended)} ended"
            message = self.receive()
            for output in getattr(message, "outputs", []):
                if output.request_id not in wanted:
                    continue
                tokens[output.request_id].extend(output.new_token_ids)
                if output.finished:
                    output.new_token_ids = tokens[output.request_id]
                    ended[output.request_id] = output
        return ended

    def close(self) -> None:
        """End the engine and the sockets."""
        self.process.close()
        self.context.destroy(linger=0)
        self._folder.cleanup()


def request(request_id: str, **fields: Any) -> EngineCoreRequest:
    """A request that is right, but for the fields that are given."""
    right: dict[str, Any] = {
        "request_id": request_id,
        "prompt_token_ids": [1, 2, 3],
        "params": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=1),
        "arrival_time": time.monotonic(),
    }
    return EngineCoreRequest(**right | fields)
