"""What a scheduler may ask beside the KV cache: connector, encoder cache, grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .executor import GrammarBitmask
from .kv_cache import BlockIds
from .request import Request

if TYPE_CHECKING:
    from .scheduler import SchedulerOutput

__all__ = ["EncoderCache", "Grammars", "KVConnectorScheduler"]


class KVConnectorScheduler(Protocol):
    """The half of a KV connector that lives beside the scheduler."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say what can be loaded beyond what is computed.

        Args:
            request: about to be admitted.
            num_computed_tokens: leading tokens that the local cache has.

        Returns:
            How many tokens after those can be loaded (None: not known yet, ask again), and
            whether loading goes on beside the steps. Then the request waits until
            `ModelRunnerOutput.kv_loaded` names it.
        """

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Note that a request has its blocks, also where nothing is to be loaded."""

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """Return what the workers' half has to do in this step; forget what was said."""

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Note that a request ended.

        Returns:
            Whether its blocks must be kept until `ModelRunnerOutput.kv_saved` names it, and what
            its last output shall carry as `kv_transfer_params`.
        """


class EncoderCache(Protocol):
    """Embeddings of images and the like, by identifier; each is encoded once while it is held."""

    def holds(self, request: Request, index: int) -> bool:
        """Whether a feature is there; if so, the request holds it from now on."""

    def can_allocate(self, request: Request, index: int, reserved: int) -> bool:
        """Whether a feature finds room beside `reserved` tokens that are promised already."""

    def allocate(self, request: Request, index: int) -> None:
        """Reserve room for a feature; the request holds it."""

    def cancel(self, request: Request, index: int) -> None:
        """Undo `allocate`: nobody will encode it in this step. Whoever held it holds it no more."""

    def free_input(self, request: Request, index: int) -> None:
        """Note that a request needs a feature no more."""

    def free(self, request: Request) -> None:
        """Note that a request needs no feature any more."""

    def take_freed(self) -> Sequence[str]:
        """Return the identifiers that were dropped since the last call."""


class Grammars(Protocol):
    """The grammars of structured output: who is in one, and what it allows."""

    def uses(self, request: Request) -> bool:
        """Whether a grammar constrains a request."""

    def ready(self, request: Request) -> bool:
        """Whether its grammar is compiled.

        Raises:
            RequestError: it cannot be compiled; the request ends with these words.
        """

    def bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return which tokens may be sampled in a step; None if every one may.

        It is asked while the model runs, and only where `plan.structured_request_ids` has some.
        """
