"""Embeddings of short texts, compared with sentence-transformers, in one run.

    python benchmarks/embeddings.py [--texts 1000] [--rounds 5] [--dtype float32] [--json FILE]

The model has the sizes of MiniLM (6 layers of 384), random weights, and a WordPiece tokenizer; its
folder is written first, and both read it. Each engine lives in a process of its own with all cores,
and they take turns: round by round, each embeds the same texts, of 5 to 60 tokens. Both have a
round before that is not counted. Printed are medians of texts per second, of tokens per second and
of the seconds of CPU time that a round costs, which other programs on the machine disturb less than
the time that passes; and how many times as fast Hardpoint is, as the median over rounds. The
vectors of both are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CONSOLE = Console(width=120)
_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Embed = Callable[[Sequence[str]], Any]


def write_model(folder: Path) -> list[str]:
    """Write a random model of sentence-transformers; return the tokens that its tokenizer knows."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    rng, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    known = dict.fromkeys([*_SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    while len(known) < _SIZES["vocab_size"]:
        known["".join(rng.choices(letters, k=rng.randint(2, 9)))] = None
    vocabulary = {word: index for index, word in enumerate(known)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=512)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**_SIZES)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    transformer = modules.Transformer(str(folder / "model"))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    whole = SentenceTransformer(modules=[transformer, pooling, modules.Normalize()], device="cpu")
    whole.save_pretrained(str(folder / "whole"))
    return [word for word in known if word[0] not in "[#"]


def make_texts(known_tokens: Sequence[str], count: int) -> list[str]:
    """Return texts of 5 to 60 tokens, [CLS] and [SEP] included."""
    rng = random.Random(1)
    return [" ".join(rng.choices(known_tokens, k=rng.randint(3, 58))) for _ in range(count)]


def open_hardpoint(folder: str, dtype: str, threads: int) -> Embed:
    """Return the function that embeds texts with Hardpoint."""
    from hardpoint import LLM

    config = {"dtype": dtype, "device": "cpu", "executor": {"threads": threads}}
    llm = LLM(folder, config=config, progress=False)
    return lambda texts: [output.outputs for output in llm.embed(texts)]


def open_sentence_transformers(folder: str, dtype: str, threads: int) -> Embed:
    """Return that of sentence-transformers, which sorts texts by their lengths."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    kwargs = {"dtype": getattr(torch, dtype)}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=kwargs)
    return lambda texts: model.encode(texts, show_progress_bar=False)


ENGINES = {"hardpoint": open_hardpoint, "sentence-transformers": open_sentence_transformers}


class Peer:
    """An engine in a process of its own."""

    def __init__(self, name: str, *args: Any) -> None:
        """Start it, and wait until its model is loaded."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, name, *args), daemon=True)
        self._process.start()
        self._pipe.recv()

    def embed(self, texts: Sequence[str]) -> tuple[float, float, Any]:
        """Return the seconds that passed, those of CPU time, and the vectors."""
        self._pipe.send(texts)
        answer: tuple[float, float, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, name: str, *args: Any) -> None:
    import numpy as np

    embed = ENGINES[name](*args)
    pipe.send(None)
    while (texts := pipe.recv()) is not None:
        begun, cpu = time.perf_counter(), _cpu_seconds()
        vectors = embed(texts)
        seconds, cpu = time.perf_counter() - begun, _cpu_seconds() - cpu
        pipe.send((seconds, cpu, np.asarray(vectors, np.float32)))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def measure(folder: str, texts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, and seconds of CPU time, of each round by engine; and the difference."""
    import numpy as np

    peers = {name: Peer(name, folder, options.dtype, options.threads) for name in ENGINES}
    vectors = {name: peer.embed(texts)[2] for name, peer in peers.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, peer in peers.items():
            found[name].append(peer.embed(texts)[:2])
    for peer in peers.values():
        peer.close()
    ours, theirs = vectors.values()
    return {"rounds": found, "difference": float(np.abs(ours - theirs).max())}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = make_texts(write_model(Path(folder)), options.texts)
        found = measure(str(Path(folder) / "whole"), texts, options)
    tokens = sum(text.count(" ") + 3 for text in texts)
    table = Table("", "texts/s", "tokens/s", "s", "s of CPU time")
    for name, rounds in found["rounds"].items():
        seconds, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        rates = f"{len(texts) / seconds:.0f}", f"{tokens / seconds:.0f}"
        table.add_row(name, *rates, f"{seconds:.2f}", f"{cpu:.2f}")
    _CONSOLE.print(table)
    pairs = list(zip(*found["rounds"].values(), strict=True))
    ratios = [theirs[0] / ours[0] for ours, theirs in pairs]
    cpu_ratios = [theirs[1] / ours[1] for ours, theirs in pairs]
    _CONSOLE.print(
        f"{options.dtype}, {options.threads} threads: {statistics.median(ratios):.2f} times as "
        f"fast ({min(ratios):.2f} to {max(ratios):.2f}), with CPU time "
        f"{statistics.median(cpu_ratios):.2f} times; vectors differ by {found['difference']:.1g}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found | {"texts": len(texts), "tokens": tokens}))


if __name__ == "__main__":
    main()
