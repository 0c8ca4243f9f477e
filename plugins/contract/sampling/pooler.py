"""Poolers: make one vector of the hidden states of a prompt, or one for each of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import instance, returns
from hardpoint.plugins.text.arguments import ComponentWithArguments

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.ops import Ops

__all__ = ["Pooler", "PoolerContext", "PromptPooler"]


@dataclass(frozen=True, kw_only=True)
class PoolerContext(Context["Pooler"]):
    """Context of a pooler, in the worker that has the last hidden states.

    Attributes:
        device: device of the model, a `torch.device`.
        hidden_size: hidden size of the model.
        ops: operations of its layers; `linear` gives a row the same product alone and in
            any batch; None if the context was made by hand.
        unembed: returns the logits [tokens, vocab] of hidden states that the pooler gets; None if
            the model is divided among ranks, or the context was made by hand.
    """

    device: Any
    hidden_size: int
    ops: Ops | None = None
    unembed: Callable[[torch.Tensor], torch.Tensor] | None = None


class PromptPooler(ABC):
    """The pooling of one prompt; its hidden states come in one chunk or in several.

    The result depends on the hidden states alone: not on their division into chunks, nor on
    other prompts.
    """

    @abstractmethod
    def update(self, hidden: torch.Tensor) -> None:
        """Take the hidden states of the next tokens.

        Args:
            hidden: [tokens, hidden_size], in the dtype of the model; at least one token. The
                memory is used again by the next step: keep a copy, or a result computed from it.
        """

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Return the result, after the last token of the prompt; called once.

        Returns:
            [hidden_size]; or, of a pooler with `per_token`, [vectors, hidden_size], of any number.
        """


class Pooler(ComponentWithArguments):
    """Makes one vector of the hidden states of a prompt, or one for each of its tokens.

    A request chooses one by `PoolingParams.pooler`, and gives it arguments under
    `plugin_args[name]`. Truncation, normalization and classification of the result follow.

    Attributes:
        per_token: whether the result has several vectors.
        needs_all: whether it needs the hidden states of all tokens. If not, tokens with cached
            keys and values may be left out: the last token's always come.
    """

    per_token: ClassVar[bool] = False
    needs_all: ClassVar[bool] = True

    context: PoolerContext

    @returns(instance(PromptPooler))
    @abstractmethod
    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:
        """Return the pooling of a prompt.

        Called again for the prompt of a preempted request: all its tokens are computed again.

        Args:
            prompt_token_ids: read-only; None in place of an id where there is an embedding.
            arguments: an instance of `Arguments`, or of `Prepared`.
        """
