"""Beam search over prompts that an engine completes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hardpoint import LLM, Logprob, SamplingParams

from .params import BeamSearchParams


@dataclass
class BeamSearchSequence:
    """One output.

    Attributes:
        tokens: prompt and output.
        logprobs: log-probabilities of each output position, by token id.
        cum_logprob: sum of the output's log-probabilities.
        text: the output, once the search has ended.
        finish_reason, stop_reason: how it ended.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The outputs of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def search(
    llm: LLM, prompts: Sequence[Any], params: BeamSearchParams, lora: Any
) -> list[BeamSearchOutput]:
    """Search all prompts at once; each step computes one token of every beam.

    The beams of a prompt share its blocks in the prefix cache.
    """
    tokenizer = llm.tokenizer
    starts = [_ids(llm, prompt) for prompt in prompts]
    beams = [[BeamSearchSequence(list(ids), lora_request=lora)] for ids in starts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    form = params.structured_outputs
    step = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        allowed_token_ids=params.allowed_token_ids,
        structured=None if form is None else form.native(),
        ignore_eos=True,
    )
    eos = set() if params.ignore_eos else set(tokenizer.eos_token_ids)
    for _ in range(params.max_tokens):
        live = [
            (number, beam) for number, prompt_beams in enumerate(beams) for beam in prompt_beams
        ]
        if not live:
            break
        options = {} if lora is None else {"lora_request": lora}
        outputs = llm.generate([beam.tokens for _, beam in live], step, use_tqdm=False, **options)
        following: list[list[BeamSearchSequence]] = [[] for _ in prompts]
        for (number, beam), output in zip(live, outputs, strict=True):
            (likely,) = output.outputs[0].logprobs or [{}]
            for token, entry in likely.items():
                longer = BeamSearchSequence(
                    [*beam.tokens, token],
                    [*beam.logprobs, dict(likely)],
                    lora,
                    beam.cum_logprob + entry.logprob,
                )
                if token in eos:
                    longer.finish_reason, longer.stop_reason = "stop", token
                    ended[number].append(longer)
                else:
                    following[number].append(longer)
        beams = [
            _best(prompt_beams, params, len(ids))
            for prompt_beams, ids in zip(following, starts, strict=True)
        ]
    results = []
    for number, (prompt_beams, done) in enumerate(zip(beams, ended, strict=True)):
        for beam in prompt_beams:
            beam.finish_reason = "length"
        best = _best([*done, *prompt_beams], params, len(starts[number]))
        for beam in best:
            output_ids = beam.tokens[len(starts[number]) :]
            if beam.stop_reason is not None and not params.include_stop_str_in_output:
                output_ids = output_ids[:-1]
            beam.text = tokenizer.decode(output_ids, skip_special_tokens=params.skip_special_tokens)
        results.append(BeamSearchOutput(best))
    return results


def _best(
    beams: Sequence[BeamSearchSequence], params: BeamSearchParams, start: int
) -> list[BeamSearchSequence]:
    """Return the best beams, of a prompt of `start` tokens."""

    def score(beam: BeamSearchSequence) -> float:
        length = max(1, len(beam.tokens) - start)
        return float(beam.cum_logprob / length**params.length_penalty)

    return sorted(beams, key=score, reverse=True)[: params.beam_width]


def _ids(llm: LLM, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(llm.tokenizer.encode(prompt))
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        return list(ids) if ids else list(llm.tokenizer.encode(prompt["prompt"]))
    return list(prompt)
