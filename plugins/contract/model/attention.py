"""Attention backends: store keys and values in blocks, and compute attention over them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic

from hardpoint.errors import ModelError
from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import fitting, returns
from hardpoint.plugins.component.type_variables import CacheT, PlanT
from hardpoint.plugins.text.arguments import ComponentWithArguments

from .attention_step import AttentionStep, KVSpec

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionBackend", "AttentionContext"]


@dataclass(frozen=True, kw_only=True)
class AttentionContext(Context["AttentionBackend"]):
    """Context of an attention backend.

    Attributes:
        dtype: dtype of keys, values and queries.
        block_size: tokens per block.
        cache_dtype: `kv_cache.dtype`; how keys and values are stored, see
            `AttentionBackend.cache_dtypes`.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int
    cache_dtype: str = "auto"


BYTES = fitting("an int >= 1", lambda value: type(value) is int and value >= 1)


class AttentionBackend(ComponentWithArguments, Generic[CacheT, PlanT]):
    """Stores keys and values in blocks and computes attention over them. One per device.

    `AttentionBackend[Cache, Plan]` as a base types the results of `allocate` and `plan`. A
    constructor raises ModelError if the backend cannot run here, so that `backend = "auto"` tries
    others.

    Requests may give arguments for a class with `Arguments`, each with a default; `plan` reads them
    in `AttentionStep.arguments`. Keys and values of a prompt are shared by requests with the same
    arguments alone. Sequences that plugins open over the model have the defaults.
    """

    kv_layout: ClassVar[str] = ""
    """Name of the cache's shape and order; caches of other layouts never meet. May be empty."""
    kv_layout_version: ClassVar[int] = 1
    """To be raised when blocks of the same layout hold other bytes than before."""
    devices: ClassVar[tuple[str, ...]]
    """Device types that it runs on."""
    softcaps: ClassVar[bool] = False
    """Whether `attend` computes `KVSpec.softcap`; otherwise models that have it are rejected."""
    has_sinks: ClassVar[bool] = False
    """Whether `attend` computes `KVSpec.sinks`; otherwise models that have them are rejected."""
    sees_ahead: ClassVar[bool] = False
    """Whether it computes `AttentionStep.sees`; otherwise models that need it are rejected."""
    reports_weights: ClassVar[bool] = False
    """Whether it has `attention_weights`; otherwise step parts that read them are rejected."""
    rotates: ClassVar[bool] = False
    """Whether it has `rotate_and_attend`; otherwise `Ops.rotate` runs before `attend`.

    With it, the `rotate` of operations is not called for attention, not even a plugin's own.
    """
    pads: ClassVar[bool] = False
    """Whether it is `replayable` in steps of the sizes of `Ops.record_sizes`, and not in others.

    Without effect in a class with `Arguments`, whose plan depends on the requests of a step.
    """
    cache_dtypes: ClassVar[tuple[str, ...]] = ("auto",)
    """Values of `kv_cache.dtype` that it has; others are rejected.

    "auto" stores the context's dtype. "int8" and "fp8" (float8 e4m3fn) store a code of 8 bits for
    each element and a float32 scale for each token, key head and side, keys or values. With the
    limit 127 for int8, 448 for fp8:

    * Keys, and queries in each step, are rotated first, in float32: `rotate_heads` has the
      additions in their order. It spreads large numbers of few elements.
    * scale = (largest magnitude of the head's elements, in float32) / limit. A head with a largest
      magnitude below 2^-100 has scale 0 and codes 0; one with a number that is not finite has
      scale NaN and codes 0.
    * code = element / scale, divided and rounded to the nearest as IEEE 754 has it, ties to even.
      Magnitudes below 2^-6 in fp8, the smallest normal number, become 0.

    The value read is scale * code, which may be rounded to the context's dtype. All attention
    reads it so, for tokens of the same step too: the division of tokens into steps changes no
    key. `hardpoint.toolkit.kv_codes` has both directions in plain torch.
    """

    context: AttentionContext

    def __init__(self, context: AttentionContext) -> None:
        """Store the context.

        Raises:
            ModelError: the class does not have its `cache_dtype`.
        """
        super().__init__(context)
        if context.cache_dtype not in self.cache_dtypes:
            raise ModelError(
                f"kv_cache.dtype: the attention backend {context.name!r} stores "
                f"{', '.join(map(repr, self.cache_dtypes))}, got {context.cache_dtype!r}; "
                f'attention.use = "torch" has it'
            )

    def describe(self) -> str:
        """Return the text that the engine logs for it: "native_cpu (avx2)" for example.

        By default the name, and the reason why the engine does not use the preferred backend.
        """
        reason = self.context.reason
        return f"{self.name} ({reason})" if reason else self.name

    @property
    def shares_values(self) -> bool:
        """Whether it knows `KVSpec.value_size`: values that are part of the keys are stored once.

        Others get such a layer without it: they store the keys twice, and the last elements
        of their results are taken.
        """
        return False

    @property
    def replayable(self) -> bool:
        """Whether `Ops.record` can record `attend`.

        Repeated, it reads the plan that `plan` returned last for the same group, and the same
        cache. With `pads`, in steps of one of the sizes in `Ops.record_sizes`, it reads the tensors
        of the step that was recorded (`AttentionStep`). It holds for the class that declares it,
        not for its subclasses.
        """
        return False

    @returns(BYTES)
    @abstractmethod
    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the bytes of one block of one layer."""

    @abstractmethod
    def allocate(self, spec: KVSpec, num_blocks: int) -> CacheT:
        """Return a zeroed cache of `num_blocks` blocks for one layer.

        Layers of other groups may share it if their specs differ from this one in the window alone.
        """

    def block_views(self, cache: CacheT) -> Sequence[torch.Tensor]:
        """Return a layer's cache as bytes by block, without copying, for KV connectors.

        Args:
            cache: result of `allocate`.

        Returns:
            Views of its memory, uint8 [num_blocks, bytes], with contiguous rows; together
            they hold all of each block. Data copied from a block's rows to another block's
            rows, in this or another cache of the same `kv_layout`, is read there as written here.

        Raises:
            NotImplementedError: the backend has no such views, which is the default; it cannot run
                together with a KV connector.
        """
        raise NotImplementedError(f"the attention backend {self.name!r} has no block_views")

    @abstractmethod
    def plan(self, step: AttentionStep) -> PlanT:
        """Return the plan that the layers of a group share in a step, such as masks and indices.

        Called once for each group of a step, before any of their layers attend.
        """

    @abstractmethod
    def attend(
        self,
        spec: KVSpec,
        cache: CacheT,
        plan: PlanT,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally.

        Args:
            spec: the layer.
            cache: result of `allocate` for it.
            plan: result of `plan` for this step.
            q: [tokens, num_heads, head_size].
            k: [tokens, num_kv_heads, head_size].
            v: like k; k itself where `spec` has a `value_size`. All three may be parts of one wider
                tensor: heads are contiguous, tokens need not be.

        Returns:
            [tokens, num_heads, head_size]; `value_size` where `spec` has it.
        """

    def attention_weights(
        self, spec: KVSpec, cache: CacheT, step: AttentionStep, sequence: int, q: torch.Tensor
    ) -> torch.Tensor:
        """Return how much the last tokens of a sequence attend to each of its tokens.

        Called after `attend` of the layer, if `reports_weights`.

        Args:
            spec: the layer.
            cache: as for `attend`.
            step: positions of the step in the layer's group.
            sequence: index in the step.
            q: queries of the last tokens of the sequence, [queries, num_heads, head_size], rotated.

        Returns:
            Attention weights, summed over the queries: float32 [num_heads, length of the sequence].
            The weights of a query are at most 1 together, less with `KVSpec.sinks`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention_weights")

    def rotate_and_attend(
        self,
        spec: KVSpec,
        cache: CacheT,
        plan: PlanT,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate the heads of q and k as `Ops.rotate` does, then `attend`; called if `rotates`.

        Args:
            spec: the layer.
            cache: as for `attend`, like the following ones.
            plan: the plan of this step.
            q: may be changed.
            k: may be changed.
            v: like k.
            angles: float32 [tokens, size]; of each token, cosines, then sines, for the first
                `size` elements of its heads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rotate_and_attend")
