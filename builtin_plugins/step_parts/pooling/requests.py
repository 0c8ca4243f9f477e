"""Pooling in the frontend and the engine: requests, their poolers and their results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hardpoint import typed
from hardpoint.errors import RequestError, shown
from hardpoint.plugins import (
    EncodedPair,
    EngineCoreOutput,
    EngineCoreRequest,
    FrontendHalf,
    ModelRunnerOutput,
    Pooler,
    ReasoningMarkers,
    RequestFault,
    RequestOutput,
    SchedulerOutput,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.step_part import (
    GivenPrompt,
    PlanData,
    ProgramCalls,
    RequestFilter,
    StepObserver,
)
from hardpoint.plugins.text import OutputFormat, OutputReader

from .folder import ModelPooling
from .messages import PoolingReport

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory
    from hardpoint.plugins.step_part.part import PromptReader
    from hardpoint.plugins.text.output_parser import RequestedCalls


KIND = "poolers"

OF_TOKENS = ("token_embed",)
"""Tasks that have a result for each token."""

PAIRED = ("classify", "score")
"""Tasks of models with a head that classifies, for which texts may come in pairs."""

TASKS = ("embed", "token_embed")
"""Tasks of models without such a head."""

_OF_ANSWERS = (
    "logits_processors",
    "samplers",
    "speculators",
    "reasoning_parsers",
    "tool_parsers",
)
"""Kinds with components that do nothing for pooling requests."""

_PAIR = ("text", "text_pair")
_POOLING_FIELDS = ("pooling_params", "second_type_start")


class PooledFormat(OutputFormat):
    """The format of outputs that have a result instead of text."""

    def open(self, request: EngineCoreRequest) -> OutputReader:  # noqa: ARG002
        """Return the reader of the result."""
        return PooledReader()


class PooledReader(OutputReader):
    """Keeps the latest result of a request."""

    def __init__(self) -> None:
        self._result: Any = None

    def update(self, output: EngineCoreOutput) -> None:
        """Keep the result."""
        if output.pooling_output is not None:
            self._result = output.pooling_output

    def result(self, output: RequestOutput) -> PoolingRequestOutput | None:
        """Return the output with the result; None before there is one."""
        (completion,) = output.outputs
        if not output.finished and self._result is None:
            return None
        return PoolingRequestOutput(
            request_id=output.request_id,
            outputs=self._result,
            prompt_token_ids=output.prompt_token_ids,
            finished=output.finished,
            finish_reason=completion.finish_reason,
            error=completion.error,
            error_kind=completion.error_kind,
        )


class PooledRequests(FrontendHalf):
    """Checks the parameters of pooling requests, and fills in the defaults of the model."""

    prompt_keys = _PAIR
    for_fields = _POOLING_FIELDS
    for_parameters = ("plugin_args",)  # of poolers, which other requests are not to have

    def __init__(self, components: ComponentFactory, model: ModelPooling) -> None:
        """Look up poolers in `components`; `model` has the defaults of requests."""
        self._components, self._model = components, model

    def output_format(
        self,
        request: EngineCoreRequest,
        calls: RequestedCalls | None,  # noqa: ARG002
    ) -> OutputFormat | None:
        """Return the format of the results of a request that pools."""
        return None if request.pooling_params is None else PooledFormat()

    def read_prompt(self, prompt: Mapping[str, Any], reader: PromptReader) -> GivenPrompt:
        """Return the tokens of a pair of texts.

        Raises:
            RequestError: there is no pair, a text cannot be encoded, or the tokenizer takes no
                pairs.
        """
        if set(prompt) != set(_PAIR):
            keys = ", ".join(sorted(map(shown, prompt)))
            raise RequestError(
                "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', or a pair "
                f"with 'text' and 'text_pair', got the keys [{keys}]"
            )
        for key in _PAIR:
            if not isinstance(prompt[key], str):
                raise RequestError(f"{key}: expected a text, got {shown(prompt[key])}")
            if not prompt[key]:
                raise RequestError(f"{key}: expected a text that is not empty")
            typed.check_text(prompt[key], key, RequestError)
        try:
            return _given(reader.tokenizer.encode_pair(*(prompt[key] for key in _PAIR)))
        except NotImplementedError as cause:
            raise RequestError(f"text_pair: expected one text: {cause}") from cause

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:  # noqa: ARG002
        """Complete a request that pools.

        Raises:
            RequestError: its pooler is not enabled, or is not one for its task; it gives arguments
                to a component that it does not use; or it is a pair that does not pool.
        """
        arguments = request.params.plugin_args
        if request.second_type_start is not None:
            _check_types(request)
        if (params := request.pooling_params) is None:
            for path, _ in self._named(arguments, KIND) if arguments else ():
                raise RequestError(f"{path}: expected none, because the request does not pool")
            if request.second_type_start is not None:
                raise RequestError(
                    "text_pair: expected one prompt: texts are read in pairs to be classified and "
                    "scored, not to generate"
                )
            return
        self._check_pair(request, params)
        per_token = params.task in OF_TOKENS
        name = params.pooler or ("all" if per_token else self._model.pooler or "last")
        cls = self._class_of(name, params)
        self._check_arguments(arguments, name)
        if params.task in PAIRED and params.dimensions is not None:
            raise RequestError(
                f'dimensions: expected none for the task "{params.task}", got {params.dimensions}'
            )
        self._check_dimensions(params.dimensions)
        normalize = self._model.normalize or per_token
        request.pooling_params = msgspec.structs.replace(
            params,
            pooler=name,
            normalize=normalize if params.normalize is None else params.normalize,
            plugin_args={},
        )
        request.params = msgspec.structs.replace(
            request.params, max_tokens=1, skip_reading_prefix_cache=cls.needs_all
        )

    def _check_arguments(self, arguments: Mapping[str, Any], pooler: str) -> None:
        """Check that a pooling request has arguments only for components that it uses.

        Raises:
            RequestError: they are for another pooler, or for components of answers.
        """
        for path, name in self._named(arguments, KIND):
            if name != pooler:
                raise RequestError(f"{path}: expected none, because the pooler is {pooler!r}")
        for kind in _OF_ANSWERS:
            for path, _ in self._named(arguments, kind):
                raise RequestError(
                    f"{path}: expected none, because the request pools, and {kind} are for "
                    f"requests that generate"
                )

    def _named(self, arguments: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
        for name in self._components.enabled(kind) if arguments else ():
            for key in (name, f"{kind}/{name}"):
                if key in arguments:
                    yield f"plugin_args.{key}", name

    def _check_pair(self, request: EngineCoreRequest, params: PoolingParams) -> None:
        """Check whether a request has two texts or one; drop types of tokens that no model reads.

        Raises:
            RequestError: its task is not for as many.
        """
        is_pair = request.second_type_start is not None
        if is_pair and params.task not in PAIRED:
            raise RequestError(
                f'text_pair: expected one text for the task "{params.task}", got a pair'
            )
        if params.task == "score" and not is_pair:
            raise RequestError(
                'prompt: expected a pair of texts, {"text": ..., "text_pair": ...}, for the task '
                '"score", got one prompt'
            )
        if is_pair and not self._model.token_types:
            request.second_type_start = len(request.prompt_token_ids)

    def _check_dimensions(self, size: int | None) -> None:
        """Check the size that vectors are to be cut to.

        Raises:
            RequestError: the model was not trained for it.
        """
        cuts = self._model.cuts
        if size is None or (cuts and size in cuts):
            return
        if cuts:
            raise RequestError(
                f"dimensions: expected one of {', '.join(map(str, cuts))}, for which the model was "
                f"trained, got {size}"
            )
        if cuts is not None:
            raise RequestError(
                f"dimensions: expected none, because the model was not trained for shortened "
                f"vectors: its config.json has neither matryoshka_dimensions nor is_matryoshka; "
                f"got {size}"
            )
        if self._model.size is not None and size > self._model.size:
            raise RequestError(f"dimensions: expected at most {self._model.size}, got {size}")

    def _class_of(self, name: str, params: PoolingParams) -> type[Pooler]:
        """Return the class of the pooler of a request.

        Raises:
            RequestError: there is none, or it is not one for the task.
        """
        per_token = params.task in OF_TOKENS
        if params.pooler or self._model.pooler:
            self._components.check_name(KIND, name, "pooler")
        enabled = self._components.enabled(KIND)
        if name in enabled and (pooler := self._class(name)).per_token == per_token:
            return pooler
        fitting = [known for known in enabled if self._class(known).per_token == per_token]
        hint = "" if name in enabled else self._hint(name)
        raise RequestError(
            f"pooler: expected one of {', '.join(sorted(fitting))} for the task "
            f'"{params.task}", got {name!r}{hint}'
        )

    def _class(self, name: str) -> type[Pooler]:
        cls = self._components.find(KIND, name)
        assert cls is not None, "it is enabled"
        assert issubclass(cls, Pooler), "the registry has checked it"
        return cls

    def _hint(self, name: str) -> str:
        return self._components.hint(KIND, name)


class PooledResults(RequestFilter, PlanData, StepObserver, ProgramCalls):
    """Hands the vectors of workers on to the scheduler, which ends their requests."""

    for_fields = _POOLING_FIELDS

    def __init__(self, name: str, poolers: Collection[str], model: ModelPooling) -> None:
        """`poolers`: names of the enabled poolers."""
        self._name, self._poolers, self._model = name, frozenset(poolers), model
        self.tasks = TASKS
        if model.labels:
            self.tasks = PAIRED if len(model.labels) == 1 else PAIRED[:1]

    def check(self, request: EngineCoreRequest) -> None:
        """Check a request that another frontend may have made.

        Raises:
            RequestError: it names no pooler, or a disabled one; or it has types of tokens
                that it may not have.
        """
        _check_types(request)
        start = request.second_type_start
        if request.pooling_params is None:
            raise RequestError(
                f"second_type_start: expected none, because the request does not pool, got {start}"
            )
        has_types = start is not None and start < len(request.prompt_token_ids)
        if has_types and not self._model.token_types:
            raise RequestError(
                f"second_type_start: expected {len(request.prompt_token_ids)}, the length of the "
                f"prompt, because the model has no token types, got {start}"
            )
        if (name := request.pooling_params.pooler) not in self._poolers:
            known = ", ".join(sorted(self._poolers))
            raise RequestError(f"pooling_params.pooler: expected one of {known}, got {name!r}")

    def begin(self, plan: SchedulerOutput) -> bytes:  # noqa: ARG002
        """Return nothing but that there are such requests: the plan has their parameters."""
        return b""

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a call of a program.

        "describe" returns how the model pools. "prompt" returns the text before embedded
        texts: with `name`, the one of that name, or the default one for None; with
        `purpose`, the prompt of a "query" or a "document", empty if the model has none.

        Raises:
            RequestError: it is another call, or there is no such prompt.
        """
        if method not in ("describe", "prompt"):
            raise RequestError(f'method: expected "describe" or "prompt", got {shown(method)}')
        model = self._model
        if method == "prompt":
            return model.prompt(arguments.get("name"), arguments.get("purpose"))
        return {
            "pooler": model.pooler or "last",
            "normalize": model.normalize,
            "dimensions": model.size,
            "matryoshka_dimensions": None if model.cuts is None else list(model.cuts),
            "prompts": dict(model.prompts),
            "default_prompt": model.default_prompt,
            "labels": list(model.labels),
        }

    def result(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        result: ModelRunnerOutput,
    ) -> Mapping[str, RequestFault]:
        """Read the vectors of complete prompts; return the prompts that could not be pooled."""
        faults: dict[str, RequestFault] = {}
        for data in result.part_reports.get(self._name, {}).values():  # of the rank that samples
            report = msgspec.msgpack.decode(data, type=PoolingReport)
            for name, pooled in report.pooled.items():
                values = np.frombuffer(pooled.values, "<f4").reshape(pooled.shape)
                result.pooler_output[name] = values
            for name, (message, pooler) in report.failed.items():
                faults[name] = RequestFault(message, pooler)
        return faults


def _check_types(request: EngineCoreRequest) -> None:
    """Check where the types of a request's tokens change.

    Raises:
        RequestError: not inside of its prompt.
    """
    start, length = request.second_type_start or 0, len(request.prompt_token_ids)
    if not 0 <= start <= length:
        raise RequestError(
            f"second_type_start: expected a position from 0 to {length}, got {start}"
        )


def _given(pair: EncodedPair) -> GivenPrompt:
    return GivenPrompt(
        token_ids=pair.token_ids,
        fields={"second_type_start": pair.second_type_start},
        cut=lambda limit: _given(pair.cut(limit)),
    )
