"""Media in a worker: they are encoded before the model runs, and embedded in place of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hardpoint.plugins import SchedulerOutput
from hardpoint.plugins.requests import MediaFormat
from hardpoint.plugins.step_part import (
    ForwardWrapper,
    InputEmbeddings,
    ResidualStream,
    WorkerMemory,
    WorkerStep,
)
from hardpoint.plugins.worker_half import WorkerHalfContext

from .messages import EncoderItem, EncoderStep, Span
from .positions import RequestPositions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hardpoint.plugins.model.forward import Branch, Forward
    from hardpoint.plugins.step_part.worker_data import StepRows


class EncoderWorker(WorkerStep, InputEmbeddings, WorkerMemory):
    """Encodes media by the model, and keeps their embeddings until the scheduler frees them."""

    encodes = True
    wants_layers = False

    def __init__(
        self, context: WorkerHalfContext, media: MediaFormat, budget: int, longest: int
    ) -> None:
        """Keep nothing yet.

        Args:
            context: context of the half.
            media: format of the model.
            budget: tokens of embeddings, at most.
            longest: tokens of an image, at most.
        """
        assert context.loaded is not None, "it is a half of a worker"
        self._device, self._model = context.device, context.loaded.model
        self._media, self._size = media, context.hidden_size
        self._width = context.hidden_size * (1 + media.extra_layers)
        self._budget = budget
        self._encode_bytes = media.encode_bytes * longest // media.num_tokens
        self._embeddings: dict[str, torch.Tensor] = {}
        self._step = EncoderStep()
        self._failed: Exception | None = None
        self._positions = RequestPositions(media.position_axes)

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of embeddings, and of the encoder's work for one image."""
        embeddings = self._budget * self._width * 4
        return {"embeddings of images": embeddings, "the encoder": self._encode_bytes}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Drop freed media, and encode, in a separate batch, before the model runs."""
        self._step = EncoderStep()
        self.wants_layers = False
        step = msgspec.msgpack.decode(data, type=EncoderStep)
        for identifier in step.freed:
            self._embeddings.pop(identifier, None)
        self._positions.add(step.placed)
        self._step, self.wants_layers, self._failed = step, bool(step.spans), None
        try:
            for item in step.items:
                self._embeddings[item.identifier] = self._encoded(item)
        except Exception as cause:
            if not step.spans:
                raise
            # In the layers: keys and values without the embeddings are not to be found later.
            self._failed = cause

    def _encoded(self, item: EncoderItem) -> torch.Tensor:
        """Return the embeddings of one image: encoded alone, they are the same in any step."""
        import torch  # noqa: PLC0415 - parts are imported without it

        array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(item.data, np.uint8)
        numbers = torch.from_numpy(array.reshape(item.shape).copy()).to(self._device)
        (embeddings,) = self._model.encode_media(
            item.modality, [self._media.encoder_input(numbers)]
        )
        count = len(self._media.token_ids(array.reshape(item.shape)))
        if embeddings.shape != (count, self._width):
            raise ValueError(
                f"the model's encode_media() gave {list(embeddings.shape)} for one item, expected "
                f"{[count, self._width]}"
            )
        return embeddings

    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Return the embedded tokens of a step, with media replaced."""
        if self._failed is not None:
            raise self._failed
        changed = embedded.clone()
        for tokens, embeddings in self._spans(rows):
            changed[tokens] = embeddings[:, : self._size]
        return changed

    def _spans(self, rows: StepRows) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the tokens of the step that get embeddings, with all embeddings of each."""
        for request_id, start in zip(rows.request_ids, rows.starts, strict=False):
            for span in self._step.spans.get(request_id, ()):
                first = start + span.first
                yield slice(first, first + span.count), self._embeddings_of(span)

    def _embeddings_of(self, span: Span) -> torch.Tensor:
        return self._embeddings[span.identifier][span.start : span.start + span.count]

    def weights_changed(self) -> None:
        """Forget embeddings of earlier weights: the engine's half sends their media again."""
        self._embeddings.clear()

    def close(self) -> None:
        """Forget all embeddings."""
        self._embeddings.clear()


class PlacedEncoderWorker(EncoderWorker, ForwardWrapper):
    """Encodes media of a model with positions of several axes."""

    changes_inputs = True

    def around_model(self, forward: Forward) -> Forward:
        """Return `forward` with the positions replaced before it."""
        return self._positions.around(forward)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget the positions of requests that have ended."""
        self._positions.remove(request_ids)


class DeepEncoderWorker(PlacedEncoderWorker, ResidualStream):
    """Encodes media of a model that adds embeddings after its first decoder layers, too."""

    def __init__(
        self, context: WorkerHalfContext, media: MediaFormat, budget: int, longest: int
    ) -> None:
        """Keep nothing yet."""
        super().__init__(context, media, budget, longest)
        self._extra = self.layers = range(media.extra_layers)

    def added(
        self,
        layer: int,
        branch: Branch,
        residual: torch.Tensor,
        delta: torch.Tensor,
        rows: StepRows,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the output of a layer with the embeddings of media added to it."""
        if branch != "mlp" or layer not in self._extra:
            return None
        columns = slice((1 + layer) * self._size, (2 + layer) * self._size)
        changed = delta.clone()
        for tokens, embeddings in self._spans(rows):
            changed[tokens] += embeddings[:, columns]
        return residual, changed


def encoder_worker(
    context: WorkerHalfContext, media: MediaFormat, budget: int, longest: int
) -> EncoderWorker:
    """Return the worker half for a model's media."""
    cls = EncoderWorker
    if media.extra_layers:
        cls = DeepEncoderWorker
    elif media.position_axes > 1:
        cls = PlacedEncoderWorker
    return cls(context, media, budget, longest)
