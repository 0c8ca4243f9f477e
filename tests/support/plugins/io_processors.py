"""IO processors for tests: rows of numbers are named by the nearest row, and one does harm."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from hardpoint import SamplingParams, plugins
from hardpoint.plugins import (
    Annotated,
    ConfigError,
    IOProcessor,
    IOProcessorContext,
    Meta,
    RequestError,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.typed import Strict, convert

Row = Annotated[list[Annotated[float, Meta(ge=-1, le=1)]], Meta(min_length=1, max_length=64)]


class Measurements(Strict):
    """Rows of numbers.

    Attributes:
        rows: numbers from -1 to 1.
        vectors: whether the answer has the vector of each row.
    """

    rows: Annotated[list[Row], Meta(max_length=100)]
    vectors: bool = False


class Named(Strict):
    """The names of rows.

    Attributes:
        names: names of the nearest prototypes, by row.
    """

    names: list[str]
    vectors: list[list[float]] | None = None


class Nearest(IOProcessor):
    """Names rows of numbers by the nearest of some prototypes: no text goes in, none comes out.

    A number is a token, one of 101 from -1 to 1; prototypes are rows that each call computes.
    """

    contract = 1
    Request = Measurements

    class Options(plugins.Options):
        """Options of the processor.

        Attributes:
            prototypes: rows by name.
        """

        prototypes: dict[str, list[float]] = msgspec.field(
            default_factory=lambda: {"low": [-1.0, -1.0], "high": [1.0, 1.0]}
        )

    options: Options

    def __init__(self, context: IOProcessorContext) -> None:
        """Check the prototypes."""
        super().__init__(context)
        if not self.options.prototypes:
            raise ConfigError(f"plugin.{self.name}.prototypes: expected at least one row")
        self._names = list(self.options.prototypes)

    def pre_process(self, request: Measurements) -> list[tuple[list[int], PoolingParams]]:
        """Return a prompt for each row, and one for each prototype."""
        rows = [*request.rows, *self.options.prototypes.values()]
        return [
            ([round(50 * number) + 50 for number in row], PoolingParams(pooler="mean"))
            for row in rows
        ]

    def post_process(
        self, request: Measurements, outputs: Sequence[PoolingRequestOutput]
    ) -> list[tuple[str, Any]]:
        """Return the name and the vector of each row."""
        vectors = [output.outputs for output in outputs]
        prototypes = np.stack(vectors[len(request.rows) :])
        row_vectors = vectors[: len(request.rows)]
        places = [int((prototypes @ vector).argmax()) for vector in row_vectors]
        returned = row_vectors if request.vectors else [None] * len(row_vectors)
        return [
            (self._names[place], vector) for place, vector in zip(places, returned, strict=True)
        ]

    def output_to_response(self, output: list[tuple[str, Any]]) -> Named:
        """Return the names, and the vectors if there are some."""
        vectors = [vector.tolist() for _, vector in output if vector is not None]
        return Named(names=[name for name, _ in output], vectors=vectors or None)


class Writes(IOProcessor):
    """Lets the model write a text for each of several; any object is an input."""

    contract = 1

    def parse_request(self, data: Any) -> list[str]:
        """Take a list of texts."""
        return convert(data, list[str], path="data", error=RequestError)

    def pre_process(self, request: list[str]) -> list[tuple[str, SamplingParams]]:
        """Return the texts."""
        return [(text, SamplingParams(max_tokens=4, temperature=0.0)) for text in request]

    def post_process(self, request: list[str], outputs: Sequence[Any]) -> dict[str, str]:
        """Return the completions, by text."""
        texts = (output.outputs[0].text for output in outputs)
        return dict(zip(request, texts, strict=True))


class InRounds(IOProcessor):
    """Has the rounds of its input after the first round, and notes the end of a call by its name.

    An entry is a list of prompts, "fails", or another text, which it yields. The output is the
    number of outputs of each round. A call of AsyncLLM that fails ends later, in another thread.
    """

    contract = 1
    over: ClassVar[defaultdict[str, list[str]]] = defaultdict(list)

    def parse_request(self, data: Any) -> Any:
        """Take any object."""
        return data

    def pre_process(self, request: Any) -> list[tuple[list[int], Any]]:
        """Return the prompts of the first round."""
        return self.prompts({}, [[1, 2]])

    def post_process(self, request: Any, outputs: Sequence[Any]) -> Generator[Any, Any, list[int]]:
        """Have the rounds of the request."""
        counts, is_complete = [len(outputs)], False
        try:
            for prompts in request["rounds"]:
                if prompts == "fails":
                    raise KeyError("missing")
                yielded = prompts if isinstance(prompts, str) else self.prompts(request, prompts)
                outputs = yield yielded
                counts.append(len(outputs))
            is_complete = True
        finally:
            self.over[request.get("name", "")].append("returned" if is_complete else "ended")
            if request.get("goes_on"):
                yield []
        return counts

    def prompts(self, request: Any, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
        """Return prompts with parameters; an empty one is pooled."""
        params = request.get("params", SamplingParams(max_tokens=1, ignore_eos=True))
        return [(ids, params) if ids else ([1], PoolingParams()) for ids in prompts]


GO_ON = threading.Event()
WAITING = threading.Event()


class Harmful(IOProcessor):
    """Does the action in its input, in the method that it names."""

    contract = 1

    def parse_request(self, data: Any) -> Any:
        """Fail, or wait, if it is asked to."""
        self.act(data, "parse_request")
        return data

    def pre_process(self, request: Any) -> Any:
        """Return one prompt, or something else."""
        if (answer := self.act(request, "pre_process")) is not None:
            return answer
        return [([1, 2, 3], request.get("params", PoolingParams()))] * request.get("prompts", 1)

    def post_process(self, request: Any, outputs: Sequence[Any]) -> Any:
        """Return the request."""
        self.act(request, "post_process")
        return request

    def output_to_response(self, output: Any) -> Any:
        """Return it, or something else."""
        answer = self.act(output, "output_to_response")
        return "done" if answer is None else answer

    def act(self, request: Any, method: str) -> Any:
        """Do the requested action in a method."""
        match request.get(method):
            case "waits":
                WAITING.set()
                assert GO_ON.wait(20)
            case "fails":
                raise KeyError("missing")
            case "refuses":
                raise RequestError("data.x: expected another one")
            case other:
                return other
