"""The demo model against transformers: the same tokens, alone and in company.

Matrix products differ in the last bits with the number of rows, so tokens may differ where the
reference's two best logits are closer than TIE. Such places are counted and printed; the run is
compared by teacher forcing, so that one of them does not hide what follows.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.driving import run
from support.internals import engine_of

from hardpoint import LLM, RequestOutputKind, SamplingParams
from hardpoint.core.engine.prepare import find_files

TIE = 1e-4
NEW_TOKENS = 24
SUBJECTS = ["the sea", "a clock", "Ada Lovelace", "prime numbers", "bread", "Mars", "jazz", "rain"]
SHAPES = [
    "{} is",
    "Write one sentence about {}.\n",
    "Answer in one sentence, as a friendly teacher would to a curious child of ten who likes short "
    "words and plain facts, and who asks a great many questions every day.\n"
    "Q: What do people like about {}?\nA:",
    "def describe():\n    # {}\n    return",
]
PROMPTS = [shape.format(subject) for subject in SUBJECTS for shape in SHAPES]


@pytest.fixture(scope="module")
def reference():
    """transformers' model, by transformers' own way of reading the same GGUF, in fp32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = find_files("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


@pytest.fixture(scope="module")
def fp32():
    with LLM("smollm2", dtype="float32", max_model_len=512, config={"device": "cpu"}) as llm:
        yield llm


def greedy(llm: LLM, per_step: int | None) -> dict[str, tuple[list[int], list[int], list[float]]]:
    """Prompt tokens, output tokens and their log-probabilities, by prompt."""
    jobs = []
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=NEW_TOKENS - index % 7,  # so that requests leave at different times
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        jobs.append((prompt, prompt, params))
    if per_step == 0:
        results = {}
        for job in jobs:
            results.update(run(engine_of(llm), [job]))
    else:
        results = run(engine_of(llm), jobs, per_step)
    found = {}
    for prompt, ((_, tokens, _, _, _, logprobs),) in ((p, r[0]) for p, r in results.items()):
        values = [entry[t][0] for t, entry in zip(tokens, logprobs, strict=True)]
        found[prompt] = (llm.tokenizer.encode(prompt), tokens, values)
    return found


@pytest.fixture(scope="module")
def logits_of(reference):
    """The reference's logits at every position of a text; most runs ask for the same texts."""
    known = {}

    def logits(tokens: list[int]) -> torch.Tensor:
        if (key := tuple(tokens)) not in known:
            with torch.inference_mode():
                known[key] = reference(torch.tensor([tokens])).logits[0]
        return known[key]

    return logits


@pytest.mark.parametrize(
    ("per_step", "name"), [(0, "alone"), (None, "in one batch"), (3, "joining and leaving")]
)
def test_fp32_tokens_are_those_of_transformers(logits_of, fp32, per_step, name):
    compare(logits_of, greedy(fp32, per_step), name)


SMALL_POOL = {"num_blocks": 9, "watermark": 0.0}
STACKS = {
    "chunks of 16": {"scheduler": {"max_num_batched_tokens": 16}},
    "chunks of 64": {"scheduler": {"max_num_batched_tokens": 64}},
    "whole prompts": {"scheduler": {"chunked_prefill": False}},
    "blocks of 32": {"kv_cache": {"block_size": 32}},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {"kv_cache": SMALL_POOL},
    "preempting, no prefix cache": {"kv_cache": {**SMALL_POOL, "prefix_caching": False}},
    "preempting, priority": {"kv_cache": SMALL_POOL, "scheduler": {"policy": "priority"}},
    "preempting, fair": {"kv_cache": SMALL_POOL, "scheduler": {"policy": "fair"}},
}


@pytest.mark.parametrize("stack", STACKS)
def test_fp32_tokens_do_not_depend_on_scheduling(logits_of, stack):
    config = {"device": "cpu", **STACKS[stack]}
    with LLM("smollm2", dtype="float32", max_model_len=96, config=config) as llm:
        compare(logits_of, greedy(llm, None), stack)
        stats = llm.scheduler_stats()
    print(f"{stack}: {stats.num_preemptions} preemptions, {stats.prefix_cache.hit_tokens} hits")
    assert (stats.num_preemptions > 10) == stack.startswith("preempting")
    assert (stats.prefix_cache.hit_tokens > 100) == ("no prefix cache" not in stack)


def compare(logits_of, found, name):
    """Assert that every token is the reference's choice for the text before it."""
    ties = positions = 0
    for prompt, (prompt_ids, tokens, logprobs) in found.items():
        logits = logits_of(prompt_ids + tokens)
        for place, token in enumerate(tokens):
            row = logits[len(prompt_ids) - 1 + place]
            best = row.topk(2).values
            positions += 1
            if int(row.argmax()) != token:
                assert best[0] - best[1] < TIE, f"{prompt!r}: token {place} differs"
                assert best[0] - row[token] < TIE, f"{prompt!r}: token {place} is no tie"
                ties += 1
            expected = float(row.log_softmax(-1)[token])
            assert abs(expected - logprobs[place]) < 1e-3
    print(f"{name}: {positions} positions, {ties} ties closer than {TIE}")
    assert positions == sum(NEW_TOKENS - i % 7 for i in range(len(PROMPTS)))
    assert ties <= positions // 100


def test_bf16_is_as_near_to_fp32_as_transformers_own(reference):
    """Teacher-forced argmax over the same text, against fp32."""
    prompts = PROMPTS[:8]
    with LLM("smollm2", dtype="bfloat16", max_model_len=512) as llm:
        texts = []
        for prompt in prompts:
            ids = torch.tensor([llm.tokenizer.encode(prompt)])
            with torch.inference_mode():
                texts.append(
                    reference.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False)[
                        0
                    ]
                )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate([text.tolist() for text in texts], params)
    own = copy.deepcopy(reference).to(torch.bfloat16)
    ours = theirs = positions = 0
    for text, output in zip(texts, outputs, strict=True):
        with torch.inference_mode():
            best = reference(text[None]).logits[0].argmax(-1)
            their = own(text[None]).logits[0].float().argmax(-1)
        for place in range(1, len(text)):
            entry = output.prompt_logprobs[place]
            first = next(token for token, item in entry.items() if item.rank == 1)
            positions += 1
            ours += first == int(best[place - 1])
            theirs += int(their[place - 1]) == int(best[place - 1])
    print(f"bf16 argmax equal to fp32: ours {ours}, transformers' {theirs}, of {positions}")
    assert positions >= 256
    assert ours >= theirs - 2
