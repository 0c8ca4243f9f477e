"""Activation taps as a step part: drives the taps that requests give arguments to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from hardpoint import plugins
from hardpoint.plugins import ConfigError, FrontendHalf, Meta, StepPart
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .requests import KIND, TappedRequests, Taps
from .results import TapResults

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory

    from .layers import TapsInLayers


class ActivationTaps(StepPart):
    """Requests with arguments for activation taps; drives the `activation_taps` kind.

    A fault of a tap ends the requests that use the tap.
    """

    contract = 1
    fault_scope = "request"

    class Options(plugins.Options):
        """Options.

        Attributes:
            max_bytes: maximum size of the values that taps return for a request; beyond it, the
                request ends with an error.
        """

        max_bytes: Annotated[int, Meta(ge=1)] = 64 * 2**20

    options: Options

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf | None:
        """Return the half that completes requests that name taps; None without taps."""
        if not context.components.enabled(KIND):
            return None
        return TappedRequests(self.name, self._taps(context.components))

    def engine_half(self, context: EngineHalfContext) -> TapResults | None:
        """Return the half that gives requests the readings of taps; None without taps.

        Raises:
            ConfigError: the layers of the model are spread over stages.
        """
        if not context.components.enabled(KIND):
            return None
        if (stages := self.context.config.parallel.pipeline) > 1:
            names = ", ".join(context.components.enabled(KIND))
            raise ConfigError(
                f"parallel.pipeline: expected 1 with activation taps ({names}), which get the "
                f"layers of one stage only, got {stages}"
            )
        return TapResults(self.name, self._taps(context.components), self.options.max_bytes)

    def worker_half(self, context: WorkerHalfContext) -> TapsInLayers | None:
        """Return the half that calls taps in the layers; None without taps."""
        if not context.components.enabled(KIND):
            return None
        from .layers import TapsInLayers  # noqa: PLC0415 - it imports torch

        samples = context.rank == self.context.config.parallel.output_rank
        return TapsInLayers(context, self._taps(context.components), samples=samples)

    def _taps(self, components: ComponentFactory) -> Taps:
        return Taps(components, self.context.model_config)
