"""Prefix hits and times to the first token of long conversations, with and without retention.

    python benchmarks/retention.py [--model smollm2] [--turns 40] [--conversations 4] [--json FILE]

Conversations take turns, each of which adds a message to all messages before. Between two
turns come requests of others, each of them once, which need as many blocks as there are. Printed
are, for the turns after the first, the share of prompt tokens that were found in the prefix cache
and the median and the largest time to the first token; and the same median for the others.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from loads import VALID, random_ids
from options import options_of, save, show_table

from hardpoint import LLM, SamplingParams

_TURN_TOKENS = 32
_OTHER_TOKENS = 384
_OTHERS = 6  # between two turns of the same or of another conversation
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def main() -> None:
    """Measure, and print the table."""
    options = options_of(__doc__, model="smollm2", turns=40, conversations=4)
    results = {
        name: measure(options.model, options.turns, options.conversations, seconds)
        for name, seconds in (("none", None), ("retain_seconds = 600", 600.0))
    }
    heads = ("retention", "prompt tokens found", "TTFT of turns, ms: p50", "max", "of others")
    keys = ("ttft_p50", "ttft_max", "others_p50")
    rows = [
        [name, f"{figures['found']:.1%}", *(f"{1e3 * figures[key]:.0f}" for key in keys)]
        for name, figures in results.items()
    ]
    show_table("conversations", heads, rows)
    save(options.json, results)


def measure(model: str, turns: int, conversations: int, seconds: float | None) -> dict[str, float]:
    """Return the figures of one engine."""
    numbers = random.Random(1)
    length = max(turns * (_TURN_TOKENS + 8), _OTHER_TOKENS) + 16
    blocks = (conversations * length + 2 * _OTHER_TOKENS) // 16  # all of them, and two others
    config: dict[str, Any] = {
        "kv_cache": {"num_blocks": blocks, "block_size": 16},
        "max_model_len": length,
        "plugin": {"retention": {"share": 0.9}},
    }
    histories: list[list[int]] = [[] for _ in range(conversations)]
    of_turns, of_others = [], []
    num_tokens = hit = 0
    with LLM(model, config=config, progress=False) as llm:
        for turn in range(turns):
            for index, history in enumerate(histories):
                history += random_ids(numbers, _TURN_TOKENS, VALID)
                retained = {"session": str(index), "retain_seconds": seconds} if seconds else {}
                first, output = _asked(llm, history, **retained)
                history += output.outputs[0].token_ids
                if turn:
                    of_turns.append(first)
                    num_tokens += len(output.prompt_token_ids)
                    hit += output.num_cached_tokens
                for _ in range(_OTHERS):
                    of_others.append(_asked(llm, random_ids(numbers, _OTHER_TOKENS, VALID))[0])
    return {
        "found": hit / num_tokens,
        "ttft_p50": statistics.median(of_turns),
        "ttft_max": max(of_turns),
        "others_p50": statistics.median(of_others),
    }


def _asked(llm: LLM, prompt: list[int], **options: Any) -> tuple[float, Any]:
    """Return the time to the first token of a request, and its last output with all tokens."""
    started, first, tokens = time.perf_counter(), 0.0, []
    for output in llm.stream(list(prompt), _PARAMS, **options):
        first = first or time.perf_counter() - started
        tokens += output.outputs[0].token_ids
    output.outputs[0].token_ids = tokens
    return first, output


if __name__ == "__main__":
    main()
