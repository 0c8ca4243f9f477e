"""The modules of transformers with the layers of this engine in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hardpoint.plugins import ModelContext, ModelError
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.layers import (
    Embedding,
    Linear,
    LMHead,
    PackedLayer,
    RMSNorm,
    quantizable,
    weight_cuts,
    weight_shapes,
)

from .attention import SharedStep
from .division import ShardingPlan
from .layers import (
    PackedEmbedding,
    PackedLinear,
    PackedNorm,
    Plain,
    TiedHead,
    Transposed,
    cut,
    read_norm,
)
from .names import StoredNames


class Modules:
    """The layers that have the weights of a model of transformers, which it replaces in it.

    Products and the table of tokens run in the engine's operations; other tensors stay with
    the modules that read them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: ModelContext,
        step: SharedStep,
        excluded: Collection[str],
    ) -> None:
        """Replace the modules of a model that has no weights yet.

        Args:
            excluded: names of modules that are not replaced.

        Raises:
            ModelError: a tensor of it has no place in checkpoints.
        """
        self._model, self._context, self._step = model, context, step
        self._ties = {
            target: source
            for target, source in model.all_tied_weights_keys.items()
            if target in model.state_dict() and source in model.state_dict()
        }
        tensors = {n: t for n, t in model.state_dict().items() if n not in self._ties}
        self._names = StoredNames(model, tensors)
        self._layers: dict[str, PackedLayer] = {}
        """By the model's name of their first tensor."""
        self._embedding: Embedding | None = None
        self._head: Linear | None = None
        self._table: torch.Tensor | None = None  # of a head that shares it, until that is loaded
        self._head_name = self._find(model.get_output_embeddings())
        self._division = ShardingPlan(model, context.parallel, tensors, self._head_name)
        self._replace_modules(excluded)
        self._keep_tensors(tensors)
        self._owners = {n: layer for layer in self._stored() for n in layer.shapes()}
        for name, part in weight_cuts(self._stored()).items():
            if name in self._names.converted:
                self._names.divide(name, part)

    def _find(self, wanted: nn.Module | None) -> str:
        return next((p for p, module in self._model.named_modules() if module is wanted), "")

    def _replace_modules(self, excluded: Collection[str]) -> None:
        table = self._find(self._model.get_input_embeddings())
        for path, module in list(self._model.named_modules()):
            new: nn.Module
            if self._division.adds_up(path, module):
                module.forward = self._added_up(module.forward)
            if path in excluded:
                continue
            if path == self._head_name and type(module) is nn.Linear and module.bias is None:
                new = self._replaced_head(path, module)
            elif type(module) is nn.Linear:
                new = self._replaced_linear(path, module)
            elif type(module) is Conv1D:
                new = self._replaced_conv(path, module)
            elif path == table and type(module) is nn.Embedding:
                new = self._replaced_table(path, module)
            elif (norm := self._replaced_norm(path, module)) is not None:
                new = norm
            else:
                continue
            parent, _, name = path.rpartition(".")
            setattr(self._model.get_submodule(parent), name, new)

    def _added_up(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **arguments: Any) -> torch.Tensor:
            y = run(*args, **arguments)
            return y if self._step.is_dry else self._context.parallel.tensor.all_reduce(y)

        return forward

    def _stored_as(self, path: str, *, bias: bool) -> str | None:
        weight = self._names.plain.get(f"{path}.weight")
        if weight is None or not weight.endswith(".weight"):
            return None
        stored = weight.removesuffix(".weight")
        if bias and self._names.plain.get(f"{path}.bias") != f"{stored}.bias":
            return None
        return stored

    def _replaced_norm(self, path: str, module: nn.Module) -> nn.Module | None:
        stored, module_norm = self._stored_as(path, bias=False), read_norm(module)
        if stored is None or module_norm is None or module_norm.dtype != self._context.dtype:
            return None
        norm = RMSNorm(
            stored, module_norm.size, module_norm.eps, self._context, offset=module_norm.offset
        )
        self._layers[f"{path}.weight"] = norm
        return PackedNorm(norm, module_norm.size, self._step)

    def _replaced_linear(self, path: str, module: nn.Linear) -> nn.Module:
        shape, bias = (module.out_features, module.in_features), module.bias is not None
        is_head = path == self._head_name
        dtype = torch.float32 if is_head else self._context.dtype
        stored = self._stored_as(path, bias=bias)
        rows, columns = range(shape[0]), range(shape[1])
        if not is_head:
            rows, columns = self._division.of_linear(path, shape)
        linear = Linear(
            [(stored or path, shape[0])],
            shape[1],
            self._context,
            bias=bias,
            out_dtype=dtype,
            row_ranges=[rows],
            column_range=columns if len(columns) < shape[1] else None,
            quantize=stored is not None,
        )
        if is_head:
            del self._context.hooks.matrices[stored or path]  # `forward` does not multiply it
            self._head = linear
        self._layers[f"{path}.weight"] = self._tied_head(path, linear) if is_head else linear
        return PackedLinear(linear, shape, self._step, dtype, (len(rows), len(columns)))

    def _tied_head(self, path: str, linear: Linear) -> PackedLayer:
        tied = {name: self._ties.get(f"{path}.{name}") for name in ("weight", "bias")}
        if not any(tied.values()):
            return linear
        (weight, bias) = linear.shapes()
        stored = {} if tied["weight"] else {weight: self._names.plain[f"{path}.weight"]}
        source = tied["bias"] or f"{path}.bias"
        if tied["bias"]:  # no module reads that one
            module, name = self._place(source)
            del module._parameters[name]
        return TiedHead(linear, stored | {bias: self._names.plain[source]})

    def _replaced_head(self, path: str, module: nn.Linear) -> nn.Module:
        shape = (module.out_features, module.in_features)
        stored = self._stored_as(path, bias=False) or path
        self._head = LMHead(stored, *shape, self._context)
        if f"{path}.weight" not in self._ties:
            self._layers[f"{path}.weight"] = self._head
        return PackedLinear(self._head, shape, self._step, torch.float32, shape)

    def _replaced_conv(self, path: str, module: Any) -> nn.Module:
        columns, rows = module.weight.shape
        stored = self._stored_as(path, bias=True) or path
        self._division.of_tensor(f"{path}.weight", (columns, rows))  # refused, if it is divided
        linear = Linear([(stored, rows)], columns, self._context, bias=True, quantize=False)
        del self._context.hooks.matrices[stored]  # checkpoints have it transposed
        self._layers[f"{path}.weight"] = Transposed(linear)
        shape = (rows, columns)
        return PackedLinear(linear, shape, self._step, self._context.dtype, shape)

    def _replaced_table(self, path: str, module: nn.Embedding) -> nn.Module:
        shape = (module.num_embeddings, module.embedding_dim)
        stored = self._stored_as(path, bias=False) or path
        self._embedding = self._layers[f"{path}.weight"] = Embedding(stored, *shape, self._context)
        return PackedEmbedding(self._embedding, shape, self._step, self._context.dtype)

    def _keep_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        present = {*(n for n, _ in self._model.named_parameters(remove_duplicate=False))}
        present |= {n for n, _ in self._model.named_buffers(remove_duplicate=False)}
        patterns = [
            *(getattr(self._model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()),
        ]
        precise = re.compile("|".join(rf"(?:^|\.){re.escape(p)}(?:\.|$)" for p in patterns) or "$^")
        for name in (name for name in tensors if name in present):
            tied = [name, *(t for t, source in self._ties.items() if source == name)]
            places = [self._place(n) for n in tied if n in present]
            dtype = torch.float32 if precise.search(name) else self._context.dtype
            stored = self._names.plain.get(name, name)
            like = tensors[name]
            part = self._division.of_tensor(name, like.shape)
            self._layers[name] = Plain(stored, like, places, dtype, self._context, part)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        parent, _, attribute = name.rpartition(".")
        return self._model.get_submodule(parent), attribute

    def _stored(self) -> list[PackedLayer]:
        return list(self._layers.values())

    @property
    def _shared(self) -> str | None:
        can_tie = self._embedding is not None and isinstance(self._head, LMHead)
        return None if can_tie else self._names.plain.get(self._tied or "")

    @property
    def _tied(self) -> str | None:
        return self._ties.get(f"{self._head_name}.weight")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of checkpoints."""
        made = self._converted_names()
        stored_shapes = {n: s for n, s in weight_shapes(self._stored()).items() if n not in made}
        return {**stored_shapes, **self._names.shapes()}

    def cuts(self) -> dict[str, Any]:
        """Return the parts of them that this rank has."""
        whole = {*self._converted_names(), self._shared}
        stored_cuts = {n: c for n, c in weight_cuts(self._stored()).items() if n not in whole}
        return {**stored_cuts, **self._names.cuts()}

    def _converted_names(self) -> set[str]:
        return set(self._names.converted)

    def quantizable(self) -> list[str]:
        """Return the names of the matrices that may have few bits."""
        whole = {*self._converted_names(), self._shared}
        return [name for name in quantizable(self._stored()) if name not in whole]

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        quantizable(self._stored())[name].load_quantized(name, matrix)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        sources = self._names.shapes()
        for name, tensor in weights:
            if name not in sources:
                self._load(name, tensor)
                continue
            for made, result in self._names.convert(name, tensor, self._empty):
                self._load_made(made, result)
        self._tie_head()

    def _tie_head(self) -> None:
        table, self._table = self._table, None
        if self._tied is None or self._head is None:
            return
        if isinstance(self._head, LMHead) and self._embedding is not None:
            self._head.tie(self._embedding)
            return
        assert table is not None, "it is in the shapes, and has no few bits"
        name = next(name for name in self._head.shapes() if name.endswith(".weight"))
        self._head.load(name, cut(table, self._head.cuts(), name))

    def _empty(self, name: str) -> torch.Tensor:
        owner = self._owners[name]
        if isinstance(owner, Plain):
            return owner.empty()
        return torch.empty(self._part_of(name), dtype=self._context.dtype)

    def _part_of(self, name: str) -> tuple[int, ...]:
        owner = self._owners[name]
        part, whole = weight_cuts([owner]).get(name), owner.shapes()[name]
        return whole if part is None else part.shape(whole)

    def _load_made(self, name: str, tensor: torch.Tensor) -> None:
        owner = self._owners[name]
        if tuple(tensor.shape) != self._part_of(name):
            tensor = cut(tensor, weight_cuts([owner]), name)
        if isinstance(owner, Plain) and self._names.converted[name].places:
            owner.use(tensor)
        else:
            self._load(name, tensor)

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        owner = self._owners[name]
        part = cut(tensor, weight_cuts([owner]), name) if name == self._shared else tensor
        owner.load(name, part)
        if self._tied is not None and name == self._names.plain.get(self._tied, self._tied):
            self._table = tensor

    def move_buffers(self) -> None:
        """Move the buffers that no checkpoint has to the device of the model."""
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._context.device:
                    module._buffers[name] = buffer.to(self._context.device)

    def layers(self) -> list[PackedLayer]:
        """Return the layers with packed weights, a tied head too."""
        if self._tied is not None and isinstance(self._head, LMHead):
            return [*self._stored(), self._head]
        return self._stored()

    def path_of(self, weight: torch.Tensor) -> str:
        """Return the name of the replaced module that has this weight."""
        modules = self._model.named_modules()
        paths = (path for path, module in modules if getattr(module, "weight", None) is weight)
        return str(next(paths))

    def check(self) -> None:
        """Refuse tensors of the model that stay without numbers.

        Raises:
            ModelError: naming one.
        """
        for name, parameter in self._model.named_parameters():
            if parameter.device.type == "meta":
                raise ModelError(
                    f"model: {type(self._model).__name__}: {name} has no place in checkpoints"
                )
