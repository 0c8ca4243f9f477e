"""Settings of pooling in the folder of a model, as sentence-transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.errors import ModelError, RequestError, shown
from hardpoint.plugins import ModelConfig, ModelFiles

_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""Poolers, by the names of sentence-transformers."""

_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Modes, by the flags of configurations before version 3."""

ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "SiLU", "Sigmoid")
"""Classes of torch.nn that may follow a dense layer."""

CLASS_ACTIVATIONS = ("sigmoid", "softmax", "tanh")
"""Activations of the logits of classes, by the names of torch."""

_SETTINGS = "config_sentence_transformers.json"

_PURPOSES: dict[str | None, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
"""Names of the prompts of a purpose, as sentence-transformers looks for them."""


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after the pooling.

    Attributes:
        folder: has its weights, `model.safetensors`.
        activation: one of ACTIVATIONS.
    """

    folder: Path
    activation: str
    in_features: int
    out_features: int
    bias: bool


@dataclass(frozen=True)
class ModelPooling:
    """How a model pools.

    Attributes:
        pooler: pooler of its vectors; None if its folder names none.
        normalize: whether its vectors have length 1.
        dense: layers after the pooling.
        prompts: texts before embedded texts, by name.
        default_prompt: name of the one of texts for which none is named.
        cuts: sizes that its vectors may be cut to; None is any, and empty none.
        size: size of its vectors; None if it is not known.
        labels: names of its classes; empty if it has none.
        activation: function of the logits of classes: one of CLASS_ACTIVATIONS.
        activates: whether it does so for requests that leave it open.
        token_types: whether tokens of the second of two texts have another type.
    """

    pooler: str | None = None
    normalize: bool = True
    dense: Sequence[DenseLayer] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    cuts: Sequence[int] | None = ()
    size: int | None = None
    labels: Sequence[str] = ()
    activation: str = ""
    activates: bool = True
    token_types: bool = False

    def prompt(self, name: str | None, purpose: str | None = None) -> str:
        """Return the text before embedded texts; see `PooledResults.call`.

        Raises:
            RequestError: there is no prompt of that name.
        """
        for known in _PURPOSES.get(purpose, ()):
            if known in self.prompts:
                return self.prompts[known]
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none: the model has no prompts"
            raise RequestError(f"prompt_name: expected one of {known}, got {shown(name)}")
        return self.prompts[name]


def read_pooling(config: ModelConfig | None, files: ModelFiles | None) -> ModelPooling:
    """Return the settings in the configuration and the folder of a model.

    Raises:
        ModelError: a file is damaged or has unsupported settings; names file and field.
    """
    hf = {} if config is None else config.hf
    size = next(
        (hf[name] for name in ("hidden_size", "n_embd", "d_model", "dim") if name in hf), None
    )
    cuts = _cuts(hf)
    folder = None if files is None else files.path
    if folder is None or not (folder / "modules.json").is_file():
        return ModelPooling(cuts=cuts, size=size)
    modules = _read(folder / "modules.json", list)
    kinds = [str(_field(module, "type", folder)).rpartition(".")[2] for module in modules]
    paths = [folder / str(_field(module, "path", folder)) for module in modules]
    names = kinds[2:-1] if kinds[2:] and kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(names) - {"Dense"}:
        raise ModelError(
            f"{folder / 'modules.json'}: expected the modules Transformer, Pooling, any Dense and "
            f"perhaps Normalize, got {', '.join(kinds)}"
        )
    for path in paths:  # which name files that are read
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"{folder / 'modules.json'}: path: {shown(str(path))} is outside")
    prompts, default = _prompts(folder)
    dense = [_dense(path) for path, kind in zip(paths, kinds, strict=True) if kind == "Dense"]
    return ModelPooling(
        pooler=_pooler(paths[1] / "config.json"),
        normalize=kinds[-1] == "Normalize",
        dense=dense,
        prompts=prompts,
        default_prompt=default,
        cuts=cuts,
        size=dense[-1].out_features if dense else size,
    )


def read_classifier(config: ModelConfig, files: ModelFiles | None) -> ModelPooling:
    """Return the settings of a model with a head that classifies, of its configuration and folder.

    One class, and several that do not exclude each other, have sigmoid; others softmax. A
    cross-encoder of sentence-transformers states its own.

    Raises:
        ModelError: a file is damaged or has unsupported settings; names file and field.
    """
    hf, folder = config.hf, None if files is None else files.path
    names, count = hf.get("id2label"), hf.get("num_labels", 2)
    names_of_classes = names.values() if isinstance(names, dict) and names else range(int(count))
    labels = [str(label) for label in names_of_classes]
    several = hf.get("problem_type") == "multi_label_classification"
    default = "sigmoid" if len(labels) == 1 or several else "softmax"
    stated, where = hf.get("sbert_ce_default_activation_function"), "config.json: "
    where += "sbert_ce_default_activation_function"
    if isinstance(table := hf.get("sentence_transformers"), dict) and "activation_fn" in table:
        stated, where = table["activation_fn"], "config.json: sentence_transformers.activation_fn"
    prompts: dict[str, str] = {}
    default_prompt = None
    if folder is not None and (folder / "modules.json").is_file():
        settings = _cross_encoder(folder)
        prompts, default_prompt = _prompts(folder)
        if (name := settings.get("activation_fn")) is not None:
            stated, where = name, f"{folder / _SETTINGS}: activation_fn"
    name = default if stated is None else str(stated).rpartition(".")[2].lower()
    if name not in (*CLASS_ACTIVATIONS, "identity"):
        raise ModelError(
            f"{where}: expected Identity, Sigmoid, Softmax or Tanh of torch.nn, got {shown(stated)}"
        )
    return ModelPooling(
        labels=labels,
        activation=default if name == "identity" else name,
        activates=name != "identity",
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _cross_encoder(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder of a CrossEncoder; see _SETTINGS.

    Raises:
        ModelError: it has further modules, or reads texts in another way than in pairs.
    """
    modules = _read(folder / "modules.json", list)
    kinds = [str(_field(module, "type", folder)).rpartition(".")[2] for module in modules]
    if kinds != ["Transformer"]:
        raise ModelError(
            f"{folder / 'modules.json'}: expected the module Transformer alone, for the model "
            f"has a head that classifies, got {', '.join(kinds)}"
        )
    path = folder / "sentence_bert_config.json"
    table = _read(path, dict) if path.is_file() else {}
    task = table.get("transformer_task", "sequence-classification")
    if task != "sequence-classification":
        raise ModelError(
            f'{path}: transformer_task: expected "sequence-classification", got {shown(task)}'
        )
    modality = table.get("modality_config") or {}
    if "message" in modality:
        raise ModelError(
            f"{path}: modality_config: expected text alone, because pairs have no chat "
            f"template, got {', '.join(modality)}"
        )
    if table.get("processing_kwargs"):
        raise ModelError(
            f"{path}: processing_kwargs: expected none, got {shown(table['processing_kwargs'])}"
        )
    path = folder / _SETTINGS
    settings: dict[str, Any] = _read(path, dict) if path.is_file() else {}
    if settings.get("keep_in_fp32_modules"):
        raise ModelError(
            f"{path}: keep_in_fp32_modules: expected none, because all layers have one dtype, "
            f"got {shown(settings['keep_in_fp32_modules'])}"
        )
    return settings


def _cuts(hf: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the sizes that vectors may be cut to; the fields of `config.json` are vLLM's."""
    sizes = hf.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes):
        return sizes
    return None if hf.get("is_matryoshka") is True else ()


def _pooler(path: Path) -> str:
    table = _read(path, dict)
    mode = table.get("pooling_mode")
    if mode is None:
        chosen = [name for flag, name in _OLD_MODES.items() if table.get(flag)]
        mode = chosen[0] if len(chosen) == 1 else chosen
    if not isinstance(mode, str) or mode not in _MODES:
        raise ModelError(
            f"{path}: pooling_mode: expected one of {', '.join(_MODES)}, got {shown(mode)}"
        )
    if table.get("include_prompt") is False:
        raise ModelError(
            f"{path}: include_prompt: expected true, because prompts are pooled whole, got false"
        )
    return _MODES[mode]


def _dense(folder: Path) -> DenseLayer:
    path = folder / "config.json"
    table = _read(path, dict)
    if table.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(
            f'{path}: module_input_name: expected "sentence_embedding", '
            f"got {shown(table['module_input_name'])}"
        )
    if table.get("module_output_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(
            f'{path}: module_output_name: expected "sentence_embedding", '
            f"got {shown(table['module_output_name'])}"
        )
    activation = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{path}: activation_function: expected one of {', '.join(ACTIVATIONS)} of torch.nn, "
            f"got {shown(activation)}"
        )
    sizes = [_field(table, name, path) for name in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{path}: in_features and out_features: expected sizes, got {sizes}")
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"{folder}: expected the weights of the layer in model.safetensors")
    return DenseLayer(folder, activation, sizes[0], sizes[1], bool(table.get("bias", True)))


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / _SETTINGS
    if not path.is_file():
        return {}, None
    table = _read(path, dict)
    prompts, default = table.get("prompts") or {}, table.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in prompts.values()):
        raise ModelError(f"{path}: prompts: expected texts by name, got {shown(prompts)}")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name: expected one of {', '.join(prompts) or 'none'}, "
            f"got {shown(default)}"
        )
    return prompts, default


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise ModelError(f"{path}: expected a {kind.__name__}, got {shown(content)}")
    return content


def _field(table: Any, name: str, path: Path) -> Any:
    if not isinstance(table, dict) or name not in table:
        raise ModelError(f"{path}: {name}: is missing in {shown(table)}")
    return table[name]
