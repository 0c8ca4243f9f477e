"""The worker's side of a connector of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorWorker,
    KVWorkerContext,
)
from hardpoint_vllm.objects import NamedFields
from hardpoint_vllm.origin import is_overridden

from .bases import ForwardContext
from .encoding import Encoding

if TYPE_CHECKING:
    import torch

_CANCEL_SECONDS = 30.0
_POLL_SECONDS = 0.001


class WorkerSide(KVConnectorWorker):
    """Runs the worker's side of a connector.

    A layer is a tensor [blocks, 1, block_size, bytes], uint8: the bytes of a block in the layout of
    the attention backend, divided evenly among its slots.
    """

    def __init__(self, target: Any, encoding: Encoding, context: KVWorkerContext) -> None:
        self._target, self._encoding, self._context = target, encoding, context
        self._layers: list[dict[str, torch.Tensor]] = []
        self._is_bound = self._saves = False
        self._attention: Any = None
        self._early: tuple[set[str], set[str]] = set(), set()  # ended in a cancellation
        self._errors: set[int] = set()
        self._message: Any = None

    @property
    def wants_layers(self) -> bool:  # type: ignore[override]
        """Whether the step has metadata."""
        return self._is_bound

    def handshake(self) -> Any:
        """Return the connector's metadata for the scheduler's side as plain data."""
        return self._encoding.encode(self._target.get_handshake_metadata(), "handshake metadata")

    def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Pass the layers by name.

        A layer with several parts, such as keys and values, is a layer for each.

        Raises:
            ValueError: the bytes of a block are not divisible by its slots.
        """
        size, identity = self._context.identity.block_size, self._context.identity
        stage = f"stages.{identity.stage}." if identity.num_stages > 1 else ""
        self._layers = []
        for index, views in enumerate(caches):
            name = f"model.{stage}layers.{index}.self_attn.attn"
            names = [name] if len(views) == 1 else [f"{name}.{i}" for i in range(len(views))]
            for view in views:
                if view.shape[1] % size:
                    raise ValueError(
                        f"kv_cache.block_size: expected a divisor of {view.shape[1]} bytes, got "
                        f"{size}"
                    )
            tensors = [view.view(len(view), 1, size, -1) for view in views]
            self._layers.append(dict(zip(names, tensors, strict=True)))
        self._target.register_kv_caches(self._by_name())

    def release_kv_caches(self) -> None:
        """Replace the layers by none."""
        self._layers = []
        self._target.register_kv_caches({})

    def start_load_kv(self, metadata: Any) -> None:
        """Bind the metadata of a step, and start its loads."""
        self._unbind()
        if metadata is None:
            return
        bound = self._encoding.decode(metadata["metadata"])
        if metadata["has_preemptions"]:
            self._target.handle_preemptions(bound)
        self._target.bind_connector_metadata(bound)
        self._is_bound, self._saves = True, metadata["saves"]
        layers = self._by_name()
        attention = NamedFields("AttentionMetadata") if metadata["has_tokens"] else None
        self._attention = attention
        self._target.start_load_kv(
            ForwardContext(
                "ForwardContext",
                no_compile_layers={
                    name: NamedFields("Attention", kv_cache=layer, layer_name=name)
                    for name, layer in layers.items()
                },
                attn_metadata=None if attention is None else dict.fromkeys(layers, attention),
            )
        )

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait for a layer."""
        if self._is_bound:
            for name in self._layers[layer]:
                self._target.wait_for_layer_load(name)

    def save_kv_layer(self, layer: int) -> None:
        """Save a layer, except after a load with an unknown result."""
        if self._is_bound and self._saves:
            for name, tensor in self._layers[layer].items():
                self._target.save_kv_layer(name, tensor, self._attention)

    def wait_for_save(self) -> None:
        """Wait for the saves of the step."""
        if self._is_bound and self._saves:
            self._target.wait_for_save()

    def get_finished(self, ended: frozenset[str]) -> FinishedTransfers:
        """Return the transfers that have ended, and end the step."""
        sending, recving = self._finished(set(ended))
        early, self._early = self._early, (set(), set())
        sending, recving = sending | early[0], recving | early[1]
        errors = set(self._target.get_block_ids_with_load_errors())
        self._errors |= errors
        metadata = None
        if is_overridden(type(self._target), "build_connector_worker_meta"):
            metadata = self._target.build_connector_worker_meta()
        self._unbind()
        if is_overridden(type(self._target), "update_connector_output") and (
            sending or recving or errors or metadata is not None
        ):
            self._message = {
                "sending": sorted(sending),
                "recving": sorted(recving),
                "invalid": sorted(errors),
                "metadata": self._encoding.encode(metadata, "worker metadata"),
            }
        return FinishedTransfers(recving, sending)

    def load_errors(self) -> Iterable[int]:
        """Return the blocks that were not loaded."""
        errors, self._errors = self._errors, set()
        return errors

    def cancel_loads(self, request_ids: Sequence[str]) -> None:
        """Wait until the loads have ended, because connectors of vLLM cancel none.

        Raises:
            TimeoutError: they have not; the connector is left out then.
        """
        waiting = set(request_ids)
        until = time.monotonic() + _CANCEL_SECONDS
        while waiting := waiting - self._early[1]:
            sending, recving = self._finished(set())
            self._early = self._early[0] | sending, self._early[1] | recving
            if not waiting - recving:
                return
            if time.monotonic() > until:
                raise TimeoutError(
                    f"get_finished: expected {', '.join(sorted(waiting))} within "
                    f"{_CANCEL_SECONDS:g} s, because their loads are given up"
                )
            time.sleep(_POLL_SECONDS)

    def take_message(self) -> Any:
        """Return the result of a step for the scheduler's side."""
        message, self._message = self._message, None
        return message

    def close(self) -> None:
        """Shut the connector down."""
        self._target.shutdown()

    def _unbind(self) -> None:
        if self._is_bound:
            self._target.clear_connector_metadata()
        self._is_bound = self._saves = False

    def _finished(self, ended: set[str]) -> tuple[set[str], set[str]]:
        sending, recving = self._target.get_finished(ended)
        return set(sending or ()), set(recving or ())

    def _by_name(self) -> dict[str, torch.Tensor]:
        return {name: tensor for layer in self._layers for name, tensor in layer.items()}
