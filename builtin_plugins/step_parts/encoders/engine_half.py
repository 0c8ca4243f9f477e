"""Media in the engine: requests keep encoder inputs until workers are to encode them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from hardpoint.errors import RequestError
from hardpoint.plugins import EngineCoreRequest, ModelRunnerOutput, RequestFault, SchedulerOutput
from hardpoint.plugins.requests import MediaFormat, MultiModalFeature
from hardpoint.plugins.step_part import (
    EncoderBudget,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
)
from hardpoint.toolkit.encoder_cache import EncoderCacheManager

from .messages import EncoderItem, EncoderStep, PlacedItem, Span


class EncodedRequests(RequestFilter, RequestLifecycle, PlanData, StepObserver, EncoderBudget):
    """Sends workers the inputs of a plan to encode, and the places of their embeddings.

    It knows which embeddings workers have, so that embeddings of a lost plan, or of earlier
    weights, are encoded again when they are needed.
    """

    for_fields = ("features",)

    def __init__(self, name: str, media: MediaFormat | None, budget: int) -> None:
        """Keep nothing yet.

        Args:
            media: format of the model; None refuses all media.
            budget: tokens that a step may encode, and that workers keep embeddings for.
        """
        self._name, self._media = name, media
        self.every_plan = media is not None  # plans without media free embeddings, too
        self.encoder_cache = None if media is None else EncoderCacheManager(budget)
        self.max_encoder_tokens = 0 if media is None else budget
        self._kept: dict[str, Sequence[MultiModalFeature]] = {}
        self._in_workers: set[str] = set()
        self._encoding: dict[int, Collection[str]] = {}  # by the step of plans under way

    def check(self, request: EngineCoreRequest) -> None:
        """Keep the media of a request; workers get them with a plan.

        Raises:
            RequestError: they do not fit the model.
        """
        if self._media is None:
            raise RequestError("features: expected none, the model takes text alone")
        end = 0
        for index, feature in enumerate(request.features):
            flaw = self._flaw(feature, request.prompt_token_ids, end)
            if flaw is not None:
                raise RequestError(f"features[{index}]: {flaw}")
            end = feature.end
        self._kept[request.request_id] = request.features  # with their data, which others lack

    def _flaw(
        self, feature: MultiModalFeature, token_ids: Sequence[int], earliest: int
    ) -> str | None:
        media, data = self._media, feature.data
        assert media is not None
        if feature.modality not in media.modalities:
            return f"modality: expected {', '.join(media.modalities)}, got {feature.modality!r}"
        if feature.sees_itself != media.sees_itself:
            return f"sees_itself: expected {media.sees_itself}, got {feature.sees_itself}"
        is_array = isinstance(data, np.ndarray) and data.dtype == np.uint8
        if not is_array or not media.accepts(data.shape, data.size):
            return f"data: expected a uint8 array {list(media.item_shape)}"
        tokens = list(media.token_ids(data))
        if feature.offset < earliest or feature.length != len(tokens):
            return (
                f"expected {len(tokens)} tokens from position {earliest} on, got "
                f"{feature.length} from {feature.offset} on"
            )
        if list(token_ids[feature.offset : feature.end]) != tokens:
            distinct = dict.fromkeys(tokens)
            label = "the token" if len(distinct) == 1 else "the tokens"
            return f"expected {label} {', '.join(map(str, distinct))} at all of its positions"
        return None

    def refused(self, request_id: str) -> None:
        """Forget the media of a request."""
        self._kept.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Forget the media of a request."""
        self._kept.pop(request_id, None)

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the data of a step for workers; None if it has no media."""
        self._in_workers.difference_update(plan.freed_encoder_inputs)
        spans, placed = self._spans(plan), self._placed(plan)
        wanted: dict[str, MultiModalFeature] = {}
        for request_id, indices in plan.encoder_inputs.items():
            for index in indices:
                feature = self._kept[request_id][index]
                wanted[feature.identifier] = feature
        for request_id, request_spans in spans.items():
            missing = {span.identifier for span in request_spans} - self._in_workers - wanted.keys()
            if missing:
                by_identifier = {f.identifier: f for f in self._kept[request_id]}
                wanted |= {identifier: by_identifier[identifier] for identifier in sorted(missing)}
        if not (spans or wanted or plan.freed_encoder_inputs or placed):
            return None
        self._in_workers |= wanted.keys()
        if wanted:
            self._encoding[plan.step] = wanted.keys()
        freed = list(plan.freed_encoder_inputs)
        items = list(_items(wanted.values()))
        return msgspec.msgpack.encode(EncoderStep(freed, items, spans, placed))

    def _placed(self, plan: SchedulerOutput) -> dict[str, list[PlacedItem]]:
        """Return the positions of media of requests that workers do not have."""
        if self._media is None or self._media.position_axes == 1:
            return {}
        names = [new.source.request_id for new in plan.new_requests]
        return {
            name: [
                PlacedItem(feature.offset, self._media.positions(feature.data).tolist())
                for feature in self._kept[name]
            ]
            for name in names
            if name in self._kept
        }

    def _spans(self, plan: SchedulerOutput) -> dict[str, list[Span]]:
        users = [name for name in plan.num_scheduled_tokens if name in self._kept]
        if not users:
            return {}
        computed, spans = plan.num_computed_tokens(), {}
        for name in users:
            first = computed[name]
            end = first + plan.num_scheduled_tokens[name]
            request_spans = []
            for feature in self._kept[name]:
                seen = range(max(feature.offset, first), min(feature.end, end))
                if seen:
                    start = seen.start - feature.offset
                    request_spans.append(
                        Span(feature.identifier, seen.start - first, start, len(seen))
                    )
            if request_spans:
                spans[name] = request_spans
        return spans

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Forget media that workers could not encode."""
        encoded = self._encoding.pop(plan.step, ())
        if self._name in result.part_faults:
            self._in_workers.difference_update(encoded)
        return {}

    def lost(self, plan: SchedulerOutput) -> None:
        """Forget media that a lost plan was to encode."""
        self._in_workers.difference_update(self._encoding.pop(plan.step, ()))

    def weights_changed(self) -> None:
        """Expect no embeddings in the workers."""
        self._in_workers.clear()


def _items(features: Iterable[MultiModalFeature]) -> Iterable[EncoderItem]:
    for feature in features:
        data = feature.data
        yield EncoderItem(feature.identifier, feature.modality, data.shape, data.tobytes())
