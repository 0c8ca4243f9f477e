"""How often bfloat16 chooses the token that float32 chooses: Hardpoint next to transformers.

    python benchmarks/quality.py [--positions 3000] [--folder FOLDER]

Each text of the source tree is read at once, and the likeliest next token is compared at every
position. The reference is transformers in float32, on the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from engines import exported
from rich.console import Console
from rich.table import Table
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


def choices_of_transformers(
    checkpoint: Path, texts: list[list[int]], dtype: torch.dtype
) -> list[int]:
    """Return the likeliest token after each token but the last of every text."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    with torch.inference_mode():
        found = [model(torch.tensor([ids])).logits[0, :-1].argmax(-1) for ids in texts]
    return torch.cat(found).tolist()


def choices_of_hardpoint(checkpoint: Path, texts: list[list[int]], dtype: str) -> list[int]:
    """Return the same of Hardpoint."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    with LLM(str(checkpoint), dtype=dtype, max_model_len=LENGTH + 1, progress=False) as llm:
        outputs = llm.generate(prompts, params)
    return [
        next(token for token, entry in position.items() if entry.rank == 1)
        for output in outputs
        for position in output.prompt_logprobs[1:]
    ]


def main() -> None:
    """Parse arguments, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--positions", type=int, default=3000)
    parser.add_argument("--folder", type=Path, help="where the model is exported to, and kept")
    options = parser.parse_args()
    with exported(options.folder) as folder:
        checkpoint = folder / "checkpoint"
        texts = read_texts(checkpoint, options.positions)
        expected = choices_of_transformers(checkpoint, texts, torch.float32)
        table = Table(title=f"positions of {len(expected)} with float32's choice")
        table.add_column("engine")
        table.add_column("equal", justify="right")
        for name, found in (
            ("transformers, bfloat16", choices_of_transformers(checkpoint, texts, torch.bfloat16)),
            ("Hardpoint, bfloat16", choices_of_hardpoint(checkpoint, texts, "bfloat16")),
            ("Hardpoint, float32", choices_of_hardpoint(checkpoint, texts, "float32")),
        ):
            equal = sum(a == b for a, b in zip(found, expected, strict=True))
            table.add_row(name, str(equal))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
