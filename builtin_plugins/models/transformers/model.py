"""Any architecture of transformers that calls its attention interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import transformers

from hardpoint.plugins import ForwardBatch, KVSpec, Model, ModelContext, ModelError
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix

from . import comparison
from .attention import NAME, Layer, Specs, Step, experts_one_by_one, observing, use
from .building import build, has_architecture, text_part
from .modules import Modules

_log = logging.getLogger("hardpoint")
_DRY_TOKENS = 4


class ThroughTransformers(Model):
    """Modules of transformers over the KV cache of the engine.

    Their attention is that of the engine's backend, their products those of its operations. What
    each layer needs of attention is observed in a step without weights.
    """

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def implementation(cls, architecture: str) -> str | None:
        """Return the name of this plugin for what transformers has."""
        return "transformers" if has_architecture(architecture) else None

    def __init__(self, context: ModelContext) -> None:
        """Build the modules, and observe what their attention needs.

        Raises:
            ModelError: they cannot run over a KV cache of blocks, naming layer, what and value.
        """
        super().__init__(context)
        self._step = Step()
        self._model = build(context)
        self._part = text_part(self._model)
        self._modules = Modules(self._model, context, self._step)
        self._modules.check()
        self._given: torch.Tensor | None = None
        self._intercept_base()
        self._layers = self._observe()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self._model.config.get_text_config().hidden_size)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs."""
        return self._modules.shapes()

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank has."""
        return self._modules.cuts()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors, and compare a step with attention of transformers.

        Raises:
            ModelError: they differ.
        """
        self._modules.load(weights)
        self._compare()

    def quantizable(self) -> Iterable[str]:
        """Return the names of the matrices of plain linear layers."""
        return self._modules.quantizable()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        self._modules.load_quantized(name, matrix)

    def packed_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices, and the other tensors."""
        return self._modules.packed()

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them, and compare as `load_weights` does."""
        self._modules.load_packed(tensors)
        self._compare()

    def kv_specs(self) -> list[KVSpec]:
        """Return the spec of each attention layer, as it was observed."""
        return [layer.spec for layer in self._layers]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden] after the last norm."""
        self._step.attend = batch.attend
        return self._hidden(batch.token_ids, batch.positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden], in float32."""
        self._given = hidden.unsqueeze(0)
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return hidden states of a flat batch."""
        tokens: dict[str, torch.Tensor] = {"input_ids": token_ids.unsqueeze(0)}
        if (change := self.context.hooks.embedded) is not None:
            embedded = self._part.get_input_embeddings()(tokens["input_ids"])
            tokens = {"inputs_embeds": change(embedded[0]).unsqueeze(0)}
        found = self._part(**tokens, position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: torch.Tensor = found[0][0]
        return hidden

    def _intercept_base(self) -> None:
        """Let the model's head get hidden states that are there, in the place of its body's.

        Some heads call the part for text of the body, without the rest.
        """
        for module in dict.fromkeys((self._model.base_model, self._part)):
            module.forward = self._intercepted(module.forward)

    def _intercepted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **arguments: Any) -> Any:
            return run(*args, **arguments) if self._given is None else _Hidden(self._given)

        return forward

    def _observe(self) -> list[Layer]:
        """Return the attention layers, from a step without weights.

        Raises:
            ModelError: the step fails, or a layer cannot run.
        """
        specs, name = Specs(self._model, self._step), self.context.config.architecture
        ids = torch.arange(_DRY_TOKENS) % self.context.config.vocab_size
        self._step.is_dry = True
        try:
            with (
                torch.inference_mode(),
                observing(self._model, specs),
                experts_one_by_one(self._model),
            ):
                self._hidden(ids, torch.arange(_DRY_TOKENS))
        except ModelError:
            raise
        except Exception as cause:
            raise ModelError(
                f"model: {name} fails in a step without a cache, on a flat batch, and cannot run "
                f"through transformers {transformers.__version__}: {type(cause).__name__}: "
                f"{str(cause)[:300]}"
            ) from cause
        finally:
            self._step.is_dry = False
        use(self._model, NAME)
        count = int(self._model.config.get_text_config().num_hidden_layers)
        if len(specs.layers) < count:
            raise ModelError(
                f"model: {name} has {count} layers, of which {len(specs.layers)} call the "
                "attention interface of transformers; the others cannot run through it"
            )
        return specs.layers

    @torch.inference_mode()
    def _compare(self) -> None:
        _log.info(
            "model: %s is computed by modules of transformers %s",
            self.context.config.architecture,
            transformers.__version__,
        )
        comparison.compare(self._model, self._step, self._hidden, self.compute_logits, self.context)


class _Hidden:
    """The result of a model's body: last hidden states, and nothing of what else there may be."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()
