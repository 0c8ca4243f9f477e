"""The requests of a load: prompts and lengths, determined by a seed and a request's number."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import msgspec

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
class Lengths:
    """A distribution of token counts.

    Attributes:
        text: as it was written.
        low, high: bounds of a uniform distribution, or equal.
        mean, deviation: parameters of a normal distribution, cut at 1; a deviation of 0 means
            uniform.
    """

    text: str
    low: int = 0
    high: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `128`, `64-512` or `normal:128:40`.

        Raises:
            ValueError: it is none of these.
        """
        if found := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low, high = int(found[1]), int(found[2] or found[1])
            if 1 <= low <= high:
                return cls(text, low=low, high=high)
        elif (found := re.fullmatch(r"normal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text)) and (
            float(found[1]) >= 1 and float(found[2]) > 0
        ):
            return cls(text, mean=float(found[1]), deviation=float(found[2]))
        raise ValueError(
            "expected a count such as 128, a range such as 64-512, or normal:MEAN:DEVIATION, "
            f"got {text!r}"
        )

    def draw(self, rng: random.Random) -> int:
        """Return a count."""
        if self.deviation:
            return max(1, round(rng.gauss(self.mean, self.deviation)))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class SharedPrefix:
    """A prefix that requests have in common.

    Attributes:
        tokens: its length.
        groups: number of different prefixes; a request has one of them by chance.
    """

    tokens: int
    groups: int

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Read `TOKENSxGROUPS`.

        Raises:
            ValueError: the text has another form.
        """
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if not found or not int(found[1]) or not int(found[2] or 1):
            raise ValueError(f"expected TOKENSxGROUPS, such as 512x4, got {text!r}")
        return cls(int(found[1]), int(found[2] or 1))


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


@dataclass(frozen=True)
class Workload:
    """The requests of a load.

    Attributes:
        model: name that the server knows.
        chat: whether the route is /v1/chat/completions, or /v1/completions.
        seed: seed of prompts and lengths.
        input_tokens, output_tokens: distributions.
        shared: prefix that prompts share, in addition to their input tokens.
        ignore_eos: whether answers have exactly the output tokens.
        extra: further fields of the body.
        costs: costs of text.
    """

    model: str
    chat: bool = True
    seed: int = 0
    input_tokens: Lengths = Lengths("128", 128, 128)
    output_tokens: Lengths = Lengths("64", 64, 64)
    shared: SharedPrefix | None = None
    ignore_eos: bool = False
    extra: dict[str, object] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, load: str, index: int) -> bytes:
        """Return the body of a request.

        Args:
            load: what the request belongs to: loads have prompts of their own.
            index: index of the request in it.
        """
        rng = random.Random(f"{self.seed}, {load}, {index}")
        wanted = self.input_tokens.draw(rng)
        limit = self.output_tokens.draw(rng)
        prefix = ""
        if self.shared is not None:
            group = rng.randrange(self.shared.groups)
            same = random.Random(f"{self.seed}, shared, {group}")
            prefix = self.text(same, self.shared.tokens) + " "
        text = prefix + self.text(rng, wanted - self.costs.overhead)
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": limit,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**fields, **self.extra})

    def text(self, rng: random.Random, tokens: int) -> str:
        """Return random text of a number of tokens: at least one entry of the vocabulary."""
        costs = self.costs.of
        chosen: list[str] = []
        left = tokens
        while left > 0:
            # As many as may fit, of the dearest.
            count = max(1, left // max(costs.values()))
            more = rng.choices(VOCABULARY, k=count)
            if count == 1:
                fitting = [entry for entry in VOCABULARY if costs[entry] <= left]
                if not fitting:
                    break
                more = rng.choices(fitting, k=1)
            chosen += more
            left -= sum(costs[entry] for entry in more)
        return " ".join(chosen or rng.choices(VOCABULARY, k=1))
