"""Models through transformers, compared with transformers itself, in one run.

    python benchmarks/through_transformers.py                      # all families, 1 and 32 streams
    python benchmarks/through_transformers.py --families opt --streams 32 --rounds 3 --json out.json

Each family has a model of random weights with the sizes of a published one of 125 to 160 million
parameters, in bfloat16. Prompts of one length are asked for at once and continued greedily by one
number of tokens, which is the best that `generate` can have: nothing is padded, and no stream waits
for a longer one. The engines take turns, round by round: Hardpoint, through transformers and, where
it has the architecture, natively; `generate`; and `generate_batch`, transformers' own continuous
batching, for families that it runs. Printed are medians of output tokens per second, and ratios to
Hardpoint through transformers. Starts and the first round of each are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_PROMPT, _OUTPUT = 64, 32
_PATIENCE_S = 60
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "opt": ("OPTForCausalLM", {}),
}
"""Architectures and configurations: those of SmolLM2-135M, Pythia-160M and OPT-125M."""
_NATIVE = ("llama",)

Generate = Callable[[list[list[int]]], None]


@contextmanager
def _hardpoint(folder: Path, use: str) -> Iterator[Generate]:
    """Yield what continues prompts in an engine."""
    from hardpoint import LLM, SamplingParams

    params = SamplingParams(max_tokens=_OUTPUT, temperature=0, ignore_eos=True, detokenize=False)
    config = {
        "models": {"use": use},
        "tokenizer": {"use": "none"},
        "weight_cache": {"path": "off"},
        "max_model_len": 4 * _PROMPT,
    }
    with LLM(str(folder), config=config) as llm:

        def generate(prompts: list[list[int]]) -> None:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert all(len(output.outputs[0].token_ids) == _OUTPUT for output in outputs)

        yield generate


@contextmanager
def _transformers(folder: Path, *, continuous: bool) -> Iterator[Generate]:
    """Yield what continues prompts by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    settings = transformers.GenerationConfig(
        max_new_tokens=_OUTPUT, min_new_tokens=_OUTPUT, do_sample=False, pad_token_id=0
    )

    def together(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert found.shape[1] == _PROMPT + _OUTPUT

    if not continuous:
        yield together
        return
    # Stays up between calls, so that its start is not counted.
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()

    def one_by_one(prompts: list[list[int]]) -> None:
        names = {manager.add_request(prompt, max_new_tokens=_OUTPUT) for prompt in prompts}
        while names:
            result = manager.get_result(timeout=_PATIENCE_S)
            if result is None:
                raise RuntimeError(f"generate_batch gave nothing for {_PATIENCE_S} s")
            if not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(f"generate_batch fails: {result.error}")
            names.discard(result.request_id)

    try:
        yield one_by_one
    finally:
        manager.stop(block=True)


def _write(family: str, folder: Path) -> None:
    """Write a model of random weights."""
    import torch
    import transformers

    name, sizes = _SIZES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes, max_position_embeddings=2048)
    kind._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _prompts(count: int, seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(_PROMPT)] for _ in range(count)]


def _measure(family: str, streams: list[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return the medians of output tokens per second, by streams and engine."""
    speeds: dict[int, dict[str, list[float]]] = {count: {} for count in streams}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write(family, folder)
        engines = {"through transformers": _hardpoint(folder, "transformers")}
        if family in _NATIVE:
            engines["native"] = _hardpoint(folder, "auto")
        engines["generate"] = _transformers(folder, continuous=False)
        engines["generate_batch"] = _transformers(folder, continuous=True)
        opened = {name: stack.enter_context(engine) for name, engine in engines.items()}
        try:
            opened["generate_batch"](_prompts(1, family))
        except RuntimeError as error:  # it does not run all families
            print(f"{family}: {error}", file=sys.stderr)
            del opened["generate_batch"]
        for count in streams:
            for number in range(rounds + 1):
                prompts = _prompts(count, f"{family}, {count}, {number}")
                for name, generate in opened.items():
                    start = time.perf_counter()
                    generate(prompts)
                    speed = count * _OUTPUT / (time.perf_counter() - start)
                    if number:
                        speeds[count].setdefault(name, []).append(speed)
                    print(f"{family}, {count} streams: {name} {speed:.1f}", file=sys.stderr)
    return {
        count: {name: statistics.median(found) for name, found in of.items()}
        for count, of in speeds.items()
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(_SIZES), choices=list(_SIZES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {
        family: _measure(family, options.streams, options.rounds) for family in options.families
    }
    print(
        "| model | streams | engine | tokens/s | through transformers is |\n|---|---|---|---|---|"
    )
    for family, by_count in found.items():
        for count, by_name in by_count.items():
            ours = by_name["through transformers"]
            for name, speed in by_name.items():
                print(f"| {family} | {count} | {name} | {speed:.0f} | {ours / speed:.2f}x |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
