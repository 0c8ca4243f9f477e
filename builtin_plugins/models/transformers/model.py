"""Any architecture of transformers that calls its attention interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hardpoint.plugins import (
    ForwardBatch,
    KVSpec,
    Model,
    ModelConfig,
    ModelContext,
    ModelError,
    ModelFiles,
)
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.plugins.requests import MediaFormat
from hardpoint.toolkit.layers import PackedLayer, load_packed, packed_weights, weight_shapes

from . import comparison
from .attention import AttentionLayer, SharedStep, Specs, experts_one_by_one, observing
from .building import body, build, plugin_of, text_modules, text_part
from .images import ImageTower, has_images, images_of
from .layers import WeightReadError
from .modules import Modules

_log = logging.getLogger("hardpoint")
_DRY_TOKENS = 4
_VERSION = f"transformers {transformers.__version__}"
"""Name of a tensor in packed weights: other versions may fuse weights in another way."""


class ThroughTransformers(Model):
    """Modules of transformers over the KV cache of the engine.

    Attention runs in the engine's backend, and products in its operations. The
    attention of each layer is observed in a step without weights.
    """

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ("tensor",)
    is_architecture = False

    @classmethod
    def implementation(cls, architecture: str) -> str | None:
        """Return the name of this plugin, or of the encoder plugin, for classes of transformers."""
        return plugin_of(architecture)

    @classmethod
    def media_format(cls, config: ModelConfig, files: ModelFiles | None) -> MediaFormat | None:
        """Return the image format of a supported family; None for others.

        Raises:
            ModelError: the files of the model have no token of images.
        """
        return images_of(config, files)

    def __init__(self, context: ModelContext) -> None:
        """Build the modules, and observe their attention.

        Raises:
            ModelError: they cannot run over a KV cache of blocks, naming layer, problem and value.
        """
        super().__init__(context)
        self._step = SharedStep(context.device)
        is_first = context.parallel.is_first
        self._tower = ImageTower(context) if is_first and has_images(context.config.hf) else None
        self._given: torch.Tensor | None = None
        self._first_position = 0
        excluded: list[str] = []
        while True:
            self._build(excluded)
            try:
                self._layers = self._observe()
                return
            except WeightReadError as read:
                excluded.append(self._modules.path_of(read.weight))

    def _build(self, excluded: list[str]) -> None:
        model = build(self.context)
        self._set_modules(model, text_part(model), excluded)
        self._intercept_base()

    def _set_modules(
        self, model: PreTrainedModel, part: PreTrainedModel, excluded: list[str]
    ) -> None:
        """Set the modules, and the part of them that runs; their layers become ours."""
        self.context.hooks.matrices.clear()
        self._model, self._part = model, part
        self._modules = Modules(model, self.context, self._step, excluded)
        self._modules.check()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self._model.config.get_text_config().hidden_size)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs."""
        return {**weight_shapes(self._tower_layers()), **self._modules.shapes()}

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank has."""
        return self._modules.cuts()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors, and compare a step with attention of transformers.

        Raises:
            ModelError: they differ.
        """
        self._modules.load(self._text_weights(weights))
        self._loaded()

    def _tower_layers(self) -> Sequence[PackedLayer]:
        return () if self._tower is None else self._tower.layers()

    def _text_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Load the tensors of the tower, and yield the others."""
        for name, tensor in weights:
            if self._tower is not None and self._tower.has(name):
                self._tower.load(name, tensor)
            else:
                yield name, tensor

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the embeddings of the tokens of images, [tokens, hidden_size] of each."""
        assert self._tower is not None, "the model has a media_format"
        table = self._part.get_input_embeddings()
        return [self._tower.embeddings(item, table) for item in items]

    def quantizable(self) -> Iterable[str]:
        """Return the names of the matrices of plain linear layers."""
        return self._modules.quantizable()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        self._modules.load_quantized(name, matrix)

    def packed_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices, and the other tensors, as this version has their layout."""
        packed = packed_weights([*self._tower_layers(), *self._modules.layers()])
        return None if packed is None else {**packed, _VERSION: torch.empty(0)}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them, and compare as `load_weights` does.

        Raises:
            KeyError, ValueError: a tensor is missing or wrong, or is of another version.
        """
        if _VERSION not in tensors:
            raise ValueError(f"expected weights that were packed with {_VERSION}")
        weights = {name: tensor for name, tensor in tensors.items() if name != _VERSION}
        load_packed([*self._tower_layers(), *self._modules.layers()], weights)
        self._loaded()

    def _loaded(self) -> None:
        self._modules.move_buffers()
        if self._tower is not None:
            self._tower.move_buffers()
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
        if self._first_position:
            positions = positions + self._first_position
        tokens = self._tokens(token_ids)
        outputs = self._part(**tokens, position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: torch.Tensor = outputs[0][0]
        return hidden

    def _tokens(self, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tokens as the body takes them: embedded, if a step part changes that."""
        ids = token_ids.unsqueeze(0)
        if (change := self.context.hooks.embedded) is None:
            return {"input_ids": ids}
        embedded = self._part.get_input_embeddings()(ids)
        return {"inputs_embeds": change(embedded[0]).unsqueeze(0)}

    def _intercept_base(self) -> None:
        """Let the model's head get hidden states that are there, in the place of its body's.

        Some heads call the part for text of the body, without the rest.
        """
        for module in dict.fromkeys((body(self._model), self._part)):
            module.forward = self._intercepted(module.forward)

    def _intercepted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **arguments: Any) -> Any:
            return run(*args, **arguments) if self._given is None else self._result(self._given)

        return forward

    def _result(self, hidden: torch.Tensor) -> Hidden:
        return Hidden(hidden)

    def _observe(self) -> list[AttentionLayer]:
        """Return the attention layers, from a step without weights.

        Raises:
            ModelError: the step fails, or a layer cannot run.
        """
        name = self.context.config.architecture
        specs = self._specs()
        self._step.is_dry = True
        try:
            with torch.inference_mode(), experts_one_by_one(self._model):
                self._dry_head()
                with observing(self._model, specs):
                    self._dry_step()
                self._step.attend = _zeros
                self._dry_step()  # as steps run, without masks
                self._first_position = self._find_first_position()
        except ModelError:
            raise
        except Exception as cause:
            size = self.context.parallel.tensor.size
            divided = "" if size == 1 else f", divided by its tp_plan (parallel.tensor = {size}),"
            raise ModelError(
                f"model: {name}{divided} fails in a step without a cache, on a flat batch, and "
                f"cannot run through transformers {transformers.__version__}: "
                f"{type(cause).__name__}: {str(cause)[:300]}"
            ) from cause
        finally:
            self._step.is_dry, self._step.attend = False, None
        count = int(self._model.config.get_text_config().num_hidden_layers)
        if specs.num_calls < count:
            raise ModelError(
                f"model: {name} has {count} layers, of which {specs.num_calls} call the "
                f"attention interface of transformers; {self._without(specs)} cannot run through it"
            )
        return specs.layers

    def _specs(self) -> Specs:
        return Specs(self._model, self._step, self.context.max_model_len)

    def _dry_head(self) -> None:
        size = getattr(self._model.get_output_embeddings(), "in_features", None)
        self.compute_logits(torch.zeros(1, size or self.hidden_size, dtype=self.context.dtype))

    def _dry_step(self) -> None:
        ids = torch.arange(_DRY_TOKENS) % self.context.config.vocab_size
        self._hidden(ids, torch.arange(_DRY_TOKENS))

    def _without(self, specs: Specs) -> str:
        observed = tuple(f"{layer.path}." for layer in specs.layers)
        for path, modules in text_modules(self._model):
            for number, layer in enumerate(modules if isinstance(modules, nn.ModuleList) else ()):
                prefix = f"{path}.{number}."
                if not any(prefix_of.startswith(prefix) for prefix_of in observed):
                    return f"{path}.{number} ({', '.join(_kinds(layer))})"
        return "the others"

    def _find_first_position(self) -> int:
        """Return the position that the modules give the first token themselves.

        Raises:
            ModelError: they count otherwise than one by one.
        """
        pad = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        ids = torch.full((1, _DRY_TOKENS), 1 if pad == 0 else 0)
        one_by_one = torch.arange(_DRY_TOKENS).unsqueeze(0)
        counted: list[torch.Tensor] = []
        explicit: list[torch.Tensor] = []
        for received, positions in ((counted, {}), (explicit, {"position_ids": one_by_one})):
            hooks = [
                module.register_forward_pre_hook(
                    lambda _, args, received=received: received.append(args[0])
                )
                for module in self._part.modules()
                if isinstance(module, nn.Embedding)
            ]
            self._part(input_ids=ids, use_cache=False, **positions)
            for hook in hooks:
                hook.remove()
        pairs = zip(counted, explicit, strict=True)
        shifts = {
            tuple((counted_positions - of_given).flatten().tolist())
            for counted_positions, of_given in pairs
        }
        first = {shift[0] for shift in shifts if any(shift)}
        if len(first) > 1 or any(len(set(shift)) > 1 for shift in shifts):
            raise ModelError(
                f"model: {self.context.config.architecture} counts positions otherwise than one by "
                f"one, {sorted(shifts)} besides the positions of a step, and cannot run through "
                "transformers"
            )
        return int(first.pop()) if first else 0

    @torch.inference_mode()
    def _compare(self) -> None:
        for layer in self._layers:
            layer.load_sinks()
        _log.info(
            "model: %s is computed by modules of transformers %s",
            self.context.config.architecture,
            transformers.__version__,
        )
        self._compare_step()

    def _compare_step(self) -> None:
        """Compare a step with attention of transformers.

        Raises:
            ModelError: they differ.
        """
        comparison.compare(self._model, self._step, self._hidden, self.compute_logits, self.context)


def _zeros(_layer: int, q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros_like(q)


def _kinds(layer: nn.Module) -> list[str]:
    return [type(m).__name__ for m in layer.children() if next(m.children(), None) is not None]


class Hidden:
    """The result of a model's body: the last hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor, pooled: Any = ()) -> None:
        self.last_hidden_state, self.pooler_output = hidden, pooled

    def __getattr__(self, name: str) -> None:
        """Return nothing for any other name.

        Raises:
            AttributeError: Python itself asks for it.
        """
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        """Return the values as of a tuple."""
        return self.last_hidden_state if index == 0 else self.pooler_output if index == 1 else ()
