"""GGUF files of llama.cpp, presented as Hugging Face configs and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightFormat, WeightLoader
from hardpoint.plugins.parallel import Cut, needed_part
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, model_config, short, token_ids

from .files import fingerprint, refuse_missing
from .gguf_architectures import (
    ARCHITECTURES,
    BLOCK,
    EMBEDDING,
    HEAD,
    MAY_BE_ZERO,
    MOST_EXPERTS,
    NEUTRAL,
    REQUIRED,
    SIGMOID_GATING,
    Architecture,
    architecture_of,
)
from .gguf_file import GGUFFile, open_gguf
from .gguf_tensors import DTYPES, StoredTensor, stored_tensor

_ENCODER = "clip"  # written separately by llama.cpp's converter, as mmproj-*.gguf
_ROPE_FACTORS = "rope_freqs.weight"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 1000
_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"}
    | {"<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|user|>"}
    | {"<|observation|>"}
)
"""Tokens that end a turn or a text, found by their kind: metadata often lacks them."""
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class GGUFLoader(WeightLoader):
    """Reads models of the architectures in `ARCHITECTURES`, quantized or not."""

    contract = 1

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the path ends in .gguf."""
        return files.path.suffix == ".gguf"

    @cached_property
    def _file(self) -> GGUFFile:
        return open_gguf(self.context.files.path)

    @property
    def _source(self) -> str:
        return self.context.files.path.name

    def architecture(self) -> str:
        """Return the Hugging Face name of the architecture in the metadata."""
        return self._architecture.name

    def config(self) -> ModelConfig:
        """Return the configuration in the file's metadata.

        Raises:
            ModelError: the file is damaged, its architecture is not supported, or a field that the
                architecture needs is missing.
        """
        architecture, tensors = self._architecture, self._tensors
        if EMBEDDING not in tensors:
            raise ModelError(f"{self._source}: the tensor {EMBEDDING} is missing")
        hf: dict[str, Any] = {
            "architectures": [architecture.name],
            "model_type": self._name,
            "vocab_size": tensors[EMBEDDING].shape[0],
            "hidden_act": "silu",
            "tie_word_embeddings": HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
            "kv_b_by_head": "blk.0.attn_k_b.weight" in tensors,
        }
        hf |= self._fields()
        self._refuse_changes(hf["head_dim"])
        hf["use_sliding_window"] = "sliding_window" in hf
        hf |= architecture.derive(hf)
        hf["rope_parameters"] = self._rope(hf["head_dim"])
        return model_config(hf, self._source, eos_token_ids=self._eos(), dtype=self._dtype())

    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the weights in `shapes` in file order: blocks that a scheme reads, else float32.

        Raises:
            ModelError: a tensor's quantization is unknown.
        """
        return self.cut_weights(shapes, {})

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the same weights, of cut weights only the needed part.

        No more is read than the blocks that the part touches, and of permuted matrices the heads.
        Of blocks that the part divides, the whole rows are yielded.

        Raises:
            ModelError: a tensor's quantization is unknown, or a weight to be cut has another shape.
        """
        hf = self.config().hf
        heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
        permuted = heads if self._architecture.is_permuted else {}
        for name, tensor in self._stored(shapes):
            cut = needed_part(name, tensor.shape, shapes, cuts)
            count = permuted.get(name.split(".")[-2])
            if count is not None and tensor.shape[0] % (2 * count):
                raise ModelError(
                    f"{tensor.label}: expected rows of {count} heads of an even size, got "
                    f"{tensor.shape[0]} rows"
                )
            weight = tensor.read(cut, None if count is None else tensor.shape[0] // count)
            if isinstance(weight, torch.Tensor):
                weight = self._architecture.restore(name, weight)
            yield name, weight
            # Loaded by now: else the whole file would stay in memory next to the model.
            for file in self._parts:
                file.give_back(tensor.data)

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightFormat]:
        """Return how the file stores the weights in `shapes`: as a scheme or dtype, else as ggml's.

        Raises:
            ModelError: the architecture is not supported, or a weight is missing.
        """
        formats = {name: tensor.format for name, tensor in self._stored(shapes)}
        refuse_missing(self.context.files, (name for name in shapes if name not in formats))
        return formats

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:
        """Return the hash of the file, or of its parts.

        Raises:
            ModelError: it is another file than the opened one, which has the weights of the model.
        """
        hashes = " ".join(map(hash_file, self._paths))
        if self.fingerprint() is None:
            raise ModelError(f"{self._source}: the file was replaced after it was opened")
        return hashes

    def fingerprint(self) -> str | None:
        """Return names, sizes and times of the parts; None if one is another than was opened."""
        current = [fingerprint([path]) for path in self._paths]
        if current != [part.fingerprint for part in self._parts]:
            return None
        return fingerprint(self._paths)

    def close(self) -> None:
        """Release the files, which are mapped as long as a tensor of them is used."""
        for name in ("_file", "_parts", "_tensors"):
            vars(self).pop(name, None)

    @cached_property
    def _paths(self) -> list[Path]:
        """The file, and the further parts of a split file.

        Raises:
            ModelError: it is not the first part, or its name has another form.
        """
        path, count = self.context.files.path, self._file.scalar("split.count", int) or 1
        if count == 1:
            return [path]
        match, number = _PART.fullmatch(path.name), self._file.scalar("split.no", int)
        if not match or number or count > _MOST_PARTS or (match[2], match[3]) != _of(1, count):
            first, of = _of(1, count)
            raise ModelError(
                f"{self._source}: split.count: it is part {1 + (number or 0)} of {count}; expected "
                f"the first one, with the name NAME-{first}-of-{of}.gguf, and the others next to it"
            )
        return [
            path.with_name(f"{match[1]}-{part}-of-{of}.gguf")
            for part, of in (_of(number, count) for number in range(1, count + 1))
        ]

    @cached_property
    def _parts(self) -> list[GGUFFile]:
        return [self._file, *map(open_gguf, self._paths[1:])]

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        parts = zip(self._paths, self._parts, strict=True)
        return {
            tensor.name: stored_tensor(tensor, path.name)
            for path, part in parts
            for tensor in part.tensors
        }

    @cached_property
    def _name(self) -> str:
        name = self._parts[0].scalar("general.architecture", str)
        if name == _ENCODER:
            raise ModelError(
                f"{self._source}: general.architecture: {short(name)} is the encoder of images of "
                f"another file's model; expected that file, which is read as a model of text alone"
            )
        if name not in ARCHITECTURES:
            raise ModelError(
                f"{self._source}: general.architecture: {short(name)} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}. A plugin of the kind loaders adds "
                f"one: docs/write-a-model.md"
            )
        return str(name)

    @cached_property
    def _architecture(self) -> Architecture:
        experts = self._file.scalar(f"{self._name}.expert_count", int)
        window = self._file.scalar(f"{self._name}.attention.sliding_window", int)
        gating = self._file.scalar(f"{self._name}.expert_gating_func", int)
        architecture = architecture_of(
            self._name, bool(experts), bool(window), by_sigmoid=gating == SIGMOID_GATING
        )
        if experts and "expert_count" not in architecture.fields:
            raise ModelError(
                f"{self._source}: {self._name}.expert_count: mixtures of experts are not "
                f"supported, got {experts}"
            )
        return architecture

    def _refuse_changes(self, head_size: int) -> None:
        neutral = {**NEUTRAL, "attention.value_length": (head_size,), **self._architecture.neutral}
        if (
            _LONG_FACTORS in self._tensors and _SHORT_FACTORS in self._tensors
        ):  # with which it is read
            del neutral["rope.scaling.attn_factor"]
        known = self._architecture.all_fields()
        for key, values in neutral.items():
            value = self._file.value(f"{self._name}.{key}")
            if key not in known and value is not None and value not in values:
                expected = " or ".join(map(str, values))
                raise ModelError(
                    f"{self._source}: {self._name}.{key}: expected {expected}, which "
                    f"{self._architecture.name} computes, got {short(value)}"
                )

    def _stored(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, StoredTensor]]:
        for stored, tensor in self._tensors.items():
            name = self._architecture.hf_name(stored)
            if name is None:
                continue
            parts = {name: tensor}
            if "*" in name:  # a matrix per expert, or per head
                is_expert = ".experts." in name
                self._check_stack(tensor, "expert_count" if is_expert else "attention.head_count")
                parts = {name.replace("*", str(i)): m for i, m in enumerate(tensor.split())}
            for stored_name, part in parts.items():
                if stored_name in shapes:
                    is_row = (
                        len(part.shape) == 1 and len(shapes[stored_name]) == 2
                    )  # stored as a vector
                    yield stored_name, part.as_matrix() if is_row else part

    def _check_stack(self, tensor: StoredTensor, key: str) -> None:
        """Check the shape of a tensor of all experts or heads of a block, of matrices or of biases.

        Args:
            key: name of their number in the metadata.

        Raises:
            ModelError: it has another number of dimensions, or of them.
        """
        count = self._file.scalar(f"{self._name}.{key}", int)
        dimensions = ["rows"] if tensor.label.endswith(".bias") else ["rows", "columns"]
        if len(tensor.shape) != 1 + len(dimensions) or tensor.shape[0] != count:
            raise ModelError(
                f"{tensor.label}: expected [{count}, {', '.join(dimensions)}] "
                f"({self._name}.{key} first), got {list(tensor.shape)}"
            )

    def _fields(self) -> dict[str, Any]:
        """Return the config's fields from metadata, and fields derived from them.

        Fields are checked if invalid values would silently give a different model.
        """
        fields, prefix = dict[str, Any](), f"{self._source}: {self._name}"
        for key, (name, kind) in self._architecture.all_fields().items():
            value = self._file.scalar(f"{self._name}.{key}", kind)
            if name == "sliding_window" and value == 0:  # as converters of Phi-3 write "none"
                value = None
            if value is None and key in REQUIRED:
                raise ModelError(f"{prefix}.{key}: missing")
            if value is None:
                continue
            fields[name] = value
            if kind is int and (value or key not in MAY_BE_ZERO):
                limits = {"at_most": MOST_EXPERTS} if key == "expert_count" else {}
                ConfigFields({key: value}, prefix).whole(key, **limits)
        heads = fields["num_attention_heads"]
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("head_dim", max(fields["hidden_size"] // heads, 1))
        blocks = {match[1] for name in self._tensors if (match := BLOCK.fullmatch(name))}
        if fields["num_hidden_layers"] > len(blocks):
            raise ModelError(
                f"{prefix}.block_count: expected {len(blocks)}, the number of blocks that have "
                f"tensors, got {fields['num_hidden_layers']}"
            )
        return fields

    def _rope(self, head_size: int) -> dict[str, Any]:
        """Return Hugging Face's `rope_parameters`."""
        prefix = f"{self._name}.rope"
        theta = self._positive(f"{prefix}.freq_base") or 10000.0
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        rope |= self._partial_rotation(head_size) | self._rope_scaling()
        if (window_theta := self._architecture.window_theta) is None:
            return rope
        stated = self._positive(f"{prefix}.freq_base_swa") or window_theta or theta
        window = {"rope_type": "default", "rope_theta": stated}
        return {"full_attention": rope, "sliding_attention": window}

    def _positive(self, key: str) -> float | None:
        """Return a metadata field that is a number above 0; None if it is missing.

        Raises:
            ModelError: it is something else.
        """
        value = self._file.scalar(key, float)
        return None if value is None else ConfigFields({}, self._source).positive(key, value)

    def _partial_rotation(self, head_size: int) -> dict[str, Any]:
        key = f"{self._name}.rope.dimension_count"
        rotated = self._file.scalar(key, int)
        if rotated in (None, head_size):
            return {}
        if not self._architecture.rotates_part or not 0 < rotated < head_size:
            raise ModelError(
                f"{self._source}: {key}: expected the head size {head_size} (whole heads are "
                f"rotated), got {rotated}"
            )
        return {"partial_rotary_factor": rotated / head_size}

    def _rope_scaling(self) -> dict[str, Any]:
        # Llama 3's scaling is stored as one divisor per frequency: the type "factors".
        prefix, file, tensors = f"{self._name}.rope.scaling", self._file, self._tensors
        original = file.scalar(f"{prefix}.original_context_length", int)
        context = {"original_max_position_embeddings": original} if original else {}
        if _ROPE_FACTORS in tensors:
            factors = tensors[_ROPE_FACTORS].numbers().tolist()
            return {"rope_type": "factors", "factors": factors}
        if _LONG_FACTORS in tensors and _SHORT_FACTORS in tensors:
            return {
                "rope_type": "longrope",
                "long_factor": tensors[_LONG_FACTORS].numbers().tolist(),
                "short_factor": tensors[_SHORT_FACTORS].numbers().tolist(),
                "attention_factor": self._positive(f"{prefix}.attn_factor"),
                **context,
            }
        kind = file.scalar(f"{prefix}.type", str)
        if kind == "none":
            return {}
        factor = self._positive(f"{prefix}.factor")
        if not kind and factor is None:
            return {}
        kind = kind or "linear"
        if kind not in ("linear", "yarn"):
            raise ModelError(
                f"{self._source}: {prefix}.type: expected none, linear or yarn, got {short(kind)}"
            )
        if factor is None:
            raise ModelError(f"{self._source}: {prefix}.factor: missing, {kind} has one")
        return {"rope_type": kind, "factor": factor, **context, **self._yarn(prefix, kind)}

    def _yarn(self, prefix: str, kind: str) -> dict[str, Any]:
        values = {
            name: self._positive(f"{prefix}.yarn_{name}") for name in ("beta_fast", "beta_slow")
        }
        if multiplier := self._file.scalar(f"{prefix}.yarn_log_multiplier", float):
            # Converters multiply it by 0.1, and leave out the factor of cosines, which is the same.
            values["mscale"] = values["mscale_all_dim"] = multiplier / 0.1
        if kind != "yarn":
            return {}
        stated = {name: value for name, value in values.items() if value is not None}
        return {**self._architecture.yarn, **stated}

    def _eos(self) -> list[int]:
        """Return the tokens that end an answer: first from metadata, then by text."""
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ids = [i for key in keys for i in token_ids(self._file.value(key), key, self._source)]
        texts = self._file.strings("tokenizer.ggml.tokens")
        # In harmony, as of gpt-oss, a message ends with <|end|>, and an answer has several.
        ends = _ENDS - {"<|end|>"} if "<|return|>" in texts else _ENDS
        rows = self._tensors[EMBEDDING].shape[0]
        ids += [number for number, text in enumerate(texts[:rows]) if text in ends]
        return list(dict.fromkeys(ids))

    def _dtype(self) -> str | None:
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.shape) > 1}
        return DTYPES.get(kinds.pop()) if len(kinds) == 1 else None


def _of(number: int, count: int) -> tuple[str, str]:
    """Return the number of a part and the number of all parts, from a file name."""
    return f"{number:05}", f"{count:05}"
