"""A step part that leaves out named layers of the requests that name them."""

from __future__ import annotations

import msgspec
import torch

from hardpoint import plugins
from hardpoint.plugins import StepPart
from hardpoint.plugins.step_part import (
    AdmissionGate,
    BlockKey,
    PlanData,
    RequestLifecycle,
    ResidualStream,
    WorkerStep,
)


class Skipping(StepPart):
    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        layers: list[int]

    def engine_half(self, context):
        return _Engine(f"step_parts/{self.name}")

    def worker_half(self, context):
        return _Worker()


class _Engine(AdmissionGate, BlockKey, PlanData, RequestLifecycle):
    def __init__(self, key):
        self._key, self._layers = key, {}

    def gate(self, request):
        arguments = request.source.plugin_args[self._key]
        self._layers[request.request_id] = arguments["layers"]

    def block_key(self, request, span):
        arguments = request.plugin_args.get(self._key)
        return msgspec.msgpack.encode(arguments) if arguments and not span.start else None

    def begin(self, plan):
        users = self._layers.keys() & plan.num_scheduled_tokens.keys()
        layers = {name: self._layers[name] for name in users}
        return msgspec.msgpack.encode(layers) if layers else None

    def ended(self, request_id):
        self._layers.pop(request_id, None)


class _Worker(WorkerStep, ResidualStream):
    def begin(self, plan, data):
        self._layers_of = msgspec.msgpack.decode(data)

    def skips(self, layer, rows):
        skipped = torch.zeros(rows.starts[-1], dtype=torch.bool)
        for name, start, end in zip(rows.request_ids, rows.starts, rows.starts[1:], strict=False):
            skipped[start:end] = layer in self._layers_of[name]
        return skipped
