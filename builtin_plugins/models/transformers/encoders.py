"""Encoders of transformers with bidirectional attention, and their classification heads."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.plugins import ForwardBatch, KVSpec, ModelError

from . import comparison
from .attention import NAME, Specs, layer_of, shows, use
from .building import body, build_encoder
from .layers import PackedLinear
from .model import Hidden, ThroughTransformers

_log = logging.getLogger("hardpoint")
_BOTH_WAYS = "both ways"
_FAR = 1 << 20  # a distance at which masks are looked at
_TOKENS = 3
_both_ways = functools.partial(comparison.attend, both_ways=True)


class SpecsBothWays(Specs):
    """Observes the attention of each layer within a sequence, without a cache."""

    def kind_of(self, function: Callable[..., Any], window: int | None) -> str:
        """Return the kind of a mask, by its function and the largest distance stated."""
        far = _FAR if window is None else window
        pairs = [(far, 0, True), (0, far, True), (0, 0, True)]
        pairs += [(0, far + 1, window is None), (far + 1, 0, window is None)]
        is_one = shows(function, pairs)
        return _BOTH_WAYS if is_one else "neither of all tokens nor of near ones"

    def attended(self, module: nn.Module, *args: Any) -> torch.Tensor:
        """Add a layer; a shared layer is called several times.

        Raises:
            ModelError: it needs something that cannot be kept.
        """
        earlier = layer_of(module) if hasattr(module, "_hardpoint_layer") else None
        result = super().attended(module, *args)
        layer = layer_of(module)
        if earlier is not None and earlier.spec != layer.spec:
            raise self.refused(layer.path, "attention of a shared layer", "differs between calls")
        for field in ("sinks", "softcap"):
            if (value := getattr(layer.spec, field)) is not None:
                raise self.refused(layer.path, field, value)
        return result

    def called_again(self, path: str) -> None:
        """Allow it: nothing is kept between calls."""

    def check_unbounded(self, path: str, module: nn.Module) -> None:
        """Ignore the cache of transformers."""

    def window_of(self, path: str, module: nn.Module, mask: Any) -> int | None:
        """Return the window of a layer, tokens at smaller distances; None if it has none.

        Raises:
            ModelError: its attention is not bidirectional, or the mask is another one.
        """
        if getattr(module, "is_causal", False):
            raise self.refused(path, "tokens that do not see later ones", "is_causal = True")
        if mask is None:
            return None
        window = self.window_of_mask(path, mask, _BOTH_WAYS)
        return None if window is None else window + 1

    def refused(self, path: str, problem: str, value: Any) -> ModelError:
        """Return the error of a layer that needs something else."""
        return ModelError(
            f"model: {self._name}, layer {path}: {problem}: {value}: cannot be kept by attention "
            "within prompts, so that it cannot run through transformers"
        )


class EncoderThroughTransformers(ThroughTransformers):
    """Encoders of transformers, for vectors.

    Prompts of a step are one batch, or are computed one after another where modules mix the tokens
    of a batch, or count positions themselves.
    """

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ()
    is_architecture = False
    generates: ClassVar[bool] = False
    pooler: ClassVar[str] = "cls"
    token_types: ClassVar[bool] = True

    def _build(self, excluded: list[str]) -> None:
        model = build_encoder(self.context)
        self._set_modules(model, body(model), excluded)
        self._takes = set(inspect.signature(type(self._part).forward).parameters)
        # ESM scales the embeddings by the share of masked tokens in a prompt.
        scales = getattr(self._part.config, "token_dropout", False)
        self._one_batch = "position_ids" in self._takes and not scales

    def kv_specs(self) -> list[KVSpec]:
        """Return none: keys and values are used in their own step alone."""
        return []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise: it has none."""
        raise NotImplementedError(f"{self.context.config.architecture} has no logits")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]."""
        self._step.attend = self._attend
        return self._encoded(batch.token_ids, batch.positions, batch.token_types)

    def _encoded(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states of prompts: of all in one batch, or of one after another."""
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
        if self._one_batch:
            self._starts = starts
            return self._hidden(ids, positions, types)
        parts: list[torch.Tensor] = []
        for first, end in itertools.pairwise(starts):
            self._starts = [0, end - first]
            type_ids = None if types is None else types[first:end]
            parts.append(self._hidden(ids[first:end], positions[first:end], type_ids))
        return torch.cat(parts)

    def _hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = self._tokens(token_ids)
        if self._one_batch:
            tokens["position_ids"] = (positions + self._first_position).unsqueeze(0)
        if "token_type_ids" in self._takes:
            types = torch.zeros_like(token_ids) if types is None else types
            tokens["token_type_ids"] = types.unsqueeze(0)
        hidden: torch.Tensor = self._part(**tokens)[0][0]
        return hidden

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        spec = self._layers[layer].spec
        if (groups := spec.num_heads // spec.num_kv_heads) > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        distance = None if spec.window is None else spec.window - 1
        return self.context.ops.attend_within(q, k, v, self._starts, spec.scale, distance)

    def _specs(self) -> Specs:
        return SpecsBothWays(self._model, self._step, self.context.max_model_len)

    def _dry_head(self) -> None:
        self.context.hooks.embedded = _same
        try:
            self._dry_step()
        finally:
            self.context.hooks.embedded = None

    def _find_first_position(self) -> int:
        """Return the position that the modules give the first token themselves.

        Raises:
            ModelError: they count otherwise, or have no row for the last position.
        """
        if not self._one_batch:
            return 0
        first = super()._find_first_position()
        last = torch.tensor([[first + self.context.max_model_len - 1]])
        try:
            self._part(input_ids=torch.zeros_like(last), position_ids=last)
        except IndexError:
            raise ModelError(
                f"model: {self.context.config.architecture} has no row for the position "
                f"{int(last)} of the last token: expected a smaller max_model_len than "
                f"{self.context.max_model_len}"
            ) from None
        return first

    def _compare_step(self) -> None:
        parts = self._model, self._step, self._encoded, _same, self.context, _both_ways
        try:
            comparison.compare(*parts)
        except comparison.MixedTokensError:
            if not self._one_batch:
                raise
            self._one_batch = False
            comparison.compare(*parts)
            _log.info(
                "model: %s gets one prompt after another: its modules mix the prompts of a batch",
                self.context.config.architecture,
            )


class ClassifierThroughTransformers(EncoderThroughTransformers):
    """Encoders of transformers with a head that classifies."""

    contract = 1
    is_architecture = False
    classifies: ClassVar[bool] = True

    def _build(self, excluded: list[str]) -> None:
        super()._build(excluded)
        self._pooling: nn.Module | None = getattr(self._part, "pooler", None)
        self._rest()
        self._intercept_base()
        inside = set(self._part.modules())
        for module in set(self._model.modules()) | set(self._pooling_modules()):
            if isinstance(module, PackedLinear) and module not in inside:
                for name in module.linear.shapes():  # `forward` does not multiply them
                    self.context.hooks.matrices.pop(name.removesuffix(".weight"), None)

    def _pooling_modules(self) -> Iterable[nn.Module]:
        return () if self._pooling is None else self._pooling.modules()

    def _rest(self) -> None:
        """Take the part that pools out of the body: `forward` does not need it."""
        if self._pooling is not None:
            self._part.pooler = None

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the vectors of prompts."""
        return self._classes(pooled.to(self.context.dtype).unsqueeze(1))

    def _classes(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states [rows, tokens, hidden]."""
        self._given = hidden
        try:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids).logits
        finally:
            self._given = None
        return logits

    def _result(self, hidden: torch.Tensor) -> Hidden:
        if self._pooling is None:
            return Hidden(hidden)
        activation = getattr(self._part, "pooler_activation", None)  # ALBERT's
        if activation is not None:
            return Hidden(hidden, activation(self._pooling(hidden[:, 0])))
        return Hidden(hidden, self._pooling(hidden))

    def _dry_head(self) -> None:
        """Run the head, and observe the input of its first matrix.

        Raises:
            ModelError: it is not the input of poolers.
        """
        super()._dry_head()
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _TOKENS, self.hidden_size, generator=generator)
        hidden = hidden.to(self.context.dtype)
        modules = {*self._model.modules(), *self._pooling_modules()}
        matrices: list[nn.Module] = [
            module for module in modules if isinstance(module, PackedLinear)
        ]
        seen: list[torch.Tensor] = []
        for matrix in matrices:
            matrix.forward = functools.partial(_noting, seen, matrix.forward)
        self._classes(hidden)
        for matrix in matrices:
            del matrix.forward
        known = {"cls": hidden[:, 0], "mean": hidden.mean(1)}
        read = [n for n, x in known.items() if x.shape == seen[0].shape and x.allclose(seen[0])]
        expected = self.context.config.hf.get("classifier_pooling", self.pooler)
        if read != [expected]:
            source = read[0] if read else f"{list(seen[0].shape)} of {list(hidden.shape)}"
            raise ModelError(
                f"model: {self.context.config.architecture}: its head reads {source} of the hidden "
                f"states, and classifier_pooling is {expected!r}: expected the first token "
                "(cls) or the mean, so that it cannot run through transformers"
            )

    def _compare_step(self) -> None:
        super()._compare_step()
        # Some bodies count positions by the padding token; positions of steps are given.
        pad, length = self._part.config.pad_token_id, min(_TOKENS, self.context.max_model_len)
        known = [token for token in range(_TOKENS + 1) if token != pad]
        ids = torch.tensor(known[:length], device=self.context.device)
        use(self._model, "eager")
        if self._pooling is not None:
            self._part.pooler = self._pooling
        try:
            expected = self._model(input_ids=ids.unsqueeze(0)).logits
        finally:
            self._rest()
            use(self._model, NAME)
        self._step.attend = self._attend
        hidden = self._encoded(ids, torch.arange(length, device=self.context.device))
        is_mean = self.context.config.hf.get("classifier_pooling") == "mean"
        pooled = hidden.float().mean(0) if is_mean else hidden[0]
        comparison.check_classes(self.classify(pooled.unsqueeze(0)), expected, self.context)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _noting(seen: list[torch.Tensor], run: Callable[..., Any], x: torch.Tensor) -> Any:
    seen.append(x)
    return run(x)
