"""Speculation: time and tokens with it and without, and how many drafts are accepted.

    python benchmarks/speculation.py [--python vllm=/opt/vllm/bin/python]
    python benchmarks/speculation.py --peers --sets edit chat --streams 1 8 --rounds 5
    python benchmarks/speculation.py --acceptance
    python benchmarks/speculation.py --peers --sets chat --streams 2 --rounds 1 --tokens 8

Each engine loads the same bf16 weights in a process of its own, once without speculation and once
with each speculator (of vLLM, with its `ngram`). The processes stay up and take turns: round by
round, each gets the same prompts, which no other round has, and continues them greedily. The
prompts are made of the pages in docs/: one asks for a copy with a word changed (`edit`) or for a
summary (`summary`); `chat` has questions.

Printed are, by set and number of streams, tokens per second without speculation, the time without
it over the time with it (median of the rounds, their least and greatest), the draft tokens that
were verified, the share of them that was accepted, and how many outputs speculation changed.

`--acceptance` prints instead how many drafts of a draft model are accepted at several
temperatures: see draft_acceptance.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends import Batch
from engines import PEER_OPTIONS, Engine, Peer, choose, exported, opened
from options import options_of, save, show_table

DOCS = Path(__file__).parent.parent / "docs"
NONE = "none"
_LEAST = 4  # requests of a round, so that one stream is not one text
_APART = 997  # characters between two pieces of the docs

TOPICS = (
    *("gravity", "the moon", "volcanoes", "bread", "bees", "glass", "the heart", "maps", "rain"),
    *("chess", "silk", "trains", "music", "salt", "dreams", "the sea", "clocks", "paper", "cats"),
    *("steel", "sleep", "wind", "money", "tea", "stars", "rice", "bridges", "colours", "horses"),
)
QUESTIONS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What would you like to know about {}?",
    "List five facts about {}.",
    "Write a poem about {}.",
    "Why is {} of interest to scientists?",
    "What do people often get wrong about {}?",
)


def _piece(number: int, size: int) -> str:
    """Return characters of the docs; numbers that are less than 600 apart give other ones."""
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    start = number * _APART % (len(text) - size)
    return text[start : start + size]


def _chat(number: int) -> str:
    topic = TOPICS[number % len(TOPICS)]
    return QUESTIONS[number // len(TOPICS) % len(QUESTIONS)].format(topic)


_EDIT = "Write this text again, all of it, with the word 'job' in place of 'request'."
SETS: dict[str, Callable[[int], str]] = {
    "edit": lambda number: f"{_EDIT}\n\n{_piece(number, 900)}",
    "summary": lambda number: f"Summarize this text in a few sentences.\n\n{_piece(number, 1500)}",
    "chat": _chat,
}


class Prompts:
    """The prompts of a set as token ids of messages in the model's chat template."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the tokenizer of a checkpoint."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._numbers = itertools.count()

    def pop(self, name: str, count: int) -> list[list[int]]:
        """Return prompts of a set that were not taken before, of any set."""
        ids = []
        for _ in range(count):
            messages = [{"role": "user", "content": SETS[name](next(self._numbers))}]
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            ids.append(self._tokenizer.encode(text, add_special_tokens=False))
        return ids


def peers_of(options: argparse.Namespace, names: list[str]) -> dict[str, Peer]:
    """Return the engines by name and speculator."""
    peers = {}
    for name in names:
        speculators = options.speculators if name == "hardpoint" else ["ngram"]
        for speculator in (NONE, *speculators):
            use = [] if speculator == NONE else [speculator]
            speculation = {"use": use, "num_draft_tokens": options.drafts}
            # The lengths of vLLM's `ngram` are those of its documentation.
            ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
            theirs = {**ngram, "num_speculative_tokens": options.drafts}
            vllm = {"disable_log_stats": False, "speculative_config": theirs if use else None}
            settings = {"config": {"speculation": speculation}, "vllm": vllm}
            peers[f"{name} {speculator}"] = Peer(name, settings, module=name)
    return peers


def measure(
    engines: dict[str, Engine], prompts: Prompts, options: argparse.Namespace, case: tuple[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of each engine to each round but the first, which warms up."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    group, streams = case
    for number in range(options.rounds + 1):
        count = -(-_LEAST // streams) if number else 1
        listed = [prompts.pop(group, streams) for _ in range(count)]
        batches = [Batch(ids, [options.tokens] * streams, stop=True) for ids in listed]
        for name in list(engines) if number % 2 else reversed(list(engines)):
            parts = [engines[name].ask(batch) for batch in batches]
            if number:
                keys = ("seconds", "drafts", "accepted")
                sums = {key: sum(part[key] for part in parts) for key in keys}
                outputs = [ids for part in parts for ids in part["outputs"]]
                answers[name].append({**sums, "outputs": outputs})
    return answers


def figures(plain: list[dict[str, Any]], with_drafts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a table, from the answers to the same rounds."""
    pairs = list(zip(plain, with_drafts, strict=True))
    outputs = [both for a, b in pairs for both in zip(a["outputs"], b["outputs"], strict=True)]
    drafts = sum(b["drafts"] for b in with_drafts)
    return {
        "tokens_per_second": statistics.median(
            sum(map(len, a["outputs"])) / a["seconds"] for a in plain
        ),
        "ratios": [a["seconds"] / b["seconds"] for a, b in pairs],
        "drafts": drafts,
        "accepted": sum(b["accepted"] for b in with_drafts) / max(drafts, 1),
        "outputs": len(outputs),
        "changed": sum(a != b for a, b in outputs),
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        ratios = result["ratios"]
        times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [result["set"], result["streams"], result["engine"]]
        cells += [f"{result['tokens_per_second']:.0f}", times, result["drafts"]]
        rows.append(
            [*cells, f"{result['accepted']:.0%}", f"{result['changed']} of {result['outputs']}"]
        )
    heads = ("set", "streams", "engine", "tok/s", "time ratio", "drafts", "accepted", "changed")
    show_table("speculation", heads, rows)


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure all cases."""
    prompts = Prompts(folder / "checkpoint")
    pythons = choose(options, ("hardpoint", "vllm"))
    results: list[dict[str, Any]] = []
    with opened(peers_of(options, list(pythons)), folder, pythons) as engines:
        for case in itertools.product(options.sets, options.streams):
            answers = measure(engines, prompts, options, case)
            for name in engines:
                engine, _, speculator = name.partition(" ")
                plain = answers.get(f"{engine} {NONE}")
                if speculator != NONE and plain is not None:
                    about = {"set": case[0], "streams": case[1], "engine": name}
                    results.append(about | figures(plain, answers[name]))
    show(results)
    return results


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        rounds=3,
        speculators=["ngram", "suffix"],
        sets=SETS,
        streams=([1, 8, 32], "at once"),
        tokens=(64, "of an output, at most"),
        drafts=(5, "of a step, at most"),
        acceptance=(False, "of a draft model, instead"),
        **PEER_OPTIONS,
    )
    results: Any
    if options.acceptance:
        import draft_acceptance

        results = draft_acceptance.compare(max(options.streams), options.tokens)
    else:
        with exported(options.folder) as folder:
            results = compare(options, folder)
    save(options.json, results)


if __name__ == "__main__":
    main()
