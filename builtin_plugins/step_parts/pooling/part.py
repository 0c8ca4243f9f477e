"""Pooling as a step part: drives the poolers that requests name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import EngineConfig, FrontendHalf, Meta, StepPart
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .folder import ModelPooling, read_classifier, read_pooling
from .requests import KIND, PooledRequests, PooledResults
from .worker import PoolingWorker

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory


class Pooling(StepPart):
    """Requests with `pooling_params`, which return vectors; drives the `poolers` kind.

    A fault of a pooler ends the request.
    """

    contract = 1
    fault_scope = "request"

    class Options(plugins.Options):
        """Options.

        Attributes:
            pooler: default pooler of requests; None is the pooler that the model's directory names,
                otherwise "last".
            matryoshka_dimensions: allowed `dimensions` of a Matryoshka model; None takes them from
                config.json.
        """

        pooler: Annotated[str, Meta(min_length=1)] | None = None
        matryoshka_dimensions: list[Annotated[int, Meta(ge=1)]] | None = None

    options: Options

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:  # noqa: ARG003
        """Return the fields of requests that pool."""
        return ("pooling_params", "second_type_start")

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:
        """Return the half that checks which pooler a request names."""
        return PooledRequests(context.components, self._model(context.components))

    def engine_half(self, context: EngineHalfContext) -> PooledResults:
        """Return the half that reads results."""
        components = context.components
        return PooledResults(self.name, components.enabled(KIND), self._model(components))

    def worker_half(self, context: WorkerHalfContext) -> PoolingWorker | None:
        """Return the half that pools, in the rank that has the last hidden states."""
        if context.rank != self.context.config.parallel.output_rank:
            return None
        return PoolingWorker(context, self._model(context.components))

    def _model(self, components: ComponentFactory) -> ModelPooling:
        """Return how the model pools, as its folder, its class and the options state it.

        Raises:
            ModelError: the folder has unsupported settings.
        """
        options = self.options
        changed: dict[str, Any] = {}
        config, files = self.context.model_config, self.context.files
        cls = None if config is None else components.find("models", config.model_plugin)
        if config is not None and getattr(cls, "classifies", False):
            model = read_classifier(config, files)
            changed["pooler"] = config.hf.get("classifier_pooling", getattr(cls, "pooler", None))
            has_several = config.hf.get("type_vocab_size", 2) != 1
            changed["token_types"] = getattr(cls, "token_types", False) and has_several
        else:
            model = read_pooling(config, files)
            changed["pooler"] = model.pooler or getattr(cls, "pooler", None)
        if options.pooler is not None:
            changed["pooler"] = options.pooler
        if options.matryoshka_dimensions is not None:
            changed["cuts"] = options.matryoshka_dimensions
        return dataclasses.replace(model, **changed)
