"""Engines and peers as data, and the runner that measures them in turns.

A scenario of other benchmarks is a table of engines (`Peer`) and a table of loads. The runner opens
each engine in a process of its own, in the Python environment that it needs, and sends them the
same questions, round by round (`engine_process.py` answers them).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from backends import Batch
from engine_process import MARK, ClosedLoop

PROGRAM = str(Path(__file__).with_name("engine_process.py"))
_REST_S = 2.0  # workers of vLLM spin for 1 s after a request
Question = Batch | ClosedLoop


@dataclass(frozen=True)
class Peer:
    """An engine of a scenario."""

    backend: str = "hardpoint"  # name in `backends.ENGINES`
    options: Mapping[str, Any] = field(default_factory=dict)  # of the backend
    module: str = "hardpoint"  # Python module without which the engine is not installed
    gguf: bool = False  # whether it reads the GGUF file instead of the bf16 checkpoint
    low_bit: bool = False  # whether the weights have fewer bits than bf16


SCRIPTED = {
    "dtype": "float32",
    "load.use": "dummy",
    "attention.use": "hardpoint.testing:HistoryAttention",
    "plugins.enable": '[{use="hardpoint.testing:ScriptedModel", name="ScriptedForCausalLM"}]',
}
"""Settings of a command with the scripted model."""


def _quantized(weights: str, gguf: bool = False, **quantization: str) -> Peer:
    options = {"weights": weights, "config": {"quantization": quantization}}
    return Peer(options=options, gguf=gguf, low_bit=True)


PEERS: dict[str, Peer] = {
    "hardpoint": Peer(),
    "hardpoint-int8": _quantized("int8", use="int8"),
    "hardpoint-int8-rounded": _quantized("int8, activations too", use="int8", activations="int8"),
    "hardpoint-gguf": _quantized("4-bit GGUF", gguf=True),
    "hardpoint-gguf-rounded": _quantized("4-bit GGUF, 8-bit activations", True, activations="int8"),
    "vllm": Peer("vllm", module="vllm"),
    "transformers": Peer("transformers", module="transformers"),
    "llama-cpp-python": Peer("llama-cpp-python", module="llama_cpp", gguf=True, low_bit=True),
}
"""The engines of offline batches; other scenarios have tables of their own."""


PEER_OPTIONS: dict[str, Any] = {
    "peers": (list[str], "engines next to Hardpoint; default: all that are installed"),
    "python": (
        list[str],
        "ENGINE=PATH: the interpreter of an engine's environment, such as "
        "vllm=/opt/vllm/bin/python; default: this one",
    ),
    "folder": (Path, "folder that keeps the exported model"),
}
"""Options of programs that compare engines."""


def choose(arguments: argparse.Namespace, known: Sequence[str] = tuple(PEERS)) -> dict[str, str]:
    """Return the interpreters of the engines to compare, Hardpoint first.

    Raises:
        SystemExit: an engine is unknown or not installed.
    """
    pythons = dict.fromkeys(known, sys.executable)
    for pair in arguments.python or ():
        name, _, path = pair.partition("=")
        if name not in known or not Path(path).is_file():
            raise SystemExit(
                f"--python: expected ENGINE=PATH of an interpreter, with one of "
                f"{', '.join(known)}, got {pair!r}"
            )
        pythons[name] = path
    program = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
    installed = [
        name
        for name, python in pythons.items()
        if subprocess.call([python, "-c", program, PEERS[name].module]) == 0
    ]
    peers = installed if arguments.peers is None else ["hardpoint", *arguments.peers]
    if missing := set(peers) - set(installed):
        raise SystemExit(f"--peers: not installed, or unknown: {', '.join(sorted(missing))}")
    return {name: pythons[name] for name in known if name in peers}


@contextlib.contextmanager
def exported(path: Path | None) -> Iterator[Path]:
    """Give a folder with the demo model: `path`, if there is one, or for the body alone.

    It has a bf16 checkpoint that every engine reads, and a link to the GGUF file.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = path or Path(name)
        if not (folder / "gguf").exists():
            _export(folder)
        yield folder


def _export(folder: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from hardpoint.host.registry.model_files import find_files

    path = find_files("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(checkpoint)
    (folder / "gguf").mkdir(parents=True, exist_ok=True)
    (folder / "gguf" / path.name).symlink_to(path)


class Engine:
    """An engine in a process of its own.

    Attributes:
        name: name of the engine in tables.
        about: its version and settings.
        start_seconds: until it was ready.
    """

    _last: ClassVar[Engine | None] = None

    def __init__(self, name: str, peer: Peer, folder: Path, python: str = sys.executable) -> None:
        """Start the process, on a folder as of `exported`, and wait until the engine is ready."""
        start = time.perf_counter()
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
        checkpoint = folder / ("gguf" if peer.gguf else "checkpoint")
        self._process = subprocess.Popen(
            [python, PROGRAM, peer.backend, str(checkpoint), json.dumps(dict(peer.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(peer, python),
        )
        self.about = self._read()
        self.start_seconds = time.perf_counter() - start

    def ask(self, question: Question) -> Any:
        """Return the answer to a question, sent when the previous engine is at rest."""
        if Engine._last not in {None, self}:
            time.sleep(_REST_S)
        Engine._last = self
        assert self._process.stdin is not None
        print(json.dumps(dataclasses.asdict(question)), file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._errors.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._errors.seek(0)
        raise SystemExit(f"{self.name} ended early:\n{self._errors.read()[-3000:]}")


def _environment(peer: Peer, python: str) -> dict[str, str]:
    """Return the environment variables of an engine's process."""
    variables = dict(os.environ)
    if peer.module == "vllm":
        cores = sorted(os.sched_getaffinity(0))
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        # Its documentation recommends both libraries on a CPU.
        libraries = [
            *(Path(python).parent.parent / "lib").glob("libiomp5.so"),
            *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        ]
        variables.setdefault("LD_PRELOAD", ":".join(str(path) for path in libraries[:2]))
    variables["HF_HUB_OFFLINE"] = "1"
    return variables


@contextlib.contextmanager
def opened(
    peers: Mapping[str, Peer], folder: Path, pythons: Mapping[str, str] | None = None
) -> Iterator[dict[str, Engine]]:
    """Open the engines of a scenario for the body; print how each runs, or why it does not.

    Args:
        peers: the engines, by their names in tables. The first one has to open.
        folder: folder as of `exported`.
        pythons: interpreters, by name or module of the engine.
    """
    pythons = pythons or {}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, peer in peers.items():
            python = pythons.get(name) or pythons.get(peer.module) or sys.executable
            try:
                engine = Engine(name, peer, folder, python)
            except SystemExit as error:
                if not engines:
                    raise
                lines = str(error).splitlines()
                last = [line for line in lines if "Error" in line] or lines
                print(f"{name} is not measured: {last[-1].strip()}")
                continue
            stack.callback(engine.stop)
            engines[name] = engine
            about, seconds = engine.about, engine.start_seconds
            print(f"{name} {about['version']}: {about['settings']}; ready after {seconds:.1f} s")
        yield engines


def take_turns(engines: Mapping[str, Engine], rounds: Iterable[Question]) -> dict[str, list[Any]]:
    """Return each engine's answers to the questions but the first, which warms up.

    The order of the engines changes from round to round.
    """
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    for number, question in enumerate(rounds):
        for name in list(engines) if number % 2 else reversed(list(engines)):
            answer = engines[name].ask(question)
            if number:
                answers[name].append(answer)
    return answers
