"""GGUF files of llama.cpp, presented as Hugging Face configs and weights."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightLoader
from hardpoint.plugins.hf_config import (
    ConfigFields,
    model_config,
    short,
    token_ids,
)
from hardpoint.plugins.parallel import Cut, needed_part
from hardpoint.plugins.quantization import QuantizedWeight

from .files import fingerprint, refusing_damage
from .gguf_file import GGUFFile, open_gguf

_ROW_BYTES = 1 << 13

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}
_REQUIRED = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "context_length",
)
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SCHEMES = {
    gguf.GGMLQuantizationType.Q4_0: "q4_0",
    gguf.GGMLQuantizationType.Q4_1: "q4_1",
    gguf.GGMLQuantizationType.Q8_0: "q8_0",
}
"""The schemes that read blocks; those of other types are dequantised here."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFLoader(WeightLoader):
    """Reads Llama, Qwen2 and Qwen3 models, quantised or not."""

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
        return _ARCHITECTURES[self._architecture()]

    def config(self) -> ModelConfig:
        """Return the configuration in the file's metadata.

        Raises:
            ModelError: the file is damaged, its architecture is not supported, or a field that the
                architecture needs is missing.
        """
        file, architecture = self._file, self._architecture()
        tensors = {tensor.name: tensor for tensor in file.tensors}
        if _EMBEDDING not in tensors:
            raise ModelError(f"{self._source}: the tensor {_EMBEDDING} is missing")
        hf: dict[str, Any] = {
            "architectures": [self.architecture()],
            "model_type": architecture,
            "vocab_size": int(tensors[_EMBEDDING].shape[-1]),
            "hidden_act": "silu",
            "tie_word_embeddings": _HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        }
        for key, name in _FIELDS.items():
            kind = float if name == "rms_norm_eps" else int
            value = file.scalar(f"{architecture}.{key}", kind)
            if value is None and key in _REQUIRED:
                raise ModelError(f"{self._source}: {architecture}.{key}: missing")
            if value is not None:
                hf[name] = value
        if "sliding_window" in hf:
            hf["use_sliding_window"] = True
        self._check(hf, architecture)
        hf["rope_parameters"] = self._rope(architecture)
        return model_config(hf, self._source, eos_token_ids=self._eos(), dtype=self._dtype())

    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the weights in `shapes` in file order: blocks that a scheme reads, else float32.

        Raises:
            ModelError: a tensor's quantisation is unknown.
        """
        return self.cut_weights(shapes, {})

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the same, of those in `cuts` the part that is needed.

        No more is read than the blocks that the part touches, and of permuted matrices the heads.
        Of blocks that the part divides, the whole rows are yielded.

        Raises:
            ModelError: a tensor's quantisation is unknown, or a weight to be cut has another shape.
        """
        hf = self.config().hf
        permuted = {"q_proj": hf["num_attention_heads"]}
        permuted["k_proj"] = hf.get("num_key_value_heads", permuted["q_proj"])
        for tensor in self._file.tensors:
            name = _hf_name(tensor.name)
            if name is None or name not in shapes:
                continue
            shape = tuple(int(size) for size in reversed(tensor.shape))
            cut = needed_part(name, shape, shapes, cuts)
            heads = permuted.get(name.split(".")[-2])
            if heads is None or hf["model_type"] != "llama":
                yield name, self._read_parts(tensor, cut, None)
                continue
            if shape[0] % (2 * heads):
                raise ModelError(
                    f"{self._source}: tensor {tensor.name}: expected rows of {heads} heads of "
                    f"an even size, got {shape[0]} rows"
                )
            yield name, self._read_parts(tensor, cut, shape[0] // heads)

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:
        """Return the hash of the file.

        Raises:
            ModelError: it is another one than was opened, whose weights are those of the model.
        """
        found = hash_file(self.context.files.path)
        if self.fingerprint() is None:
            raise ModelError(f"{self._source}: the file was replaced after it was opened")
        return found

    def fingerprint(self) -> str | None:
        """Return name, size and times of the file; None if it is another one than was opened."""
        file, current = self._file, fingerprint([self.context.files.path])
        return current if file.fingerprint == current else None

    def _architecture(self) -> str:
        architecture = self._file.scalar("general.architecture", str)
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{self._source}: general.architecture: {short(architecture)} is not supported; "
                f"supported are {', '.join(_ARCHITECTURES)}. A plugin of the kind loaders adds "
                f"one: docs/write-a-model.md"
            )
        return str(architecture)

    def _check(self, hf: dict[str, Any], architecture: str) -> None:
        """Check fields whose invalid values would silently give a different model."""
        fields = ConfigFields(hf, self._source)
        for key, name in _FIELDS.items():
            if name in hf and name != "rms_norm_eps":
                ConfigFields({key: hf[name]}, f"{self._source}: {architecture}").whole(key)
        blocks = {found[1] for t in self._file.tensors if (found := _BLOCK.fullmatch(t.name))}
        if fields.whole("num_hidden_layers") > len(blocks):
            raise ModelError(
                f"{self._source}: {architecture}.block_count: expected {len(blocks)}, the number "
                f"of blocks that have tensors, got {hf['num_hidden_layers']}"
            )
        heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
        head_size = fields.whole("head_dim", max(hidden // heads, 1))
        rotated = self._file.scalar(f"{architecture}.rope.dimension_count", int)
        if rotated not in (None, head_size):
            raise ModelError(
                f"{self._source}: {architecture}.rope.dimension_count: expected the head size "
                f"{head_size} (whole heads are rotated), got {rotated}"
            )
        experts = self._file.scalar(f"{architecture}.expert_count", int)
        if experts:
            raise ModelError(
                f"{self._source}: {architecture}.expert_count: mixtures of experts are not "
                f"supported, got {experts}"
            )

    def _rope(self, architecture: str) -> dict[str, Any]:
        """Return Hugging Face's `rope_parameters`."""
        # Llama 3's scaling is stored as one divisor per frequency: the type "factors".
        prefix = f"{architecture}.rope"
        rope: dict[str, Any] = {"rope_type": "default"}
        theta = self._file.scalar(f"{prefix}.freq_base", float)
        rope["rope_theta"] = 10000.0 if theta is None else theta
        factors = [tensor for tensor in self._file.tensors if tensor.name == _ROPE_FACTORS]
        if factors:
            return rope | {"rope_type": "factors", "factors": self._dequantize(factors[0]).tolist()}
        scaling = self._file.scalar(f"{prefix}.scaling.type", str) or "none"
        if scaling == "none":
            return rope
        if scaling not in ("linear", "yarn"):
            raise ModelError(
                f"{self._source}: {prefix}.scaling.type: expected none, linear or yarn, "
                f"got {short(scaling)}"
            )
        rope |= {
            "rope_type": scaling,
            "factor": self._file.scalar(f"{prefix}.scaling.factor", float),
        }
        if original := self._file.scalar(f"{prefix}.scaling.original_context_length", int):
            rope["original_max_position_embeddings"] = original
        return rope

    def _eos(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [i for key in keys for i in token_ids(self._file.value(key), key, self._source)]
        return list(dict.fromkeys(found))

    def _dtype(self) -> str | None:
        types = {tensor.tensor_type.name for tensor in self._file.tensors if len(tensor.shape) > 1}
        return _DTYPES.get(types.pop()) if len(types) == 1 else None

    def _read_parts(
        self, tensor: gguf.ReaderTensor, cut: Cut | None, head_size: int | None
    ) -> torch.Tensor | QuantizedWeight:
        """Return what `_read` does, also of cuts of several parts."""
        if cut is None or not cut.more:
            return self._read(tensor, cut, head_size)
        found = [self._read(tensor, part, head_size) for part in cut.parts]
        tensors = [part for part in found if isinstance(part, torch.Tensor)]
        if len(tensors) == len(found):
            return torch.cat(tensors, cut.dim)
        if cut.dim:  # columns, of blocks that they may divide
            return self._read(tensor, None, head_size)
        blocks = [part for part in found if isinstance(part, QuantizedWeight)]
        rows = torch.cat([part.tensors["blocks"] for part in blocks])
        return replace(blocks[0], shape=(len(rows), blocks[0].shape[1]), tensors={"blocks": rows})

    def _read(
        self, tensor: gguf.ReaderTensor, cut: Cut | None, head_size: int | None
    ) -> torch.Tensor | QuantizedWeight:
        """Return a tensor or a part of it: blocks that a scheme reads, else float32.

        Args:
            tensor: of the file.
            cut: the part; None is all.
            head_size: of q or k, whose rows llama.cpp has permuted within each head.
        """
        needed = cut
        if cut is not None and not cut.dim and head_size is not None:  # whole heads
            last = -(-cut.stop // head_size) * head_size
            cut = Cut(0, cut.start // head_size * head_size, last)
        scheme = _SCHEMES.get(tensor.tensor_type) if len(tensor.shape) == 2 else None
        if scheme is None:
            rows = self._dequantize(tensor, cut)
        else:
            rows = self._blocks(tensor, cut)
        if head_size is not None:
            rows = _unpermute(rows, head_size)
        if cut is not None and needed is not None and not cut.dim:
            rows = rows[needed.start - cut.start : needed.stop - cut.start]
        if scheme is None:
            return rows
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        return QuantizedWeight(scheme, (len(rows), rows.shape[1] // size * block), {"blocks": rows})

    def _blocks(self, tensor: gguf.ReaderTensor, cut: Cut | None) -> torch.Tensor:
        """Return the blocks of a matrix as bytes, uint8 [rows, bytes].

        Of a cut of columns that divides blocks, the whole rows.
        """
        data = np.asarray(tensor.data)  # slicing the memory map itself is slow
        if cut is not None:
            block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            if not cut.dim:
                data = cut.of(data)
            elif not (cut.start % block or cut.stop % block):
                data = data[:, cut.start // block * size : cut.stop // block * size]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of read-only memory
            return torch.from_numpy(data)

    def _dequantize(self, tensor: gguf.ReaderTensor, cut: Cut | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, in float32."""
        data = np.asarray(tensor.data)  # slicing the memory map itself is slow
        if cut is None:
            return self._dequantize_all(tensor, data)
        if cut.start == cut.stop:
            return torch.empty(cut.shape([int(size) for size in reversed(tensor.shape)]))
        if cut.dim < data.ndim - 1:
            return self._dequantize_all(tensor, cut.of(data))
        # Rows consist of blocks, those of plain numbers of one each.
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        width = size // data.itemsize
        first, last = cut.start // block, -(-cut.stop // block)
        part = np.ascontiguousarray(data[..., first * width : last * width])
        start = cut.start - first * block
        found = self._dequantize_all(tensor, part)
        return found[..., start : start + cut.stop - cut.start]

    def _dequantize_all(
        self, tensor: gguf.ReaderTensor, data: np.ndarray[Any, Any]
    ) -> torch.Tensor:
        """Return the numbers of a tensor's blocks."""
        with refusing_damage(f"{self._source}: tensor {tensor.name}"):
            array = gguf.quants.dequantize(_with_long_rows(data), tensor.tensor_type)
            own = array.flags.writeable and array.base is None
            flat = torch.from_numpy(array if own else array.copy())
        return flat.reshape(*data.shape[:-1], -1)


def _with_long_rows(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reshape quantised blocks into fewer, longer rows."""
    # The library dequantises 16 rows at a time.
    if data.ndim == 1 or data.dtype != np.uint8:
        return data
    count, width = math.prod(data.shape[:-1]), data.shape[-1]
    merged = 1
    while count % (2 * merged) == 0 and 2 * merged * width <= _ROW_BYTES:
        merged *= 2
    return data.reshape(count // merged, merged * width)


def _hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor; None if it has none."""
    if match := _BLOCK.fullmatch(name):
        inner = _BLOCK_NAMES.get(match[2])
        return inner and f"model.layers.{match[1]}.{inner}.{match[3]}"
    return _NAMES.get(name)


def _unpermute(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Undo llama.cpp's permutation of the rows of heads of q and k, in weights and biases."""
    # The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, which interleaves
    # the two halves of each head for its kind of RoPE.
    pairs = weight.reshape(len(weight) // head_size, head_size // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
