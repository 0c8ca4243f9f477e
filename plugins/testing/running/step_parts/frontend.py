"""The checks of frontend halves of step parts, and the components that a suite's parts get."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hardpoint.host.boundary.parts.hooks import selects
from hardpoint.plugins import (
    EncodedPair,
    EngineConfig,
    EngineCoreRequest,
    FrontendHalf,
    ReasoningMarkers,
    RequestError,
    SamplingParams,
)
from hardpoint.plugins.component import Component, Context, Source
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.step_part.components import ComponentCalls
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.testing.engine_access import (
    FaultReporter,
    call_declared,
    fault_counter,
    guard,
    installed_components,
)
from hardpoint.testing.reporting.calls import call
from hardpoint.testing.scripted_tokenizer import ByteTokenizer
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule, short_repr

FRONTEND = Rule(
    "frontend: prepare refuses a request by a RequestError, or completes it for good",
    "set fields that are open, and leave id, prompt and fields with a value; a call with a "
    "request that was prepared before changes nothing",
)
ANSWERS = Rule(
    "answers: reads_answer gives a bool, and validate text or None for any answer",
    "decide by the request alone, and return the mistake of an answer instead of raising it",
)

PROMPTS = Rule(
    "prompts: read_prompt refuses a prompt by a RequestError, or gives ids and fields of its part",
    "return a GivenPrompt with an id per position, and with fields that request_fields names; the "
    "request that it becomes has to pass prepare",
)

Classes = Mapping[str, Mapping[str, type[Component]]]


class ScriptedComponents:
    """The component factory of a suite: scripted components, else installed ones."""

    def __init__(self, scripted: Classes, config: EngineConfig) -> None:
        self._scripted, self._installed = scripted, installed_components(config)
        self._faults = fault_counter(config)

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build a component."""
        if (cls := self._scripted.get(kind, {}).get(name)) is None:
            return self._installed.create(kind, name, context, **fields)
        return cls(context(name=name, options=cls.Options(), **fields))

    def guarded(
        self,
        kind: str,
        name: str,
        context: type[Context[Any]],
        report: FaultReporter,
        **fields: Any,
    ) -> Any:
        """Build a component with checks of the declared results of its methods."""
        component = self.create(kind, name, context, **fields)
        return guard(component, kind, report, self._faults.calls(kind, source_of(name)))

    def enabled(self, kind: str) -> Sequence[str]:
        """Return the names of the suite's own components of a kind, else of the installed ones."""
        return list(self._scripted.get(kind, ())) or self._installed.enabled(kind)

    def find(self, kind: str, name: str) -> type[Component] | None:
        """Return the class of a component; None if it is not enabled."""
        return self._scripted.get(kind, {}).get(name) or self._installed.find(kind, name)

    def identity(self, kind: str, name: str) -> Any:
        """Return a value that other generations have for the same component."""
        return self._scripted.get(kind, {}).get(name) or self._installed.identity(kind, name)

    def check_name(self, kind: str, name: str, path: str) -> None:
        """Check that a name that a request gives belongs to one distribution."""
        if name not in self._scripted.get(kind, {}):
            self._installed.check_name(kind, name, path)

    def hint(self, kind: str, name: str) -> str:
        """Return, as the end of a message, a similar name, and how to get the component."""
        return self._installed.hint(kind, name)

    def call(self, kind: str, name: str, method: str, *args: Any) -> Any:
        """Call a class method of an enabled component."""
        if (cls := self._scripted.get(kind, {}).get(name)) is None:
            return self._installed.call(kind, name, method, *args)
        return call_declared(kind, source_of(name), cls, method, *args)

    def calls(self, kind: str, name: str) -> ComponentCalls:
        """Return the caller of the methods of a component."""
        if name in self._scripted.get(kind, {}):
            return self._faults.calls(kind, source_of(name))
        return self._installed.calls(kind, name)

    def close(self, component: Component) -> None:
        """Close a component."""
        component.close()

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component."""
        return f"{kind} {name!r}"


def source_of(name: str) -> Source:
    """Return the source of a suite's own component."""
    return Source(name, f"{__name__}:{name}", "", "", "the suite")


def check_prepare(
    half: FrontendHalf, request: EngineCoreRequest, reasoning: ReasoningMarkers | None
) -> EngineCoreRequest | None:
    """Return a request as a half completes it; None if it is refused.

    Raises:
        Violation: the half breaks a rule.
    """
    prepared, again = copy.deepcopy(request), copy.deepcopy(request)
    refused = _refusal(half, prepared, reasoning)
    if (other := _refusal(half, again, reasoning)) != refused:
        raise FRONTEND.violation(
            f"prepare() raised {short_repr(refused)}, and for an equal request {short_repr(other)}"
        )
    if refused is not None:
        return None
    for name in ("request_id", "prompt_token_ids"):
        if (value := getattr(prepared, name)) != (before := getattr(request, name)):
            raise FRONTEND.violation(
                f"prepare() changed {name} from {short_repr(before)} to {short_repr(value)}"
            )
    once = copy.deepcopy(prepared)
    refused = _refusal(half, prepared, reasoning)
    for name in prepared.__struct_fields__:
        if refused is not None or snapshot(getattr(once, name)) != snapshot(
            getattr(prepared, name)
        ):
            first, value = short_repr(getattr(once, name)), short_repr(getattr(prepared, name))
            raise FRONTEND.violation(
                f"prepare() gave {name} {first}, and when called again {refused or value}"
            )
    return prepared


class _Bytes(ByteTokenizer):
    """Reads pairs of texts, too."""

    contract = 1

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        ids = [self.encode(text) for text in (first, second)]
        places = range(len(ids[0])), range(len(ids[0]), len(ids[0]) + len(ids[1]))
        return EncodedPair([*ids[0], *ids[1]], *places, len(ids[0]))


class BytesReader:
    """Reads prompts of bytes, as a `PromptReader`."""

    tokenizer = _Bytes()

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def read(self, prompt: Prompt) -> GivenPrompt:
        """Return the token ids of a text or of a list of ids."""
        content = prompt
        if isinstance(content, Mapping):
            if set(content) not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(f"prompt: expected text or token ids, got {sorted(content)}")
            (content,) = content.values()
        if isinstance(content, str):
            return GivenPrompt(token_ids=self.tokenise(content), text=content)
        return GivenPrompt(token_ids=list(content))


def check_prompt(
    half: FrontendHalf,
    prompt: Mapping[str, Any],
    fields: Collection[str],
    vocab_size: int,
    pooling: PoolingParams | None,
) -> None:
    """Check that a half reads a prompt of its own form, and takes the request that it becomes.

    Args:
        half: to check.
        prompt: prompt of the suite.
        fields: fields that the part uses.
        vocab_size: vocabulary size of the model.
        pooling: parameters of a pooling request; None is a request that generates.

    Raises:
        Violation: the half breaks a rule.
    """
    if set(half.prompt_keys).isdisjoint(prompt):
        keys = short_repr(half.prompt_keys)
        raise PROMPTS.violation(f"prompt_keys are {keys}, none of the prompt {sorted(prompt)}")

    def read() -> GivenPrompt | str:
        try:
            return half.read_prompt(prompt, BytesReader())
        except RequestError as refused:
            return str(refused)

    read_result = call(PROMPTS, read)
    if isinstance(read_result, str):
        raise PROMPTS.violation(f"read_prompt() refused a prompt of the suite: {read_result}")
    _check_given("read_prompt()", read_result, fields, vocab_size)
    _check_cut(read_result, fields, vocab_size)
    request = EngineCoreRequest(
        request_id="r0",
        prompt_token_ids=list(read_result.token_ids),
        params=SamplingParams(),
        pooling_params=pooling,
        **read_result.fields,
    )
    if (refused := _refusal(half, request, None)) is not None:
        raise PROMPTS.violation(f"prepare() rejected the result of read_prompt(): {refused}")


def _check_given(name: str, returned: Any, fields: Collection[str], vocab_size: int) -> None:
    """Check a prompt that a half has read or cut.

    Raises:
        Violation: it has something else than ids of the vocabulary and fields of its part.
    """
    if not isinstance(returned, GivenPrompt) or not all(
        type(token) is int and 0 <= token < vocab_size for token in returned.token_ids
    ):
        raise PROMPTS.violation(f"{name} returned {short_repr(returned)}")
    if not set(returned.fields) <= set(fields):
        raise PROMPTS.violation(
            f"{name} gave the fields {sorted(returned.fields)}, and request_fields() is "
            f"{sorted(fields)}"
        )


def _check_cut(prompt: GivenPrompt, fields: Collection[str], vocab_size: int) -> None:
    """Check that a prompt which can be cut gets no longer than it is to be.

    Raises:
        Violation: the half breaks a rule.
    """
    cut, limit = prompt.cut, len(prompt.token_ids) - 1
    if cut is None or limit < 1:
        return

    def shorter() -> GivenPrompt | None:
        try:
            return cut(limit)
        except RequestError:
            return None

    if (shortened := call(PROMPTS, shorter)) is None:
        return
    _check_given("cut()", shortened, fields, vocab_size)
    if (count := len(shortened.token_ids)) > limit:
        raise PROMPTS.violation(f"cut({limit}) returned {count} ids")


def _refusal(
    half: FrontendHalf, request: EngineCoreRequest, reasoning: ReasoningMarkers | None
) -> str | None:
    def prepare() -> str | None:
        try:
            if selects(half, request):
                half.prepare(request, reasoning)
        except RequestError as refused:
            return str(refused)
        return None

    refusal: str | None = call(FRONTEND, prepare)
    return refusal


def check_answer(half: FrontendHalf, request: EngineCoreRequest, answer: str) -> None:
    """Check that a half reads the answer of a request.

    Raises:
        Violation: the half breaks a rule.
    """
    reads = selects(half, request) and call(ANSWERS, half.reads_answer, request)
    if type(reads) is not bool:
        raise ANSWERS.violation(f"reads_answer() returned {short_repr(reads)}, expected a bool")
    flaw = call(ANSWERS, half.validate, request, answer) if reads else None
    if flaw is not None and not (isinstance(flaw, str) and flaw):
        raise ANSWERS.violation(f"validate() returned {short_repr(flaw)}, expected text or None")
