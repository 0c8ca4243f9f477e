"""Microseconds of messages between processes, compared with vLLM where it is installed.

    python benchmarks/transport.py                        # the whole table
    python benchmarks/transport.py --rounds 100 --json result.json

* request: one request with N prompt tokens and default sampling parameters.
* outputs: the outputs of one step for 256 requests, a token each.
* tensor: embeddings of a request, 1k x 576 in bfloat16, which are sent without a copy.

"encode" writes into a reused buffer; "decode" is typed. "round trip" is both with a ZMQ socket pair
over ipc between them, in one thread: encode, send, receive, decode.

The engines take turns message by message, in one process. Printed are medians: of processor time
for the codec, of wall time for the round trip.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from rich.console import Console
from rich.table import Table
from scheduling_load import timed

from hardpoint.host.system.encoding import Decoder, Encoder, SendTracker
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SamplingParams,
)

PROMPTS = (1_024, 32_768)
OUTPUTS = 256
VOCABULARY = 49_152
EMBEDDINGS = (1_024, 576)
WARM_UP = 20

Message = tuple[str, Any, Any]
"""A title, the message, and the type to decode to."""


def prompt(length: int) -> list[int]:
    """Return a prompt of random tokens."""
    return random.Random(length).choices(range(VOCABULARY), k=length)


def request_id(number: int) -> str:
    """Return a request id like those of the frontend."""
    return f"{number}-{number * 2654435761 % 2**32:08x}"


def hardpoint_messages() -> list[Message]:
    """Return the messages of Hardpoint."""
    messages: list[Message] = [
        (
            f"request, {length} tokens",
            EngineCoreRequest(
                request_id=request_id(length),
                prompt_token_ids=prompt(length),
                params=SamplingParams(max_tokens=128, seed=1),
                eos_token_ids=[2],
                arrival_time=1.5,
            ),
            EngineCoreRequest,
        )
        for length in PROMPTS
    ]
    outputs = [
        EngineCoreOutput(request_id=request_id(number), new_token_ids=[token])
        for number, token in enumerate(prompt(OUTPUTS))
    ]
    messages.append(
        (f"outputs, {OUTPUTS} requests", EngineCoreOutputs(outputs=outputs), EngineCoreOutputs)
    )
    messages.append(("tensor, 1.2 MB", torch.zeros(EMBEDDINGS, dtype=torch.bfloat16), torch.Tensor))
    return messages


def vllm_messages() -> list[Message]:
    """Return the same messages as vLLM's types."""
    from vllm import SamplingParams as VllmParams
    from vllm.v1 import engine

    messages: list[Message] = [
        (
            f"request, {length} tokens",
            engine.EngineCoreRequest(
                request_id=request_id(length),
                prompt_token_ids=prompt(length),
                mm_features=None,
                sampling_params=VllmParams(max_tokens=128, seed=1),
                pooling_params=None,
                arrival_time=1.5,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
            engine.EngineCoreRequest,
        )
        for length in PROMPTS
    ]
    outputs = [
        engine.EngineCoreOutput(request_id=request_id(number), new_token_ids=[token])
        for number, token in enumerate(prompt(OUTPUTS))
    ]
    messages.append(
        (
            f"outputs, {OUTPUTS} requests",
            engine.EngineCoreOutputs(outputs=outputs),
            engine.EngineCoreOutputs,
        )
    )
    messages.append(("tensor, 1.2 MB", torch.zeros(EMBEDDINGS, dtype=torch.bfloat16), torch.Tensor))
    return messages


class Sockets:
    """Two ends of a connection over ipc, both in this thread."""

    def __init__(self, folder: str, name: str) -> None:
        """Connect."""
        self._context = zmq.Context(io_threads=2)
        self.sender, self.receiver = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.receiver.bind(f"ipc://{folder}/{name}")
        self.sender.connect(f"ipc://{folder}/{name}")

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)


class Transport:
    """A codec for one message type; `tracker` is None for vLLM, which has none."""

    def __init__(
        self, encoder: Any, decoder: Any, tracker: SendTracker | None, sockets: Sockets
    ) -> None:
        """Store the codec and the sockets."""
        self._encoder, self._decoder = encoder, decoder
        self._tracker = tracker
        self._sockets = sockets
        self._buffer = bytearray()

    def measure(self, message: Any) -> tuple[float, float, float]:
        """Return the microseconds of encoding, of decoding, and of a round trip.

        The decoded message stays alive during the round trip, as one does while the next arrives.
        """
        encoding, frames = timed(lambda: self._encoder.encode_into(message, self._buffer))
        frames = [memoryview(bytearray(frame)) for frame in frames]  # like received ones
        decoding, _decoded = timed(lambda: self._decoder.decode(frames))
        start = time.perf_counter()
        self._round_trip(message)
        return encoding, decoding, (time.perf_counter() - start) * 1e6

    def _round_trip(self, message: Any) -> None:
        sockets, tracker = self._sockets, self._tracker
        if tracker is None:
            frames = self._encoder.encode_into(message, bytearray())
            sockets.sender.send_multipart(frames, copy=False)
        else:
            buffer = tracker.buffer()
            frames = self._encoder.encode_into(message, buffer)
            sockets.sender.send_multipart(tracker.frames(frames, buffer), copy=False)
        self._decoder.decode(sockets.receiver.recv_multipart(copy=False))


def measure(rounds: int, with_vllm: bool) -> list[dict[str, Any]]:
    """Measure every message with every engine, in turns."""
    results = []
    makers: dict[str, Callable[[], list[Message]]] = {"hardpoint": hardpoint_messages}
    if with_vllm:
        makers["vllm"] = vllm_messages
    everything = {name: make() for name, make in makers.items()}
    for number, (title, *_) in enumerate(everything["hardpoint"]):
        with tempfile.TemporaryDirectory() as folder:
            measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in makers}
            sockets = {name: Sockets(folder, name) for name in makers}
            transports = {
                name: transport(name, everything[name][number][2], sockets[name]) for name in makers
            }
            gc.collect()
            gc.freeze()
            for turn in range(WARM_UP + rounds):
                for name in random.sample(list(makers), len(makers)):
                    times = transports[name].measure(everything[name][number][1])
                    if turn >= WARM_UP:
                        measured[name].append(times)
            gc.unfreeze()
            for pair in sockets.values():
                pair.close()
        result: dict[str, Any] = {"message": title}
        for name, times in measured.items():
            medians = (statistics.median(column) for column in zip(*times, strict=True))
            result[name] = dict(zip(("encode", "decode", "round_trip"), medians, strict=True))
        results.append(result)
    return results


def transport(name: str, type_: Any, sockets: Sockets) -> Transport:
    """Return an engine's transport for one type of message."""
    if name == "hardpoint":
        return Transport(Encoder(), Decoder(type_), SendTracker(), sockets)
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return Transport(MsgpackEncoder(), MsgpackDecoder(type_), None, sockets)


def show(results: list[dict[str, Any]], names: list[str]) -> None:
    """Print the table."""
    table = Table(title="microseconds per message (ratios: vLLM / Hardpoint)")
    table.add_column("message")
    for name in names:
        for title in (f"{name} encode", "decode", "round trip"):
            table.add_column(title, justify="right")
    table.add_column("ratios", justify="right")
    for result in results:
        cells = [result["message"]]
        for name in names:
            cells += [f"{value:,.1f}" for value in result[name].values()]
        if "vllm" in result:
            hardpoint, vllm = result["hardpoint"], result["vllm"]
            cells.append(" ".join(f"{vllm[key] / hardpoint[key]:.1f}x" for key in hardpoint))
        table.add_row(*cells)
    Console(width=140).print(table)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=500, help="counted messages (default 500)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with_vllm = importlib.util.find_spec("vllm") is not None
    logging.disable(logging.WARNING)
    if not with_vllm:
        print("vLLM is not installed: its codec is not measured", file=sys.stderr)
    results = measure(arguments.rounds, with_vllm)
    show(results, ["hardpoint", "vllm"] if with_vllm else ["hardpoint"])
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"rounds": arguments.rounds, "messages": results}, indent=2)
        )


if __name__ == "__main__":
    main()
