"""Components with a table in their arguments that has numbers as keys."""

from __future__ import annotations

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import (
    ActivationTap,
    EngineHalf,
    LogitsProcessor,
    Meta,
    Phase,
    StepPart,
    TapSite,
)

TokenId = Annotated[int, Meta(ge=0)]


class Weights(plugins.Arguments):
    """Numbers by token id, or by layer."""

    weights: dict[TokenId, float]


class Forced(LogitsProcessor):
    """Adds a number to the logits of each token."""

    contract = 1
    phase = Phase.BIAS
    Arguments = Weights

    def apply(self, logits, rows):
        for row, arguments in enumerate(rows.arguments()):
            for token, weight in arguments.weights.items():
                logits[row, token] += weight
        return logits


class Shifted(ActivationTap):
    """Adds a number to the hidden states after each layer."""

    contract = 1
    Arguments = Weights

    @classmethod
    def sites(cls, arguments):
        return [TapSite(layer) for layer in sorted(arguments.weights)]

    def read(self, site, values, rows):
        return values[:, 0]

    def change(self, site, values, rows):
        shifted = values.clone()
        for arguments, tokens in rows.spans():
            shifted[tokens.start : tokens.stop] += arguments.weights[site.layer]
        return shifted


class Shown(StepPart):
    """Shows the arguments of a request in its figures."""

    contract = 1
    named_only = True
    Arguments = Weights

    def engine_half(self, context):
        return _Shown(f"step_parts/{self.name}")


class _Shown(EngineHalf):
    def __init__(self, key):
        self.key, self.requests = key, {}

    def uses(self, request):
        return self.key in request.plugin_args

    def gate(self, request):
        self.requests[request.request_id] = request.source.plugin_args[self.key]

    def figures(self, request_id):
        return {"seen": repr(self.requests[request_id])}

    def ended(self, request_id):
        self.requests.pop(request_id, None)


KEYED = {
    "enable": [
        {"use": f"{__name__}:{cls.__name__}", "name": cls.__name__.lower()}
        for cls in (Forced, Shifted, Shown)
    ]
}
"""The section `plugins` of an engine that has them."""
