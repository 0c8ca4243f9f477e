"""Reads adapters as PEFT writes them, and cuts them to the matrices of a rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from hardpoint.errors import shown
from hardpoint.plugins import ModelError

from .identity import CONFIG, TENSORS, content_hash, read_files
from .patterns import ModulePatterns

if TYPE_CHECKING:
    from hardpoint.plugins.model.forward import LinearMatrix


_LONGEST_NAME = 512
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS = {"", "model", "language_model", "text_model"}
"""Parts of names by which classes of transformers with and without images differ."""
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_out")

_OFF: Mapping[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA's magnitudes"),
    "use_qalora": (False, "QA-LoRA's pooling"),
    "lora_bias": (False, "biases of adapters"),
    "bias": ("none", "trained biases"),
    "modules_to_save": (None, "whole modules"),
    "trainable_token_indices": (None, "trained tokens"),
    "target_parameters": (None, "adapters of parameters, such as experts"),
    "layer_replication": (None, "repeated layers"),
    "alora_invocation_tokens": (None, "activated LoRA"),
    "arrow_config": (None, "routed adapters"),
    "use_bdlora": (None, "block-diagonal LoRA"),
}
"""Fields that change the computation, with the neutral value, and the name of the feature."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

_INERT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "merge_weights", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
"""Fields that describe the base model or the training, or that other ones decide over."""

_KEEPS_BASE = ("none", "true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Initializations with adapters that belong to the base model as it is published."""


_LARGEST = torch.finfo(torch.float32).max


class _Fields(msgspec.Struct):
    """The fields of `adapter_config.json` that describe its matrices.

    `fan_in_fan_out` is of the base model's weights: lora_A and lora_B have the same form with it.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class _Sizes:
    """The ranks and scales of modules."""

    fields: _Fields
    ranks: ModulePatterns[int]
    alphas: ModulePatterns[float]

    def rank(self, module: str) -> int:
        return self.ranks.value_of(module, self.fields.r)

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), self.alphas.value_of(module, self.fields.lora_alpha)
        return alpha / (math.sqrt(rank) if self.fields.use_rslora else rank)


@dataclass(frozen=True)
class LowRankUpdate:
    """The change of one matrix W: scale * B A.

    Attributes:
        a: [rank, columns of W].
        b: [rows of W, rank].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as its files have it, whole, in their dtype.

    Attributes:
        content: SHA-256 of both files.
        changes: by the name of the module.
    """

    content: str
    changes: Mapping[str, LowRankUpdate]


def read_adapter(path: str, max_rank: int) -> AdapterFiles:
    """Read an adapter.

    Raises:
        ModelError: a file is missing, broken or too large, or has unsupported content; names
            file, field or module, and value.
    """
    raw, data = read_files(path)
    sizes = _checked_sizes(Path(path) / CONFIG, raw)
    file = Path(path) / TENSORS
    changes = _changes(file, _tensors(file, data), sizes, max_rank)
    return AdapterFiles(content_hash(raw, data), changes)


def _checked_sizes(file: Path, raw: bytes) -> _Sizes:
    """Return the ranks and scales that a configuration states.

    Raises:
        ModelError: a field is wrong, or unsupported.
    """
    try:
        config = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: expected a JSON object: {error}") from None
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f'{file}: peft_type: expected "LORA", got {shown(kind)}')
    _check_off(file, config)
    try:
        fields = msgspec.convert(config, _Fields)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}") from None
    _check_numbers(file, fields)
    ranks = _patterns(file, "rank_pattern", fields.rank_pattern)
    return _Sizes(fields, ranks, _patterns(file, "alpha_pattern", fields.alpha_pattern))


def _check_off(file: Path, config: Mapping[str, Any]) -> None:
    for name, (off, feature) in _OFF.items():
        value = config.get(name, off)
        if value != off and value not in _NOTHING:
            expected = msgspec.json.encode(off).decode()
            raise ModelError(
                f"{file}: {name}: expected {expected}, as {feature} are not supported, got "
                f"{shown(value)}"
            )
    for name in sorted(config.keys() - _OFF - _INERT - set(_Fields.__struct_fields__)):
        if config[name] not in _NOTHING:
            raise ModelError(
                f"{file}: {name}: expected no such field, because its effect is unknown here, "
                f"got {shown(config[name])}"
            )
    how = str(config.get("init_lora_weights")).lower()
    if how not in _KEEPS_BASE:
        raise ModelError(
            f"{file}: init_lora_weights: {how[:80]!r} may change weights of the base model; "
            f"expected an adapter that was converted, as PEFT's save_pretrained does with "
            f"path_initial_model_for_weight_conversion"
        )


def _check_numbers(file: Path, fields: _Fields) -> None:
    for place, rank in {"r": fields.r, **(fields.rank_pattern or {})}.items():
        if rank < 1:
            raise ModelError(f"{file}: {place}: expected a rank of at least 1, got {rank}")
    for place, alpha in {"lora_alpha": fields.lora_alpha, **(fields.alpha_pattern or {})}.items():
        if not math.isfinite(alpha):
            raise ModelError(f"{file}: {place}: expected a finite number, got {alpha}")


def _patterns(file: Path, field: str, values: Mapping[str, Any] | None) -> ModulePatterns[Any]:
    try:
        return ModulePatterns(values or {})
    except ValueError as error:
        raise ModelError(f"{file}: {field}: {error}") from None


def _tensors(file: Path, data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError  # noqa: PLC0415 - no need of the core distribution
    from safetensors.torch import load  # noqa: PLC0415

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ModelError(f"{file}: expected a safetensors file: {error}") from None


def _changes(
    file: Path, tensors: Mapping[str, torch.Tensor], sizes: _Sizes, max_rank: int
) -> dict[str, LowRankUpdate]:
    """Return the changes of modules.

    Raises:
        ModelError: a tensor is not as the configuration states.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not name.startswith(_PREFIX) or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"{file}: {name[:_LONGEST_NAME]}: expected tensors {_PREFIX}MODULE.lora_A.weight "
                f"and MODULE.lora_B.weight alone, of at most {_LONGEST_NAME} characters"
            )
        if halves.setdefault(match[1], {}).setdefault(match[2], tensor) is not tensor:
            raise ModelError(f"{file}: {name}: expected one lora_{match[2]} of {match[1]}, got two")
    if not halves:
        raise ModelError(f"{file}: expected tensors of at least one module, got none")
    return {
        module: _change(file, module, module_halves, sizes, max_rank)
        for module, module_halves in halves.items()
    }


def _change(
    file: Path, module: str, halves: Mapping[str, torch.Tensor], sizes: _Sizes, max_rank: int
) -> LowRankUpdate:
    where = f"{file}: {module}"
    if module.rpartition(".")[2] in _EMBEDDINGS:
        raise ModelError(f"{where}: adapters of embeddings and of the head are not supported")
    for half, other in (("A", "B"), ("B", "A")):
        if half not in halves:
            raise ModelError(f"{where}: expected lora_{half}, as there is lora_{other}")
    a, b = halves["A"], halves["B"]
    rank = sizes.rank(module)
    for name, tensor in (("lora_A", a), ("lora_B", b)):
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise ModelError(
                f"{where}.{name}: expected a matrix of floating-point numbers of at least 16 bits, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{where}.{name}: expected finite numbers, got NaN or infinity")
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelError(
            f"{where}: expected rank {rank}, as {CONFIG} has it, got lora_A {list(a.shape)} and "
            f"lora_B {list(b.shape)}"
        )
    if rank > max_rank:
        raise ModelError(
            f"{where}: expected a rank of at most {max_rank}, adapters.max_lora_rank, got {rank}"
        )
    scale = sizes.scale(module)
    largest = abs(scale) * float(a.abs().max()) * float(b.abs().max()) * rank
    if not largest <= _LARGEST or not abs(scale) <= _LARGEST:
        raise ModelError(
            f"{where}: expected finite products in float32, got lora_alpha / r of {scale:g}"
        )
    return LowRankUpdate(a, b, scale)


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in CPU memory.

    Attributes:
        content: hash of its files.
        changes: by the name that `LinearProducts.linear` gets for a matrix of this rank.
        unknown: modules for which this rank has no matrix.
    """

    content: str
    changes: Mapping[str, LowRankUpdate]
    unknown: list[str]

    @property
    def rank(self) -> int:
        """The largest rank of its changes."""
        return max((len(change.a) for change in self.changes.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return sum(c.a.nbytes + c.b.nbytes for c in self.changes.values())


def load_adapter(
    path: str, max_rank: int, matrices: Mapping[str, LinearMatrix], dtype: torch.dtype
) -> HostAdapter:
    """Read an adapter, and cut it to the matrices of this rank.

    Raises:
        ModelError: see `read_adapter`; a matrix has another shape than the model's, or two modules
            are the same one.
    """
    files = read_adapter(path, max_rank)
    places: dict[str, list[str]] = {}
    for name, matrix in matrices.items():
        places.setdefault(matrix.stored_as, []).append(name)
    layers = _layers(places)
    changes: dict[str, LowRankUpdate] = {}
    modules: dict[str, str] = {}
    unknown: list[str] = []
    for module, change in files.changes.items():
        layer = module if module in places else layers.get(_in_text_model(module))
        if layer is None:
            unknown.append(module)
            continue
        if (other := modules.setdefault(layer, module)) != module:
            raise ModelError(
                f"{path}/{TENSORS}: {module}: expected one change of each layer, got {other} too"
            )
        for name in places[layer]:
            changes[name] = _cut(f"{path}/{TENSORS}: {module}", change, matrices[name], dtype)
    return HostAdapter(files.content, changes, sorted(unknown))


def _layers(names: Iterable[str]) -> dict[str, str]:
    """Return layers by their names without prefixes of the text model; no ambiguous ones."""
    listed: dict[str, list[str]] = {}
    for name in names:
        listed.setdefault(_in_text_model(name), []).append(name)
    return {short: names[0] for short, names in listed.items() if len(names) == 1}


def _in_text_model(module: str) -> str:
    """Return the name of a module from `layers.` on, if only a wrapper of a text model precedes it.

    Towers of images and sound have layers of the same names, and stay apart.
    """
    before, marker, after = module.partition("layers.")
    wraps = marker and set(before.split(".")) <= _WRAPPERS
    return marker + after if wraps else module


def _cut(
    where: str, change: LowRankUpdate, matrix: LinearMatrix, dtype: torch.dtype
) -> LowRankUpdate:
    rows, columns = matrix.shape
    got = (change.b.shape[0], change.a.shape[1])
    if got != (rows, columns):
        raise ModelError(
            f"{where}: expected lora_A of {columns} columns and lora_B of {rows} rows, as the "
            f"model's matrix is [{rows}, {columns}], got {got[1]} and {got[0]}"
        )
    own_rows, own_columns = matrix.rows, matrix.columns
    a = change.a[:, own_columns.start : own_columns.stop].to(dtype, copy=True).contiguous()
    b = change.b[own_rows.start : own_rows.stop].to(dtype, copy=True).contiguous()
    for name, tensor in (("lora_A", a), ("lora_B", b)):
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{where}.{name}: expected numbers that {dtype} holds, got larger ones"
            )
    return LowRankUpdate(a, b, change.scale)
