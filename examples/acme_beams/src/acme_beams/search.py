"""Beam search: the likeliest outputs, by branches of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import Annotated, Meta, SamplingParams
from hardpoint.plugins.server import AsyncGenerator as Engine
from hardpoint.toolkit.branches import Branches
from hardpoint.typed import Strict

if TYPE_CHECKING:
    from hardpoint.plugins.requests.params import Prompt


class BeamSearch(Strict):
    """How to search.

    Attributes:
        length_penalty: the larger, the more longer outputs are preferred.
        early_stopping: whether `num_beams` outputs are enough, though a better one may come.
    """

    num_beams: Annotated[int, Meta(ge=1, le=32)] = 4
    length_penalty: float = 1.0
    early_stopping: bool = False


class Beam(msgspec.Struct, order=True):
    """An output that was found; one with a higher score is greater.

    Attributes:
        score: its log-probability, divided by its length to the power of the length penalty.
    """

    score: float = 0.0
    cumulative_logprob: float = 0.0
    token_ids: list[int] = []
    text: str = ""

    def followed_by(self, token: int, logprob: float, length_penalty: float) -> Beam:
        """Return a beam that is longer by a token."""
        total, token_ids = self.cumulative_logprob + logprob, [*self.token_ids, token]
        return Beam(total / len(token_ids) ** length_penalty, total, token_ids)


async def beam_search(
    engine: Engine, prompt: Prompt, params: SamplingParams, search: BeamSearch, **options: Any
) -> list[Beam]:
    """Return the best outputs, the best first, as `generate` of transformers does.

    Source: the section "Beam search" of Graves, "Sequence Transduction with Recurrent Neural
    Networks" (arXiv:1211.3711).

    Args:
        engine: an `AsyncLLM`, or that of a server.
        params: as `Branches` takes them; with `max_tokens`, but without stop strings.
        options: those of `AsyncLLM.generate`, and `request_id`; `abort` ends the search by it.

    Raises:
        RequestEndedError: a beam was aborted, failed or ran out of time.
        RequestError: as `Branches`.
    """
    beams, best_beams = [Beam()], list[Beam]()
    count = search.num_beams
    async with Branches(engine, prompt, params, count, **options) as branches:
        while beams:
            entries = await branches.candidates(beam.token_ids for beam in beams)
            grown = (
                beam.followed_by(token, logprob, search.length_penalty)
                for beam, entry in zip(beams, entries, strict=True)
                for token, logprob in entry.items()
            )
            best = sorted(grown, reverse=True)
            best_beams += [beam for beam in best[:count] if branches.has_ended(beam.token_ids)]
            best_beams = sorted(best_beams, reverse=True)[:count]
            beams = [beam for beam in best if not branches.has_ended(beam.token_ids)][:count]
            # The first of the beams, if there is one, is their best; the last one found the worst.
            if len(best_beams) == count and (search.early_stopping or beams[:1] <= best_beams[-1:]):
                break
    for beam in best_beams:
        beam.text = engine.tokenizer.decode(beam.token_ids, skip_special_tokens=True)
    return best_beams
