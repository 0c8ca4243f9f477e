"""Encoders as a step part: media of prompts become embeddings, in a batch of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

from hardpoint import plugins
from hardpoint.errors import ModelError
from hardpoint.plugins import EngineConfig, FrontendHalf, Meta, StepPart
from hardpoint.plugins.requests import MediaFormat
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.toolkit.encoder_cache import encoder_budget

from .engine_half import EncodedRequests
from .placing import MediaPrompts
from .positions import PositionsWorker
from .worker_half import EncoderWorker, encoder_worker

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory

MODELS = "models"


class Encoders(StepPart):
    """Requests with `features`, of models that have a `media_format`.

    A fault ends the requests with media in that step.
    """

    contract = 1
    fault_scope = "request"

    class Options(plugins.Options):
        """Options.

        Attributes:
            budget_tokens: maximum number of image tokens that a step encodes, and that workers
                keep embeddings for; at least one image. None is
                `scheduler.max_num_batched_tokens`.
        """

        budget_tokens: Annotated[int, Meta(ge=1)] | None = None

    options: Options

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:  # noqa: ARG003
        """Return the field of requests with media."""
        return ("features",)

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:
        """Return the half that places media in prompts; of other models, it refuses them."""
        model = self.context.model_config
        name = "this model" if model is None else model.architecture
        limits = self.context.config.images
        return MediaPrompts(self._format(context.components), name, limits, context.encode)

    def engine_half(self, context: EngineHalfContext) -> EncodedRequests:
        """Return the half that knows which media are in the workers; of others, it refuses."""
        media = self._format(context.components)
        return EncodedRequests(self.name, media, self._budget(media))

    def worker_half(self, context: WorkerHalfContext) -> EncoderWorker | PositionsWorker | None:
        """Return the half that encodes, in the ranks that embed tokens."""
        media = self._format(context.components)
        if media is None:
            return None
        parallel = self.context.config.parallel
        if context.rank < parallel.world_size // parallel.pipeline:
            return encoder_worker(context, media, self._budget(media), self._longest(media))
        return PositionsWorker(media.position_axes) if media.position_axes > 1 else None

    def _format(self, components: ComponentFactory) -> MediaFormat | None:
        """Return how the model's prompts have media; None if it takes none.

        Raises:
            ModelError: its files have unsupported settings.
        """
        config = self.context.model_config
        cls = None if config is None else components.find(MODELS, config.model_plugin)
        if cls is None or config is None:
            return None
        assert issubclass(cls, plugins.Model), "the registry has checked it"
        media = cls.media_format(config, self.context.files)
        if media is not None and not isinstance(media, MediaFormat):
            raise ModelError(
                f"{components.source(MODELS, config.model_plugin)}: its media_format() gave "
                f"{type(media).__name__}, expected a MediaFormat or None"
            )
        return media

    def _budget(self, media: MediaFormat | None) -> int:
        """Return the tokens that a step may encode, also the size of the embedding cache."""
        longest = 0 if media is None else self._longest(media)
        tokens = self.options.budget_tokens
        step = self.context.config.scheduler.max_num_batched_tokens
        return encoder_budget(step if tokens is None else tokens, longest)

    def _longest(self, media: MediaFormat) -> int:
        """Return the tokens of an image, at most; a prompt has no longer one than a sequence."""
        limit = self.context.config.max_model_len
        return min(media.num_tokens, limit) if isinstance(limit, int) else media.num_tokens
