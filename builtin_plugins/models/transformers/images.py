"""Images of vision-language models through transformers: their processor, and their tower."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hardpoint.plugins import ModelConfig, ModelContext, ModelError, ModelFiles
from hardpoint.plugins.requests import MediaFormat
from hardpoint.toolkit.hf_config import ConfigFields
from hardpoint.toolkit.layers import PackedLayer

from . import image_program
from .building import body, build_whole, text_part
from .layers import Plain
from .names import StoredNames

FAMILIES = ("idefics3", "internvl", "llava", "smolvlm")
"""Values of `model_type` of models with image tokens of one axis, embedded by a tower."""

_VERSION = 1  # of the tokens and arrays of an image
_MAX_ITEM_BYTES = 1 << 28
_PROGRAM_BYTES = 8 << 30
_TOWER_BYTES = 1 << 30  # for one image, at most
_TOKENS = 1 << 16  # at most; the length of a sequence limits them, too
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer.json")

Item = np.ndarray[Any, np.dtype[np.uint8]]


class ProcessorImages(MediaFormat):
    """Images as the processor of a checkpoint expands its placeholder."""

    begin_ids = ()
    end_ids = ()
    item_shape = (-1,)
    max_item_bytes = _MAX_ITEM_BYTES
    processor_bytes = _PROGRAM_BYTES
    encode_bytes = _TOWER_BYTES

    def __init__(self, config: ModelConfig, files: ModelFiles) -> None:
        """Read the image token, and the identity of the processor.

        Raises:
            ModelError: the files of the model have none.
        """
        fields = ConfigFields(config.hf, f"{config.architecture} config")
        name = "image_token_id" if "image_token_id" in config.hf else "image_token_index"
        self.token_id = self.placeholder_id = fields.whole(name, at_least=0)
        self.num_tokens = min(_TOKENS, config.max_position_embeddings)
        self.placeholder = _text_of(self.token_id, files)
        self.processor = image_program.__file__
        folder = str(files.path.resolve())
        self.processor_settings = {"folder": folder, "placeholder": self.placeholder}
        present = [path for path in (files.path / name for name in _FILES) if path.is_file()]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in present]
        self.settings = json.dumps(
            ["transformers", _VERSION, transformers.__version__, self.placeholder, *digests]
        )

    def token_ids(self, item: Item) -> Sequence[int]:
        """Return the tokens of an image, as the processor wrote them.

        Raises:
            ValueError: the item is not a result of the program.
        """
        return ProcessedArrays(item).token_ids


class ProcessedArrays:
    """The result of the program for an image.

    Attributes:
        token_ids: tokens of the image in a prompt.
    """

    def __init__(self, item: Item) -> None:
        """Read the description.

        Raises:
            ValueError: the item is not a result of the program.
        """
        data = item.tobytes()
        try:
            (length,) = image_program.LENGTH.unpack_from(data)
            start = image_program.LENGTH.size
            description = json.loads(data[start : start + length])
            self.token_ids: list[int] = [int(token) for token in description["token_ids"]]
            self._arrays = {
                str(name): (np.dtype(dtype), tuple(map(int, shape)))
                for name, (dtype, shape) in description["arrays"].items()
            }
        except Exception as cause:
            raise ValueError("expected the result of the image program") from cause
        self._numbers = data[start + length :]

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arrays by name.

        Raises:
            ValueError: their numbers are not whole.
        """
        result, start = {}, 0
        for name, (dtype, shape) in self._arrays.items():
            count = math.prod(shape)
            array = np.frombuffer(self._numbers, dtype, count, start).reshape(shape)
            result[name] = torch.from_numpy(array.copy()).to(device)
            start += count * dtype.itemsize
        return result


def _text_of(token_id: int, files: ModelFiles) -> str:
    """Return the text of an added token.

    Raises:
        ModelError: the tokenizer has none of this id.
    """
    path = files.path / "tokenizer.json"
    try:
        added = json.loads(path.read_text()).get("added_tokens", [])
    except (OSError, ValueError, AttributeError) as cause:
        raise ModelError(
            f"{files.path.name}/tokenizer.json: expected a tokenizer with the token of images, "
            f"{token_id}"
        ) from cause
    texts = [str(token["content"]) for token in added if token.get("id") == token_id]
    if not texts:
        raise ModelError(
            f"{files.path.name}/tokenizer.json: added_tokens: expected the token of images, "
            f"{token_id}, got none"
        )
    return texts[0]


def images_of(config: ModelConfig, files: ModelFiles | None) -> ProcessorImages | None:
    """Return the format of images of a model; None if it runs as text.

    Raises:
        ModelError: its files have no token of images.
    """
    if files is None or not has_images(config.hf) or not files.path.is_dir():
        return None
    if not any((files.path / name).is_file() for name in _FILES[:2]):
        return None
    return ProcessorImages(config, files)


def has_images(hf: Mapping[str, Any]) -> bool:
    """Return whether images of a model are read, by its configuration."""
    return hf.get("model_type") in FAMILIES and isinstance(hf.get("vision_config"), Mapping)


class ImageTower:
    """The modules of a model between pixels and embeddings, whole in each rank."""

    def __init__(self, context: ModelContext) -> None:
        """Build the modules without weights.

        Raises:
            ModelError: transformers cannot build them.
        """
        whole = build_whole(context)
        self._context, self._base = context, _without_text(whole)
        self._token_id = int(whole.config.image_token_id)
        tensors = {
            name: tensor
            for name, tensor in whole.state_dict().items()
            if name not in whole.all_tied_weights_keys
        }
        names = StoredNames(whole, tensors)
        if names.converted:
            raise ModelError(
                f"model: {type(whole).__name__}: transformers makes {next(iter(names.converted))} "
                "of several tensors, which towers of images through transformers cannot"
            )
        self._layers = [
            Plain(names.plain[name], tensor, [_place(whole, name)], context.dtype, context, None)
            for name, tensor in tensors.items()
        ]
        self._by_name = {name: layer for layer in self._layers for name in layer.shapes()}
        arguments = inspect.signature(inspect.unwrap(type(self._base).get_image_features))
        self._arguments = frozenset(arguments.parameters)

    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""
        return self._layers

    def has(self, name: str) -> bool:
        """Return whether a tensor of checkpoints is one of the tower."""
        return name in self._by_name

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor."""
        self._by_name[name].load(name, tensor)

    def move_buffers(self) -> None:
        """Move the buffers that no checkpoint has to the device of the model."""
        for module in self._base.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._context.device)

    @torch.inference_mode()
    def embeddings(self, item: torch.Tensor, table: nn.Module) -> torch.Tensor:
        """Return the embeddings of the tokens of an image, [tokens, hidden_size].

        Args:
            item: result of the program.
            table: embeds the other tokens of the image.

        Raises:
            ValueError: the tower gives more or fewer embeddings than tokens.
        """
        processed = ProcessedArrays(item.cpu().numpy())
        device, dtype = self._context.device, self._context.dtype
        arrays = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in processed.tensors(device).items()
            if name in self._arguments
        }
        features = self._base.get_image_features(**arrays).pooler_output
        parts = [features] if isinstance(features, torch.Tensor) else features
        flat = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        ids = torch.tensor(processed.token_ids, device=device)
        places = ids == self._token_id
        if int(places.sum()) != len(flat):
            raise ValueError(
                f"the tower gave {len(flat)} embeddings for {int(places.sum())} tokens of an image"
            )
        embedded: torch.Tensor = table(ids.unsqueeze(0))[0].clone()
        embedded[places] = flat.to(embedded.dtype)
        return embedded


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, attribute = name.rpartition(".")
    return model.get_submodule(parent), attribute


def _without_text(whole: PreTrainedModel) -> Any:
    """Return the body of a model without its text model and head."""
    base, part = body(whole), text_part(whole)
    path = next(path for path, module in base.named_modules() if module is part)
    delattr(base, path.partition(".")[0])
    for child, module in list(whole.named_children()):
        if module is not base:
            delattr(whole, child)
    return base
