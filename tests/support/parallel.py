"""Small models with random weights, and the requests that every executor answers alike."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hardpoint import LLM, RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.testing import write_scripted_model
from support.internals import engine_of

Job = tuple[str, list[int], SamplingParams]

NEAR = 1e-4
"""Two best logits that are closer may change places where sums are rounded otherwise."""

FORMS = "support.plugins.parallel_forms"
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "cde", "f"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
_SHAPE = {
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 3,  # so that the stages have different numbers
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.12,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}


def write_random_model(folder: Path, architecture: str, **fields: Any) -> Path:
    """Write a checkpoint that the loader "dummy" fills, with the scripted model's tokenizer."""
    write_scripted_model(folder)
    config = {**_SHAPE, "architectures": [architecture], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parallel_config(tensor: int = 1, pipeline: int = 1, **extra: Any) -> dict[str, Any]:
    """Return a configuration of so many ranks, with little memory and the plugins of `FORMS`."""
    several = tensor * pipeline > 1
    config: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 160,
        "executor": {"use": "multiproc" if several else "uniproc"},
        "parallel": {"tensor": tensor, "pipeline": pipeline},
        "sampler": {"logprobs": "processed"},  # which show how near another token was
        "kv_cache": {"block_size": 8, "num_blocks": 45, "watermark": 0.0},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
        "plugins": {"enable": [f"{FORMS}:{name}" for name in ("Waves", "NotAgain", "Tide")]},
    }
    for key, value in extra.items():
        known = config.get(key)
        config[key] = {**known, **value} if isinstance(known, dict) else value
    return config


def mixed_jobs(vocab: int = 256) -> list[Job]:
    """Return 24 requests: processors of each form, grammars, seeds, log-probabilities and more."""
    rng = random.Random(11)
    shared = [rng.randrange(vocab) for _ in range(40)]
    greedy = {"temperature": 0.0, "logprobs": 2}
    features: list[dict[str, Any]] = [
        greedy,
        greedy | {"plugin_args": {"waves": {}}},
        greedy | {"plugin_args": {"not_again": {"bonus": 3.0}}},
        greedy | {"plugin_args": {"tide": {}}},
        greedy | {"structured": {"json": SCHEMA}, "ignore_eos": False},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.2, "seed": 5, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "n": 2},
        greedy | {"prompt_logprobs": 2},
        greedy | {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 6},
        greedy | {"stop": ["a", "e", "1", "\\"]},
        {"temperature": 1.0, "seed": 6, "plugin_args": {"tide": {"height": 1.0}, "waves": {}}},
        greedy | {"plugin_args": {"waves": {"width": 5}, "not_again": {}}, "logit_bias": {65: 2.0}},
    ]
    jobs: list[Job] = []
    for index in range(24):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 50))]
        if index % 3 == 0:
            prompt = shared + prompt[:20]
        settings = {"ignore_eos": True, "max_tokens": rng.randint(8, 36), **FINAL}
        params = SamplingParams(**settings | features[index % len(features)])
        jobs.append((f"r{index}", prompt, params))
    return jobs


@dataclass(frozen=True)
class Result:
    """The result of a request, its completions in their order."""

    tokens: list[list[int]]
    reasons: list[tuple[str | None, str | int | None]]
    logprobs: list[list[dict[int, float]] | None]
    prompt_logprobs: list[dict[int, float] | None] | None
    error: str | None = None


def result_of(output: RequestOutput) -> Result:
    """Return the result of a finished request."""
    parts = output.outputs

    def plain(entries: Any) -> Any:
        if entries is None:
            return None
        return [e and {token: item.logprob for token, item in e.items()} for e in entries]

    return Result(
        [list(part.token_ids) for part in parts],
        [(part.finish_reason, part.stop_reason) for part in parts],
        [plain(part.logprobs) for part in parts],
        plain(output.prompt_logprobs),
        parts[0].error,
    )


def drive(
    engine: LLMEngine,
    jobs: Sequence[Job],
    per_step: int | None = 2,
    before_step: dict[int, Any] | None = None,
) -> dict[str, Result]:
    """Run requests that join two by two; before step n, call `before_step.pop(n)`.

    That may return outputs which it has got.
    """
    waiting, results, step = list(jobs), {}, 0
    while waiting or engine.has_unfinished_requests():
        for job in waiting[:per_step]:
            engine.add_request(*job)
        waiting = [] if per_step is None else waiting[per_step:]
        outputs = []
        if before_step is not None and (call := before_step.pop(step, None)):
            outputs += call(engine) or ()
        step += 1
        assert step < 5000, "the requests do not end"
        for output in [*outputs, *engine.step()]:
            if output.finished:
                results[output.request_id] = result_of(output)
    assert not before_step, f"{step} steps were not enough"
    return results


def reference_of(config: dict[str, Any], jobs: Sequence[Job]) -> dict[str, Result]:
    """Return the results of one process, with memory to spare."""
    with open_llm(parallel_config(**config, kv_cache={"num_blocks": 600})) as llm:
        return drive(engine_of(llm), jobs)


@contextmanager
def open_llm(config: dict[str, Any]) -> Iterator[LLM]:
    """Open an engine and close it."""
    with LLM(config=config) as llm:
        yield llm


def same(
    engine: LLMEngine, jobs: Sequence[Job], expected: Mapping[str, Result], got: Mapping[str, Any]
) -> int:
    """Assert the expected results; return the number with two almost equal best logits.

    From such a place on, the request is repeated with the expected token as part of its prompt.
    """
    near = 0
    for name, prompt, params in jobs:
        near += _same_request(engine, (name, prompt, params), expected[name], got[name])
    if near:
        print(f"{near} places where the two best logits were closer than {NEAR}")
    return near


def _same_request(engine: LLMEngine, job: Job, expected: Result, got: Result) -> int:
    name, _, params = job
    assert (got.error, len(got.tokens)) == (expected.error, len(expected.tokens)), name
    if expected.prompt_logprobs is not None:
        _same_logprobs(expected.prompt_logprobs[1:], got.prompt_logprobs[1:], name)
    for index, (mine, theirs) in enumerate(zip(got.tokens, expected.tokens, strict=True)):
        logprobs = expected.logprobs[index]
        if mine == theirs:
            assert got.reasons[index] == expected.reasons[index], name
            if logprobs is not None:
                _same_logprobs(logprobs, got.logprobs[index], name)
            continue
        place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        assert logprobs is not None, f"{name}: {mine} instead of {theirs}"
        first, second = sorted(logprobs[place].values(), reverse=True)[:2]
        gap = first - second
        assert gap < NEAR, f"{name}, token {place}, gap {gap}: {mine} instead of {theirs}"
        is_plain = not params.plugin_args and params.structured is None
        assert is_plain, f"{name}: token {place} is a near tie; give the request another prompt"
        return 1 + _forced(engine, job, expected, place + 1)
    return 0


def _forced(engine: LLMEngine, job: Job, expected: Result, count: int) -> int:
    """Compare the outputs after the first `count` expected tokens."""
    name, prompt, params = job
    tokens, logprobs = expected.tokens[0], expected.logprobs[0]
    if count >= len(tokens):
        return 0
    rest = msgspec.structs.replace(params, max_tokens=len(tokens) - count, prompt_logprobs=None)
    forced = (f"{name}+{count}", prompt + tokens[:count], rest)
    left = Result([tokens[count:]], expected.reasons, [logprobs and logprobs[count:]], None)
    return _same_request(engine, forced, left, drive(engine, [forced])[forced[0]])


def _same_logprobs(expected: Sequence[Any], got: Sequence[Any], name: str) -> None:
    assert len(expected) == len(got), name
    for theirs, mine in zip(expected, got, strict=True):
        for token in theirs.keys() & mine.keys():
            a, b = theirs[token], mine[token]
            assert a == b or abs(a - b) < 1e-3, f"{name}: {mine} instead of {theirs}"
