"""Media in a worker: they are encoded before the model runs, and embedded in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hardpoint.plugins import SchedulerOutput
from hardpoint.plugins.requests import MediaFormat
from hardpoint.plugins.step_part import InputEmbeddings, WorkerMemory, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext

from .messages import EncoderItem, EncoderStep

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.step_part.worker_data import StepRows


class EncoderWorker(WorkerStep, InputEmbeddings, WorkerMemory):
    """Encodes media by the model, and keeps their embeddings until the scheduler frees them."""

    encodes = True
    wants_layers = False

    def __init__(self, context: WorkerHalfContext, media: MediaFormat, budget: int) -> None:
        """Keep nothing yet; `budget` is the most tokens of embeddings."""
        assert context.loaded is not None, "it is a half of a worker"
        self._device, self._model = context.device, context.loaded.model
        self._length, self._size = media.num_tokens, context.hidden_size
        self._budget, self._encode_bytes = budget, media.encode_bytes
        self._embeddings: dict[str, torch.Tensor] = {}
        self._step = EncoderStep()
        self._failed: Exception | None = None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of embeddings, and of what the encoder computes for one image."""
        embeddings = self._budget * self._size * 4
        return {"embeddings of images": embeddings, "the encoder": self._encode_bytes}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Drop what is freed, and encode, a batch of its own, before the model runs."""
        self._step = EncoderStep()
        self.wants_layers = False
        step = msgspec.msgpack.decode(data, type=EncoderStep)
        for identifier in step.freed:
            self._embeddings.pop(identifier, None)
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
        (embeddings,) = self._model.encode_media(item.modality, [numbers])
        if embeddings.shape != (self._length, self._size):
            raise ValueError(
                f"the model's encode_media() gave {list(embeddings.shape)} for one item, expected "
                f"{[self._length, self._size]}"
            )
        return embeddings

    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Return the embedded tokens of a step, those of media replaced."""
        if self._failed is not None:
            raise self._failed
        changed = embedded.clone()
        for request_id, start in zip(rows.request_ids, rows.starts, strict=False):
            for span in self._step.spans.get(request_id, ()):
                found = self._embeddings[span.identifier][span.start : span.start + span.count]
                changed[start + span.first : start + span.first + span.count] = found
        return changed

    def weights_changed(self) -> None:
        """Forget embeddings of earlier weights: the engine's half sends their media again."""
        self._embeddings.clear()

    def close(self) -> None:
        """Forget all embeddings."""
        self._embeddings.clear()
