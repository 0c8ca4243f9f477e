"""The prompts of a load: text of stated lengths, and the answers that conversations go on from."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.simulation import Segment, SimulatedRequest
from hardpoint.typed import Strict

_ENTRIES = """
age air animal answer apple april area art autumn back ball bank basket bed bell bird black blue
boat body book bottle boy bread bridge bright brother brown bus business cake camp car case chair
change child church city clean clock close cloud coat coffee cold color community company corn
cotton country cover cow cross cup dance dark day deep desk dinner doctor dog door dress drink dry
early east education end eye face fact family farm father field fire fish floor flower foot force
forest friend front game garden girl glass gold government grass green group guy hand hat head
health hill history home horse hot hour house ice idea information island issue job key kid kind
kitchen lake land large law leaf letter level life light line lion little long lot man map market
member milk minute moment money month morning mother mountain music nail name night north number
ocean office open others page paint paper parent part party people person place plant point policy
power president problem program question quick reason research result right river room school
sense service side silver simple sister small state stone story strong student study summer system
teacher team thing time war water way week window winter woman word work world year yellow
"""
VOCABULARY = tuple(_ENTRIES.split())
"""What prompts are made of."""


@dataclass(frozen=True)
class Costs:
    """How many tokens a text of the vocabulary has.

    Attributes:
        of: tokens of each entry with a space before it.
        overhead: other tokens of a prompt: a chat template's and BOS, less what the first entry
            saves without a space.
        measured: whether the server counted them; otherwise each entry counts as one.
    """

    of: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VOCABULARY, 1))
    overhead: int = 0
    measured: bool = False


class RequestFields(Strict):
    """The fields of requests.

    Attributes:
        model: name that the server knows; "" is the first that it lists.
        endpoint: /v1/chat/completions, or /v1/completions.
        ignore_eos: whether answers have exactly the tokens of the load; a field of Hardpoint's,
            vLLM's and other servers.
        only_openai: whether nothing is sent that OpenAI's API does not have: `ignore_eos`, and the
            tags and priorities of a load.
        retain_seconds: for how long servers of Hardpoint are asked to retain the cache of a
            conversation, whose session is named then.
        body: further fields of each request.
    """

    model: str = ""
    endpoint: Literal["chat", "completions"] = "chat"
    ignore_eos: bool = True
    only_openai: bool = False
    retain_seconds: Annotated[float, Meta(gt=0)] | None = None
    body: dict[str, Any] = {}

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


class PromptGenerator:
    """Makes bodies of requests: the same segment has the same text, wherever it is.

    Attributes:
        fields: fields of the requests.
    """

    def __init__(self, fields: RequestFields, costs: Costs, seed: str) -> None:
        """`costs`: costs of text; `seed`: seed of all texts."""
        self.fields = fields
        self._costs, self._seed = costs, seed
        self._segment_text = functools.lru_cache(maxsize=4096)(self._make_text)

    def body(self, request: SimulatedRequest, answers: Mapping[int, str]) -> bytes:
        """Return the body of a request.

        Args:
            request: the request.
            answers: the texts of earlier answers, by the ids of their segments.
        """
        fields = self.fields
        found: dict[str, Any] = {
            "model": fields.model,
            "max_tokens": request.output.length,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        parts = self._parts(request.prompt, answers)
        if fields.endpoint == "chat":
            found["messages"] = [{"role": role, "content": text} for role, text in parts]
        else:
            found["prompt"] = " ".join(text for _, text in parts)
        if not fields.only_openai:
            found |= {"ignore_eos": True} if fields.ignore_eos else {}
            found |= {"tags": request.tags} if request.tags else {}
            found |= {"priority": request.priority} if request.priority else {}
        if fields.retain_seconds is not None and request.session is not None:
            found |= {"session": request.session, "retain_seconds": fields.retain_seconds}
        return msgspec.json.encode({**found, **fields.body})

    def _parts(
        self, prompt: Sequence[Segment], answers: Mapping[int, str]
    ) -> list[tuple[str, str]]:
        """Return role and text of each message; text of one role is one message."""
        parts: list[tuple[str, str]] = []
        for place, segment in enumerate(prompt):
            if segment.id in answers:
                role, text = "assistant", answers[segment.id]
            else:
                # The tokens of the template count as those of the last text, which no other
                # prompt begins with.
                less = self._costs.overhead if place == len(prompt) - 1 else 0
                role, text = "user", self._segment_text(segment.id, segment.length - less)
            if parts and parts[-1][0] == role:
                text = f"{parts.pop()[1]} {text}"
            parts.append((role, text))
        return parts

    def _make_text(self, number: int, tokens: int) -> str:
        return random_text(random.Random(f"{self._seed}, {number}"), tokens, self._costs)


def random_text(rng: random.Random, tokens: int, costs: Costs) -> str:
    """Return random text of a number of tokens: at least one entry of the vocabulary."""
    cost_of = costs.of
    chosen: list[str] = []
    left = tokens
    while left > 0:
        # As many as may fit, of the dearest.
        count = max(1, left // max(cost_of.values()))
        more = rng.choices(VOCABULARY, k=count)
        if count == 1:
            fitting = [entry for entry in VOCABULARY if cost_of[entry] <= left]
            if not fitting:
                break
            more = rng.choices(fitting, k=1)
        chosen += more
        left -= sum(cost_of[entry] for entry in more)
    return " ".join(chosen or rng.choices(VOCABULARY, k=1))
