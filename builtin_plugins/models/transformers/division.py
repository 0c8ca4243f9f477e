"""How the ranks of a stage divide a model of transformers: by its `tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import (
    Cut,
)

if TYPE_CHECKING:
    from hardpoint.plugins.process.parallel import Parallel


_COLUMNS, _ROWS, _PACKED = "colwise", "rowwise", "packed_colwise"
_EXPERTS, _OWNER = "moe_tp_experts", "local_params"
"""Modules with divided tensors of their own: experts, which the ranks sum, and others."""
_WHOLE = ("", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Each rank has all; the last two differ in gradients alone."""
_TABLE = "embedding_rowwise"
_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Heads that give all logits, as ours do."""
_KNOWN = (*_WHOLE, _COLUMNS, _ROWS, _PACKED, _EXPERTS, _OWNER, _TABLE)
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Matrices with heads as rows."""
_HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key and value heads"}


class ShardingPlan:
    """How ranks divide the modules of a model; not at all, if there is one rank.

    A rank has some rows of a "colwise" matrix, and some columns of a "rowwise" one; the ranks sum
    the results of the latter. Stacked experts are divided in the same way, each of them.
    """

    def __init__(
        self, model: PreTrainedModel, parallel: Parallel, tensors: Iterable[str], head: str
    ) -> None:
        """Read the plan of a model.

        Args:
            head: name of the module that gives logits, which has ranks of its own.

        Raises:
            ModelError: there are ranks, and no plan for them, or one with something else.
            IndivisibleError: heads do not divide among them.
        """
        self._parallel, self._name = parallel, type(model).__name__
        self._plan: dict[str, str] = {}
        if parallel.tensor.size == 1:
            return
        self._plan = dict(model.tp_plan or {})
        if not {_COLUMNS, _ROWS} <= set(self._plan.values()):
            raise ModelError(
                f"parallel.tensor: {self._name} of transformers has no tp_plan by which ranks "
                "could divide its layers; expected 1"
            )
        for path in (*(path for path, _ in model.named_modules()), *tensors):
            style = self._style(path)
            if style not in _KNOWN and not (style in _GATHERED and path == head):
                raise self._refused(path, style)
        keys = {name.rpartition(".")[2] for name, style in self._plan.items() if style == _COLUMNS}
        config = model.config.get_text_config()
        for field, noun in _HEADS.items() if keys & set(_KEYS) else ():
            if isinstance(count := getattr(config, field, None), int):
                parallel.share(count, noun)

    def of_linear(self, path: str, shape: tuple[int, int]) -> tuple[range, range]:
        """Return the rows and columns that this rank has of a matrix.

        Raises:
            ModelError: they do not divide, or the plan has something else.
        """
        rows, columns = range(shape[0]), range(shape[1])
        style = self._style(path)
        if style == _COLUMNS:
            rows = self._parallel.share(len(rows), f"rows of {path}")
        elif style == _ROWS:
            columns = self._parallel.share(len(columns), f"columns of {path}")
        elif style not in _WHOLE:
            raise self._refused(path, style)
        return rows, columns

    def of_tensor(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return the part that this rank has of a tensor that modules read themselves.

        Raises:
            ModelError: it does not divide, or the plan has something else.
        """
        module = name.rpartition(".")[0]
        style_of_tensor, of_module = self._style(name), self._style(module)
        if of_module not in (_EXPERTS, _OWNER):
            for path, style in ((name, style_of_tensor), (module, of_module)):
                if style not in (*_WHOLE, _TABLE):
                    raise self._refused(path, style)
            return None
        if style_of_tensor in _WHOLE and of_module == _OWNER:
            return None
        dim = len(shape) - (1 if style_of_tensor == _ROWS or len(shape) == 1 else 2)
        parts = 2 if style_of_tensor == _PACKED else 1
        is_known = style_of_tensor in (_COLUMNS, _ROWS, _PACKED)
        if not is_known or len(shape) != (3 if of_module == _EXPERTS else 1) or shape[dim] % parts:
            raise self._refused(name, style_of_tensor)
        size = shape[dim] // parts
        mine = self._parallel.share(size, f"rows or columns of {name}")
        first, *more = [
            (mine.start + size * part, mine.stop + size * part) for part in range(parts)
        ]
        return Cut(dim, *first, tuple(more))

    def adds_up(self, path: str, module: nn.Module) -> bool:
        """Return whether ranks add up the results of a module.

        Raises:
            ModelError: they are experts without tensors of their own.
        """
        if self._style(path) != _EXPERTS:
            return False
        if next(module.parameters(recurse=False), None) is None:
            raise self._refused(path, _EXPERTS)
        return True

    def _style(self, path: str) -> str:
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), "")

    def _refused(self, path: str, style: str) -> ModelError:
        return ModelError(
            f"parallel.tensor: {self._name}, {path}: its tp_plan is {style or 'missing'!r}, "
            "expected colwise, rowwise or replicated matrices, or stacked experts of such; such a "
            "model runs with 1"
        )
