"""An engine with a speculator or without, in a process of its own; used by speculation.py.

    python speculation_engine.py NAME FOLDER SPECULATOR NUM_DRAFT_TOKENS

SPECULATOR is `none` or a name that the engine knows. Each line of standard input is a JSON object:
`batches` of prompts (token ids), one batch after the other, each prompt continued greedily up to
`tokens` tokens or its end. The answer has the seconds, the token ids of each prompt, and how many
draft tokens were verified and accepted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from engines import MAX_MODEL_LEN, about, answer, vllm_settings

Prompts = list[list[int]]


class Hardpoint:
    """Hardpoint with its defaults, in the process that asks."""

    def __init__(self, folder: Path, speculator: str, num_draft_tokens: int) -> None:
        """Open it."""
        from hardpoint import LLM

        use = [] if speculator == "none" else [speculator]
        self._llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            config={"speculation": {"use": use, "num_draft_tokens": num_draft_tokens}},
            progress=False,
        )
        self.settings = f"bf16, at most {num_draft_tokens} drafts" if use else "bf16"

    def generate(self, prompts: Prompts, tokens: int) -> Prompts:
        """Return the tokens that follow each prompt."""
        from hardpoint import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in self._llm.generate(prompts, params)]

    def drafts(self) -> tuple[int, int]:
        """Return how many draft tokens were verified and accepted since the start."""
        stats = self._llm.engines.scheduler_stats()
        return stats.num_drafts, stats.num_accepted_drafts


class Vllm:
    """vLLM with its defaults, but on every core."""

    def __init__(self, folder: Path, speculator: str, num_draft_tokens: int) -> None:
        """Open it; the lengths of `ngram` are those of its documentation."""
        from vllm import LLM

        ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        speculative = {**ngram, "num_speculative_tokens": num_draft_tokens}
        self._llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            disable_log_stats=False,
            speculative_config=None if speculator == "none" else speculative,
        )
        self.settings = f"bf16, {'' if speculator == 'none' else speculative} {vllm_settings()}"

    def generate(self, prompts: Prompts, tokens: int) -> Prompts:
        """Return the tokens that follow each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def drafts(self) -> tuple[int, int]:
        """Return how many draft tokens were verified and accepted since the start."""
        values: dict[str, Any] = {m.name: getattr(m, "value", 0) for m in self._llm.get_metrics()}
        drafts, accepted = (
            values.get(f"vllm:spec_decode_num_{what}_tokens", 0) for what in ("draft", "accepted")
        )
        return int(drafts), int(accepted)


ENGINES: dict[str, type[Hardpoint | Vllm]] = {"hardpoint": Hardpoint, "vllm": Vllm}


def main() -> None:
    """Serve an engine."""
    name, folder, speculator, num_draft_tokens = sys.argv[1:5]
    engine = ENGINES[name](Path(folder), speculator, int(num_draft_tokens))
    engine.generate([[5] * 16, [6] * 16], 4)
    answer(about(name, engine.settings))
    for line in sys.stdin:
        asked = json.loads(line)
        before = engine.drafts()
        start = time.perf_counter()
        outputs = [ids for b in asked["batches"] for ids in engine.generate(b, asked["tokens"])]
        seconds = time.perf_counter() - start
        drafts, accepted = (new - old for new, old in zip(engine.drafts(), before, strict=True))
        answer({"seconds": seconds, "outputs": outputs, "drafts": drafts, "accepted": accepted})


if __name__ == "__main__":
    main()
