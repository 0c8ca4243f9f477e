"""Prompt embeddings as a step part: rows of numbers in place of token ids of a prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

from hardpoint import plugins
from hardpoint.plugins import EngineConfig, FrontendHalf, Meta, StepPart
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .requests import FIELDS, NAME, EmbeddedRequests, RefusedEmbeddings

if TYPE_CHECKING:
    from .engine_half import EmbeddedPrompts
    from .worker_half import EmbeddedRows


_WIDTHS = ("hidden_size", "n_embd", "d_model")


class PromptEmbeddings(StepPart):
    """Prompts with embeddings instead of token ids at some or all positions.

    A fault ends the requests with prompt embeddings.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            enabled: allow prompt embeddings. Over HTTP, set `server.prompt_embeds` too.
            max_bytes: maximum size of the embeddings of a prompt, as float32.
        """

        enabled: bool = False
        max_bytes: Annotated[int, Meta(ge=1)] = 256 << 20

    options: Options

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:
        """Return the fields of prompts with embeddings, where requests may have some."""
        return FIELDS if config.plugin.get(NAME, {}).get("enabled") is True else ()

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:  # noqa: ARG002
        """Return the half that reads prompts, or refuses them if embeddings are off."""
        if not self.options.enabled:
            return RefusedEmbeddings()
        return EmbeddedRequests(self._width(), self.options.max_bytes)

    def engine_half(self, context: EngineHalfContext) -> EmbeddedPrompts | None:
        """Return the half that keys blocks; None if embeddings are off."""
        if not self.options.enabled:
            return None
        from .engine_half import EmbeddedPrompts  # noqa: PLC0415 - disabled features cost nothing

        return EmbeddedPrompts(self._width(), self.options.max_bytes, context.call_workers)

    def worker_half(self, context: WorkerHalfContext) -> EmbeddedRows | None:
        """Return the half that puts rows in their places; None if embeddings are off."""
        if not self.options.enabled:
            return None
        from .worker_half import EmbeddedRows  # noqa: PLC0415 - it imports torch

        embeds = context.rank < self.context.config.parallel.tensor
        return EmbeddedRows(context, embeds=embeds)

    def _width(self) -> int | None:
        config = self.context.model_config
        widths = [] if config is None else [config.hf.get(name) for name in _WIDTHS]
        return next((size for size in widths if type(size) is int), None)
