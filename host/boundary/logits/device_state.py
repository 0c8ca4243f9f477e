"""Per-request state of logits processors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hardpoint.errors import PluginContractError
from hardpoint.plugins import BatchUpdate, LogitsRequest, Move, TensorSpec
from hardpoint.plugins.device import to_device
from hardpoint.plugins.sampling.logits import LogitsPlugin


class DeviceState:
    """The tensors that one processor declares: rows of the batch, then scratch rows for drafts."""

    def __init__(self, processor: LogitsPlugin, rows: int, device: torch.device) -> None:
        self._processor = processor
        self._rows = rows
        self._device = device
        self._specs: Mapping[str, TensorSpec] = processor.device_state()
        self._tensors = {name: self._empty(spec, rows) for name, spec in self._specs.items()}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def move(self, update: BatchUpdate) -> None:
        """Apply the moves of a batch update."""
        for move in update.moved:
            for tensor in self._tensors.values():
                source, destination = tensor[move.source], tensor[move.destination]
                if move.direction is Move.SWAP:
                    saved = destination.clone()
                    destination.copy_(source)
                    source.copy_(saved)
                else:
                    destination.copy_(source)

    def start(self, request: LogitsRequest) -> None:
        """Reset a request's row, and let the processor fill it."""
        rows = {name: tensor[request.row] for name, tensor in self._tensors.items()}
        for name, row in rows.items():
            row.fill_(self._specs[name].fill)
        self._processor.start_row(request, rows)

    def gather(self, name: str, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        """Return a copy of the requests' rows, [requests, *shape]."""
        return self._tensors[name].index_select(0, self._index(requests))

    def advance(
        self,
        requests: Sequence[LogitsRequest],
        call: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        """Pass copies of the requests' rows to `call`, which changes them, and write them back."""
        index = self._index(requests)
        part = {name: tensor.index_select(0, index) for name, tensor in self._tensors.items()}
        call(part)
        for name, tensor in self._tensors.items():
            tensor.index_copy_(0, index, part[name])

    def copy_to_scratch(self, pairs: Sequence[tuple[LogitsRequest, LogitsRequest]]) -> None:
        """Copy each pair's first row to its second, which lies beyond the batch."""
        needed = 1 + max(target.row for _, target in pairs)
        source = self._index([source for source, _ in pairs])
        target = self._index([target for _, target in pairs])
        for name, tensor in self._tensors.items():
            if needed > len(tensor):
                grown = self._empty(self._specs[name], needed)
                grown[: len(tensor)] = tensor
                self._tensors[name] = tensor = grown
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _index(self, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        return to_device([request.row for request in requests], self._device)

    def _empty(self, spec: TensorSpec, rows: int) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise PluginContractError(
                f"logits processor {self._processor.name!r}: its device_state names the dtype "
                f"{spec.dtype!r}, which torch does not have"
            )
        return torch.full((rows, *spec.shape), spec.fill, dtype=dtype, device=self._device)
