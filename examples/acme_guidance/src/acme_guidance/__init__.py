"""Classifier-free guidance and contrastive decoding, with hidden members of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint import plugins
from hardpoint.plugins import Annotated, EngineCoreRequest, FrontendHalf, Meta, StepPart
from hardpoint.plugins.step_part import GivenPrompt, ModelLogits

__all__ = ["Contrast", "Guidance"]


class Guidance(StepPart):
    """Classifier-free guidance with a negative prompt (Sanchez et al., 2023)."""

    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            negative_prompt: text or token ids; its continuation is made less likely.
            scale: 1 gives the model's own logits, 0 those of the negative prompt.
        """

        negative_prompt: str | list[int]
        scale: Annotated[float, Meta(ge=0, le=100)] = 1.5

    def frontend_half(self, context: Any) -> FrontendHalf:  # noqa: ARG002
        """Return the half that opens the request of the negative prompt."""
        return NegativePrompt()

    def worker_half(self, context: Any) -> ModelLogits:  # noqa: ARG002
        """Return the half that combines the logits."""
        return GuidedLogits()


class NegativePrompt(FrontendHalf):
    """Opens the request of the negative prompt."""

    def members(
        self,
        request: EngineCoreRequest,  # noqa: ARG002
        arguments: Mapping[str, Any],
    ) -> Sequence[GivenPrompt]:
        """Return the negative prompt."""
        prompt = arguments["negative_prompt"]
        is_text = isinstance(prompt, str)
        return [GivenPrompt(text=prompt) if is_text else GivenPrompt(token_ids=prompt)]


class GuidedLogits(ModelLogits):
    """Moves the logits away from the logits of the negative prompt."""

    def combine(self, logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the guided log-probabilities."""
        positive, negative = logits.log_softmax(-1).unbind()
        scale: float = arguments["scale"]
        return negative + scale * (positive - negative)


class Contrast(StepPart):
    """Contrastive decoding (Li et al., 2022): an adapter against the model itself."""

    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            alpha: tokens less likely than this share of the likeliest one are excluded.
            beta: weight of the model without the adapter.
        """

        alpha: Annotated[float, Meta(gt=0, le=1)] = 0.1
        beta: Annotated[float, Meta(ge=0, le=10)] = 0.5

    def frontend_half(self, context: Any) -> FrontendHalf:  # noqa: ARG002
        """Return the half that opens the request without the adapter."""
        return Amateur()

    def worker_half(self, context: Any) -> ModelLogits:  # noqa: ARG002
        """Return the half that combines the logits."""
        return ContrastedLogits()


class Amateur(FrontendHalf):
    """Opens a request with the same prompt, and without the adapter."""

    def members(
        self,
        request: EngineCoreRequest,
        arguments: Mapping[str, Any],  # noqa: ARG002
    ) -> Sequence[GivenPrompt]:
        """Return the prompt of the request."""
        return [GivenPrompt(token_ids=request.prompt_token_ids)]


class ContrastedLogits(ModelLogits):
    """Subtracts the log-probabilities of the amateur among the expert's plausible tokens."""

    def combine(self, logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the contrasted log-probabilities."""
        expert, amateur = logits.log_softmax(-1).unbind()
        limit = expert.max() + math.log(arguments["alpha"])
        beta: float = arguments["beta"]
        combined = (1 + beta) * expert - beta * amateur
        return combined.masked_fill(expert < limit, float("-inf"))
