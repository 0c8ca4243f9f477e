"""How often other weights and dtypes choose the token that float32 chooses, and their perplexity.

    python benchmarks/quality.py --positions 200    # whether it runs
    python benchmarks/quality.py [--positions 3000] [--folder FOLDER] [--cache-dtypes int8 fp8]

Each text of the source tree is read at once, and the likeliest next token is compared at every
position. The reference is transformers in float32, on the weights of the demo model's GGUF file,
rounded to bfloat16. Hardpoint also multiplies the blocks of that file as they are, without rounding
weights: the reference of these rows is the file in float32. Perplexity is that of the texts' own
tokens. `--cache-dtypes` are dtypes of keys and values (`kv_cache.dtype`) that bfloat16 also runs
with.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from engines import exported
from options import options_of, save, show_table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hardpoint import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "docs/*.md", "core/**/*.py", "kernels/src/*.h", "LICENSE", "pyproject.toml")
LENGTH = 256  # tokens of a text


def read_texts(checkpoint: Path, positions: int) -> list[list[int]]:
    """Return token ids of parts of many files, of different kinds in turn."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    kinds = [iter(sorted(ROOT.glob(pattern))) for pattern in TEXTS]
    texts: list[list[int]] = []
    while kinds and sum(map(len, texts)) < positions:
        for kind in list(kinds):
            file = next(kind, None)
            if file is None:
                kinds.remove(kind)
                continue
            ids = tokenizer(file.read_text()[:8000])["input_ids"]
            if len(ids) >= LENGTH:
                texts.append(ids[-LENGTH:])
    return texts


class Reading(NamedTuple):
    """The likeliest token after each token but the last of every text, and the perplexity."""

    choices: list[int]
    perplexity: float


def read_by_transformers(checkpoint: Path, texts: list[list[int]], dtype: torch.dtype) -> Reading:
    """Read the texts with transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    choices: list[int] = []
    losses: list[torch.Tensor] = []
    with torch.inference_mode():
        for ids in texts:
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
            choices += logits.argmax(-1).tolist()
            losses.append(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    return Reading(choices, math.exp(torch.cat(losses).mean().item()))


def read_by_hardpoint(
    model: Path,
    texts: list[list[int]],
    dtype: str,
    quantization: str = "auto",
    cache: str = "auto",
    activations: str = "none",
) -> Reading:
    """Read the texts with Hardpoint."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    weights = {"use": quantization, "activations": activations}
    config = {"quantization": weights, "kv_cache": {"dtype": cache}}
    limits = {"max_model_len": LENGTH + 1, "progress": False}
    with LLM(str(model), dtype=dtype, config=config, **limits) as llm:
        outputs = llm.generate(prompts, params)
    positions = [entries for output in outputs for entries in output.prompt_logprobs[1:]]
    following = [token for ids in texts for token in ids[1:]]
    losses = [-entries[token].logprob for entries, token in zip(positions, following, strict=True)]
    choices = [
        next(token for token, entry in entries.items() if entry.rank == 1) for entries in positions
    ]
    return Reading(choices, math.exp(sum(losses) / len(losses)))


def compare(folder: Path, positions: int, cache_dtypes: list[str]) -> list[list[str]]:
    """Return the rows of the table, each reference before the rows that are compared with it."""
    checkpoint = folder / "checkpoint"
    texts = read_texts(checkpoint, positions)
    (gguf,) = (folder / "gguf").glob("*.gguf")
    expected = read_by_transformers(checkpoint, texts, torch.float32)
    rows = [["transformers, float32", "", f"{expected.perplexity:.3f}"]]

    def add(name: str, reading: Reading) -> None:
        equal = sum(a == b for a, b in zip(reading.choices, expected.choices, strict=True))
        rows.append([name, f"{equal} of {len(reading.choices)}", f"{reading.perplexity:.3f}"])

    add("transformers, bfloat16", read_by_transformers(checkpoint, texts, torch.bfloat16))
    variants = {"float32": ("float32",), "bfloat16": ("bfloat16",)}
    for cache in cache_dtypes:
        variants[f"bfloat16, {cache} keys and values"] = "bfloat16", "auto", cache
    for weights in ("int8", "int4"):
        variants[f"bfloat16, {weights}"] = "bfloat16", weights
        for activations in ("int8", "int16"):
            name = f"bfloat16, {weights}, {activations} activations"
            variants[name] = "bfloat16", weights, "auto", activations
    for name, settings in variants.items():
        add(f"Hardpoint, {name}", read_by_hardpoint(checkpoint, texts, *settings))
    expected = read_by_hardpoint(gguf, texts, "float32", "none")
    rows.append(["Hardpoint, float32, GGUF dequantized", "", f"{expected.perplexity:.3f}"])
    add("Hardpoint, float32, GGUF", read_by_hardpoint(gguf, texts, "float32"))
    add("Hardpoint, bfloat16, GGUF", read_by_hardpoint(gguf, texts, "bfloat16"))
    for activations in ("int8", "int16"):
        rounded = read_by_hardpoint(gguf, texts, "bfloat16", activations=activations)
        add(f"Hardpoint, bfloat16, GGUF, {activations} activations", rounded)
    name = "Hardpoint, bfloat16, GGUF dequantized"
    add(name, read_by_hardpoint(gguf, texts, "bfloat16", "none"))
    return rows


def main() -> None:
    """Parse arguments, compare, and print the table."""
    folder = Path, "where the model is exported to, and kept"
    options = options_of(__doc__, positions=3000, folder=folder, cache_dtypes=["int8", "fp8"])
    with exported(options.folder) as folder:
        rows = compare(folder, options.positions, options.cache_dtypes)
    show_table("positions with float32's choice", ("engine", "equal", "perplexity"), rows)
    save(options.json, rows)


if __name__ == "__main__":
    main()
