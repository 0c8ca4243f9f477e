"""Microseconds of the frontend per output token, compared with vLLM where it is installed.

    python benchmarks/frontend.py [--requests 64] [--tokens 128] [--rounds 5] [--json FILE]

Measured is the output processor: from the engine's outputs, one token per request and step, to
request outputs with text. The demo model's tokenizer decodes; outputs are deltas, statistics are
off. The engines take turns in one process; printed are medians of processor time. "bare" is the
step of the tokenizers library's own `DecodeStream` for each of the tokens, and nothing else.
"decoded" and "checked" are all of it for an engine in another process: its messages are decoded,
without and with the checks of its outputs, and processed. What the checks add is a part of the
first.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from options import options_of, save
from tokenizers.decoders import DecodeStream

from hardpoint import plugins
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.tokenizer.gguf import build_gguf_tokenizer
from hardpoint.core.frontend.outputs.output_processor import OutputProcessor
from hardpoint.core.frontend.outputs.request_state import ParentRequest
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.process.client.output_check import OutputCheck

TEXT = (
    "Once upon a time, in a village between two rivers, there lived a clockmaker who built a new "
    "clock every winter: small ones of pear wood, tall ones with brass moons (1 of them played a "
    "tune!), and one, the last, that ran backwards — no one ever found out why.\n"
)
Run = Callable[[], None]


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, requests=64, tokens=128, rounds=5)
    found_plugins = resolve_plugins(plugins.EngineConfig())
    files, kind = find_files("smollm2"), found_plugins.one("tokenizers")
    tokenizer = found_plugins.create(kind, plugins.TokenizerContext, files=files)
    ids = (tokenizer.encode(TEXT) * (options.tokens // 40 + 1))[: options.tokens]
    runs: dict[str, Run] = {
        "hardpoint": lambda: _hardpoint(tokenizer, ids, options.requests),
        "bare": _bare(files.path, ids, options.requests),
        "decoded": _decoded(tokenizer, ids, options.requests, is_checked=False),
        "checked": _decoded(tokenizer, ids, options.requests, is_checked=True),
    }
    if importlib.util.find_spec("vllm"):
        runs["vllm"] = _vllm(files.path, ids, options.requests)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            times[name].append(time.thread_time() - start)
    count = options.requests * options.tokens
    costs = {name: statistics.median(seconds[1:]) / count * 1e6 for name, seconds in times.items()}
    for name, microseconds in costs.items():
        print(f"{name:10} {microseconds:5.2f} us per output token")
    for name, aim in (("bare", 1.6), ("vllm", 0.5)):
        if name in costs:
            ratio = costs["hardpoint"] / costs[name]
            print(f"hardpoint / {name}: {ratio:.2f} (aim: at most {aim})")
    # Of each pair of rounds, because the machine's speed changes between them.
    pairs = zip(times["decoded"][1:], times["checked"][1:], strict=True)
    share = statistics.median(checked / decoded - 1 for decoded, checked in pairs)
    print(f"checks: {share:.1%} of decoded (aim: 5%)")
    save(options.json, costs)


def _requests(ids: list[int], requests: int) -> list[plugins.EngineCoreRequest]:
    kind = plugins.RequestOutputKind.DELTA
    params = plugins.SamplingParams(max_tokens=len(ids), output_kind=kind)
    return [
        plugins.EngineCoreRequest(
            request_id=f"request-{i}", prompt_token_ids=[1, 2, 3], params=params
        )
        for i in range(requests)
    ]


def _processor(tokenizer: Any, requests: list[plugins.EngineCoreRequest]) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    for request in requests:
        name = request.request_id
        processor.add_request(request, None, ParentRequest(name, name, 1))
    return processor


def _steps(
    requests: list[plugins.EngineCoreRequest], ids: list[int]
) -> Iterator[list[plugins.EngineCoreOutput]]:
    reasons = [None] * (len(ids) - 1) + [plugins.FinishReason.LENGTH]
    for token, reason in zip(ids, reasons, strict=True):
        yield [
            plugins.EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[token], finish_reason=reason
            )
            for request in requests
        ]


def _hardpoint(tokenizer: Any, ids: list[int], requests: int) -> None:
    sent = _requests(ids, requests)
    processor = _processor(tokenizer, sent)
    for outputs in _steps(sent, ids):
        assert len(processor.process(outputs).request_outputs) == requests


def _bare(path: Path, ids: list[int], requests: int) -> Run:
    tokenizer = build_gguf_tokenizer(open_gguf(path), path)

    def run() -> None:
        streams = [DecodeStream(skip_special_tokens=True) for _ in range(requests)]
        for token in ids:
            for stream in streams:
                stream.step(tokenizer, token)

    return run


def _decoded(tokenizer: Any, ids: list[int], requests: int, *, is_checked: bool) -> Run:
    sent, encoder = _requests(ids, requests), Encoder()
    messages = [
        encoder.encode(plugins.EngineCoreOutputs(outputs=outputs)) for outputs in _steps(sent, ids)
    ]

    def run() -> None:
        processor = _processor(tokenizer, sent)
        check = OutputCheck(vocab_size=1 << 17, max_model_len=1 << 17)
        check.add(sent)
        decoder: Any = check.decoder if is_checked else Decoder(plugins.EngineCoreOutputs)
        for frames in messages:
            message = decoder.decode(frames)
            if is_checked:
                check.check(message, decoder.rare_fields)
            assert len(processor.process(message.outputs).request_outputs) == requests

    return run


def _vllm(path: Path, ids: list[int], requests: int) -> Run:
    from transformers import AutoTokenizer
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind as VllmKind
    from vllm.v1.engine import EngineCoreOutput as VllmOutput
    from vllm.v1.engine import EngineCoreRequest as VllmRequest
    from vllm.v1.engine import FinishReason as VllmReason
    from vllm.v1.engine.output_processor import OutputProcessor as VllmProcessor

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def run() -> None:
        processor = VllmProcessor(tokenizer, log_stats=False)
        names = [f"request-{i}" for i in range(requests)]
        for name in names:
            params = VllmParams(max_tokens=len(ids), output_kind=VllmKind.DELTA)
            known = {
                "request_id": name,
                "external_req_id": name,
                "prompt_token_ids": [1, 2, 3],
                "sampling_params": params,
                "arrival_time": 0.0,
            }
            fields = dict.fromkeys(VllmRequest.__struct_fields__[:10], None) | known
            processor.add_request(VllmRequest(**fields), None)
        reasons = [None] * (len(ids) - 1) + [VllmReason.LENGTH]
        for token, reason in zip(ids, reasons, strict=True):
            outputs = [
                VllmOutput(request_id=n, new_token_ids=[token], finish_reason=reason) for n in names
            ]
            assert len(processor.process_outputs(outputs).request_outputs) == requests

    return run


if __name__ == "__main__":
    main()
