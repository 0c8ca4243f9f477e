"""The conformance suite for IO processors."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from hardpoint import typed
from hardpoint.plugins import (
    CompletionOutput,
    IOProcessor,
    IOProcessorContext,
    ModelConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.component.behaviour import UnusableError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.text.io_processor import ROUND

from .declared import declared_result
from .general.suite import InUse
from .scripted_tokenizer import ByteTokenizer
from .suite import NOTHING_DRAWN, Rule, Violation, checks, short_repr
from .timing.timed_suite import TimedSuite

SAMPLES = Rule(
    "samples: each input of `samples` is taken, and has an answer",
    "handle it, or leave it out of `samples`",
)
REFUSED = Rule(
    "refused: an input is taken, or refused by a RequestError, whatever it is",
    "declare a class Request of the input, or check each value before you use it",
)
NAMED = Rule(
    "named: the message of a RequestError begins with the path of the wrong value",
    "begin it with `data`, and the path inside it: `data.rows[3]: expected 4 numbers, got 2`",
)
PROMPTS = Rule(
    "prompts: pre_process gives pairs of a prompt that the model can read, and its parameters",
    "truncate long input, or reject it by a RequestError; take token ids of the vocabulary alone",
)
OVERLAPPING = Rule(
    "overlapping: a call has the same answer while others are under way, and after them",
    "keep all state of a call in the result of parse_request",
)
READS_ONLY = Rule(
    "reads only: inputs and outputs of the model belong to others, too",
    "copy a value before you change it",
)
ROUNDS = Rule(
    "rounds: a generator of post_process returns after `max_rounds` rounds, and ends if closed",
    "yield fewer prompts in each round, such as one per four texts, and none in an `except` or "
    "`finally`",
)
EFFECT = Rule(
    "effect: an answer depends on the model's outputs",
    "use the outputs in post_process; give `samples` with answers that differ with them",
)
RESPONSE = Rule(
    "response: the result of output_to_response is valid JSON",
    "return lists, tables with texts as keys, texts, finite numbers, structs or arrays",
)

_STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    1e308,
    2**70,
    "",
    "text",
    "\udcff",
    [],
    [None],
    [[]],
    [1, "a", {}],
    {},
    {"": {}},
    {"unknown": [1, 2]},
    {"data": {"data": {}}},
    float("nan"),
    object(),
)


_VARIANTS = 5


class IOProcessorSuite(TimedSuite):
    """Base class of a test class, which sets `processor`, `samples` and `refused`.

    The model is a fake: its vectors depend on the tokens of each prompt, `completion` is its text.

    Attributes:
        processor: the class under test.
        samples: inputs that it takes, at least two.
        refused: inputs that it refuses; without any, wrong ones are made up.
        vocab_size, hidden_size, num_classes, max_model_len: sizes of the model.
        completion: the text that it generates.
        max_rounds: most rounds of prompts of a call, as `plugins.io_rounds`.
    """

    kind = "io_processors"
    processor: ClassVar[type[IOProcessor]]
    samples: ClassVar[Sequence[Any]] = ()
    refused: ClassVar[Sequence[Any]] = ()
    vocab_size: ClassVar[int] = 257
    hidden_size: ClassVar[int] = 8
    num_classes: ClassVar[int] = 3
    max_model_len: ClassVar[int] = 128
    completion: ClassVar[str] = "a completion"
    max_rounds: ClassVar[int] = 16
    _variant: int = 0
    """Number of the fake model; each has other outputs."""

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the context; by default a token is a byte."""
        return ByteTokenizer()

    def _component(self) -> type[Component]:
        return self.processor

    def _make(self) -> IOProcessor:
        config = ModelConfig(
            architecture="ScriptedModel",
            hf={},
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_model_len,
        )
        processor: IOProcessor = self._build(
            IOProcessorContext,
            model_config=config,
            max_model_len=self.max_model_len,
            tokenizer=self.make_tokenizer,
        )
        return processor

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        if not self.samples:
            raise _no_samples(self.samples)
        processor = self._make()

        def use(number: int) -> None:
            self._answer(processor, self.samples[number % len(self.samples)])

        yield InUse(processor, use)

    @checks(SAMPLES)
    def test_samples(self) -> None:
        """Each sample is taken and has an answer; a struct of an input is taken as its data is."""
        if len(self.samples) < 2:
            raise _no_samples(self.samples)
        for sample in self.samples:
            processor = self._make()
            answer = self._answer(processor, sample)
            declared = self.processor.Request
            is_converted = self.processor.parse_request is IOProcessor.parse_request
            if declared is not None and is_converted:
                same = typed.convert(sample, declared, path="data", str_keys=True)
                if self._answer(processor, same) != answer:
                    raise SAMPLES.violation(
                        f"{short_repr(sample)} has another answer as a {declared.__qualname__}"
                    )
            processor.close()

    @checks(REFUSED)
    def test_refused(self) -> None:
        """Wrong inputs are rejected by a RequestError with a reason; nothing else is raised."""
        processor = self._make()
        for data in self.refused:
            if self._refusal(processor, data) is None:
                raise REFUSED.violation(f"{short_repr(data)} of `refused` was taken")
        for data in _STRANGE:
            self._refusal(processor, data)
        for data in self._damaged():
            self._refusal(processor, data)
        self._answer(processor, self.samples[0])

    @checks(PROMPTS)
    def test_prompts(self) -> None:
        """Prompts are not empty, of the vocabulary, and no longer than the model reads."""
        processor = self._make()
        for sample in self.samples:
            for prompts in self._rounds(processor, *self._begun(processor, sample)):
                self._check_prompts(sample, prompts)

    def _check_prompts(self, sample: Any, prompts: list[Any]) -> None:
        tokenizer = self.make_tokenizer()
        for place, (prompt, params) in enumerate(prompts):
            tokens = self._tokens(tokenizer, prompt)
            room = self.max_model_len
            if isinstance(params, SamplingParams):
                room -= 1
            if not 1 <= len(tokens) <= room:
                raise PROMPTS.violation(
                    f"prompt {place} of {short_repr(sample)} has {len(tokens)} tokens, the "
                    f"model reads 1 to {room}"
                )
            wrong = [t for t in tokens if type(t) is not int or not 0 <= t < self.vocab_size]
            if wrong:
                raise PROMPTS.violation(
                    f"prompt {place} of {short_repr(sample)} has {short_repr(wrong[0])}, "
                    f"expected token ids from 0 to {self.vocab_size - 1}"
                )

    @checks(OVERLAPPING)
    def test_overlapping(self) -> None:
        """Calls that begin before others end have the answers that each has alone."""
        alone = [self._answer(self._make(), sample) for sample in self.samples]
        processor = self._make()
        order = [*range(len(self.samples)), *range(len(self.samples))]
        open_calls = {
            number: self._rounds(processor, *self._begun(processor, self.samples[index]))
            for number, index in enumerate(order)
        }
        while open_calls:  # one round of each call, of half of them first
            for number in sorted(open_calls, key=lambda number: (number % 2, number)):
                answer = _advance(open_calls[number])
                if answer is None:
                    continue
                del open_calls[number]
                if answer[0] != alone[order[number]]:
                    sample = short_repr(self.samples[order[number]])
                    raise OVERLAPPING.violation(
                        f"with {len(order)} calls under way, {sample} has another answer than alone"
                    )

    @checks(ROUNDS)
    def test_rounds(self) -> None:
        """Each call ends after some rounds; a call that is aborted between two of them ends."""
        for sample in self.samples:
            processor = self._make()
            self._answer(processor, sample)
            request, prompts = self._begun(processor, sample)
            generator = processor.post_process(request, self._outputs(prompts))
            if inspect.isgenerator(generator):
                try:
                    next(generator, None)
                    generator.close()
                except RuntimeError as error:
                    raise ROUNDS.violation(
                        f"post_process() of {short_repr(sample)} goes on after it was closed: "
                        f"{error}"
                    ) from error
            self._answer(processor, sample)

    @checks(READS_ONLY)
    def test_reads_only(self) -> None:
        """It changes neither an input nor the outputs of the model."""
        processor = self._make()
        for sample in self.samples:
            self._answer(processor, sample)

    @checks(EFFECT)
    def test_effect(self) -> None:
        """With another model, some sample has another answer."""
        try:
            for sample in self.samples:
                first = self._answer(self._make(), sample)
                for self._variant in range(1, _VARIANTS):
                    if self._answer_or_error(sample) != first:
                        return
                self._variant = 0
        finally:
            self._variant = 0
        raise EFFECT.violation(
            f"{NOTHING_DRAWN}: {len(self.samples)} samples have the same answers with {_VARIANTS} "
            f"models, expected different answers"
        )

    @checks(RESPONSE)
    def test_response(self) -> None:
        """Answers come back from JSON as they were, twice the same."""
        processor = self._make()
        for sample in self.samples:
            if self._answer(processor, sample) != self._answer(processor, sample):
                raise RESPONSE.violation(f"{short_repr(sample)} has two different answers")

    def _answer(self, processor: IOProcessor, data: Any) -> Any:
        with self._unchanged(READS_ONLY, "the call", the_input=data):
            try:
                request, prompts = self._begun(processor, data)
            except RequestError as refused:
                raise SAMPLES.violation(f"{short_repr(data)} is refused: {refused}") from refused
            return self._finished(processor, request, prompts)

    def _answer_or_error(self, data: Any) -> Any:
        """Return the answer to an input; the error if the outputs of the model cannot be used."""
        try:
            return self._answer(self._make(), data)
        except Violation:
            raise
        except Exception as error:
            return error

    def _begun(self, processor: IOProcessor, data: Any) -> tuple[Any, list[Any]]:
        with self._unchanged(READS_ONLY, "parse_request() or pre_process()", the_input=data):
            request = self._timed(processor.parse_request, data)
            prompts = self._timed(processor.pre_process, request)
        checked = declared_result(PROMPTS, IOProcessor, "pre_process", prompts, (request,))
        return request, checked

    def _finished(self, processor: IOProcessor, request: Any, prompts: list[Any]) -> Any:
        rounds = self._rounds(processor, request, prompts)
        while (answer := _advance(rounds)) is None:
            pass
        return answer[0]

    def _rounds(
        self, processor: IOProcessor, request: Any, prompts: list[Any]
    ) -> Generator[list[Any], None, Any]:
        """Yield the prompts of each round before their outputs are used; return the answer."""
        yield prompts
        outputs = self._outputs(prompts)
        with self._unchanged(READS_ONLY, "post_process()", outputs_of_the_model=outputs):
            output = self._timed(processor.post_process, request, outputs)
        if inspect.isgenerator(output):
            output = yield from self._further_rounds(output, outputs)
        return self._response(processor, output)

    def _further_rounds(
        self, generator: Generator[Any, Any, Any], outputs: list[Any]
    ) -> Generator[list[Any], None, Any]:
        def post_process(sent: Any) -> tuple[Any, bool]:
            try:
                return generator.send(sent), False
            except StopIteration as end:
                return end.value, True

        sent = None
        for _ in range(self.max_rounds):
            with self._unchanged(READS_ONLY, "post_process()", outputs_of_the_model=outputs):
                value, is_last = self._timed(post_process, sent)
            if is_last:
                return value
            try:
                prompts: list[Any] = ROUND.check(value, (), ())
            except UnusableError as error:
                raise PROMPTS.violation(f"post_process() {error}") from error
            yield prompts
            outputs = sent = self._outputs(prompts)
        raise ROUNDS.violation(
            f"post_process() yielded prompts after {self.max_rounds} rounds, expected its output"
        )

    def _response(self, processor: IOProcessor, output: Any) -> Any:
        response = self._timed(processor.output_to_response, output)
        encoded = declared_result(RESPONSE, IOProcessor, "output_to_response", response, (output,))
        return json.loads(encoded)

    def _refusal(self, processor: IOProcessor, data: Any) -> RequestError | None:
        taken = False
        try:
            request, prompts = self._begun(processor, data)
            taken = True
            self._finished(processor, request, prompts)
        except Violation:
            raise
        except Exception as cause:
            if taken or not isinstance(cause, RequestError):
                raise REFUSED.violation(
                    f"{short_repr(data)} raised {type(cause).__name__}: {cause}"
                ) from cause
            if not str(cause).startswith("data") or ": " not in str(cause):
                raise NAMED.violation(
                    f"{short_repr(data)} is refused by {short_repr(str(cause))}"
                ) from cause
            return cause
        return None

    def _damaged(self) -> list[Any]:
        damaged: list[Any] = []
        for sample in self.samples:
            if isinstance(sample, dict):
                for name in sample:
                    damaged += [{**sample, name: other} for other in _STRANGE]
                    damaged.append({key: sample[key] for key in sample if key != name})
            elif isinstance(sample, list):
                damaged += [[*sample, other] for other in _STRANGE]
        return damaged

    def _tokens(self, tokenizer: Tokenizer, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        return tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _outputs(self, prompts: list[Any]) -> list[PoolingRequestOutput | RequestOutput]:
        """Return outputs of the model, which depend on the tokens of each prompt alone."""
        tokenizer = self.make_tokenizer()
        made: list[PoolingRequestOutput | RequestOutput] = []
        for place, (prompt, params) in enumerate(prompts):
            tokens = list(self._tokens(tokenizer, prompt))
            made.append(
                self._pooled(str(place), tokens, params)
                if isinstance(params, PoolingParams)
                else self._generated(str(place), tokens, params)
            )
        return made

    def _pooled(self, name: str, tokens: list[int], params: PoolingParams) -> PoolingRequestOutput:
        sizes: dict[str, Callable[[], tuple[int, ...]]] = {
            "embed": lambda: (params.dimensions or self.hidden_size,),
            "token_embed": lambda: (len(tokens), params.dimensions or self.hidden_size),
            "classify": lambda: (self.num_classes,),
            "score": lambda: (1,),
        }
        shape = sizes[params.task]()
        seed = self._variant + sum(
            (place + 1) * (int(token) + 1) for place, token in enumerate(tokens)
        )
        numbers = np.random.default_rng(seed % 2**32).random(math.prod(shape), np.float32)
        result: Any = numbers.reshape(shape)
        if params.task == "classify":
            result = result / result.sum()
        elif params.task == "score":
            result = float(result[0])
        elif params.normalize is not False:
            result = result / np.linalg.norm(result, axis=-1, keepdims=True)
        return PoolingRequestOutput(
            request_id=name,
            outputs=result,
            prompt_token_ids=tokens,
            finished=True,
            finish_reason="stop",
        )

    def _generated(self, name: str, tokens: list[int], params: SamplingParams) -> RequestOutput:
        text = self.completion + " " * self._variant + "." * self._variant
        completions = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=self.make_tokenizer().encode(text),
                finish_reason="stop",
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id=name,
            prompt=None,
            prompt_token_ids=tokens,
            outputs=completions,
            finished=True,
        )


def _advance(rounds: Generator[list[Any], None, Any]) -> tuple[Any] | None:
    """Go on with a call; return its answer, alone, or None after another round."""
    try:
        next(rounds)
    except StopIteration as end:
        return (end.value,)
    return None


def _no_samples(samples: Sequence[Any]) -> Violation:
    return SAMPLES.violation(
        f"`samples` has {len(samples)} inputs", "set `samples` to at least two"
    )
