"""vLLM's outputs, made of Hardpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from hardpoint import CompletionOutput as NativeCompletion
from hardpoint import Logprob as Logprob
from hardpoint import PoolingRequestOutput as NativePooling
from hardpoint import RequestOutput as NativeRequest
from hardpoint.errors import HardpointError
from hardpoint.plugins.requests import RequestMetrics as NativeMetrics

from .params import LoRARequest

if TYPE_CHECKING:
    import torch

__path__: list[str] = []  # so that the error of another name has what there is instead
SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]
T = TypeVar("T")


class RequestMetrics(NativeMetrics, kw_only=True, frozen=True):
    """Times of a request, with the members of both engines and of vLLM V0.

    Times are seconds of `time.time()`; None stands for a stage that it did not reach.

    Attributes:
        arrival_time: when it was added.
    """

    arrival_time: float

    @property
    def first_scheduled_time(self) -> float | None:
        """When its first step began."""
        return self._after(self.queue_seconds)

    @property
    def first_token_time(self) -> float | None:
        """When it had its first token."""
        return self._after(self.time_to_first_token)

    @property
    def last_token_time(self) -> float | None:
        """When it had its last token."""
        return self._after(self.time_to_first_token, self.decode_seconds)

    @property
    def finished_time(self) -> float | None:
        """When it ended."""
        return self._after(self.e2e_seconds)

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival to its first step."""
        return self.queue_seconds

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return self.time_to_first_token

    queued_ts = property(lambda self: self.arrival_time)
    scheduled_ts, first_token_ts = first_scheduled_time, first_token_time
    last_token_ts = last_token_time

    def _after(self, *durations: float | None) -> float | None:
        if None in durations:
            return None
        return self.arrival_time + sum(duration or 0.0 for duration in durations)


class CompletionOutput(NativeCompletion, kw_only=True, gc=False):
    """One completion of a prompt, with the members of both engines."""

    lora_request: Any = None

    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.finish_reason is not None


class RequestOutput(NativeRequest, kw_only=True, gc=False):
    """The completions of a prompt, with the members of both engines."""

    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    multi_modal_placeholders: dict[str, Any] = {}

    @classmethod
    def of(cls, output: NativeRequest, arrival_time: float) -> RequestOutput:
        """Return an output of Hardpoint as one of vLLM.

        Args:
            output: output of Hardpoint.
            arrival_time: when the request was added, in seconds of `time.time()`.
        """
        lora = output.lora_request and LoRARequest.of(output.lora_request)
        completions: list[NativeCompletion] = [
            CompletionOutput(**_values(completion), lora_request=lora)
            for completion in output.outputs
        ]
        for completion in completions:
            if (metrics := completion.metrics) is not None:
                timed = RequestMetrics(**_values(metrics), arrival_time=arrival_time)
                completion.metrics = timed
        values = _values(output)
        values.update(outputs=completions, lora_request=lora)
        return cls(**values)


def _values(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


class PoolingOutput:
    """The tensor that a pooler returned."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.data})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]


class EmbeddingOutput:
    """A vector."""

    def __init__(self, embedding: list[float]) -> None:
        self.embedding = embedding

    @property
    def hidden_size(self) -> int:
        """Its size."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


class ClassificationOutput:
    """The probabilities of classes."""

    def __init__(self, probs: list[float]) -> None:
        self.probs = probs

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


class ScoringOutput:
    """How well two texts match."""

    def __init__(self, score: float) -> None:
        self.score = score

    def __repr__(self) -> str:
        return f"ScoringOutput(score={self.score})"


class PoolingRequestOutput(Generic[T]):
    """The result of a pooling request.

    Attributes:
        request_id: id of the request.
        outputs: its result.
        prompt_token_ids: the prompt.
        num_cached_tokens: 0: prompts of pooling requests are computed.
        finished: True.
    """

    def __init__(self, request_id: str, outputs: T, prompt_token_ids: list[int]) -> None:
        self.request_id, self.outputs = request_id, outputs
        self.prompt_token_ids, self.num_cached_tokens, self.finished = prompt_token_ids, 0, True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r})"


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A vector of a prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair of texts."""


def pooled(output: NativePooling, task: str) -> PoolingRequestOutput[Any]:
    """Return a result of Hardpoint as one of vLLM.

    Args:
        task: "embed", "classify", "score", or any other for a tensor.

    Raises:
        HardpointError: the request failed.
    """
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    if output.error is not None:
        raise HardpointError(output.error)
    data, common = output.outputs, (output.request_id, output.prompt_token_ids)
    if task == "embed":
        vector = EmbeddingOutput(np.asarray(data).tolist())
        return EmbeddingRequestOutput(common[0], vector, common[1])
    if task == "classify":
        classes = ClassificationOutput(np.atleast_1d(np.asarray(data)).tolist())
        return ClassificationRequestOutput(common[0], classes, common[1])
    if task == "score":
        score = ScoringOutput(float(np.asarray(data).reshape(-1)[0]))
        return ScoringRequestOutput(common[0], score, common[1])
    tensor = PoolingOutput(torch.as_tensor(np.array(data)))
    return PoolingRequestOutput(common[0], tensor, common[1])
