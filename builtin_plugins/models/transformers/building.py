"""The modules of transformers for a configuration, built without weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from hardpoint.plugins import ModelContext, ModelError
from hardpoint.toolkit.hf_config import short

ENDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the names of architectures that generate text."""

_STATES = (nn.Conv1d, nn.RNNBase)
"""Modules of decoders that mix tokens besides attention: they have a state per sequence."""


_building = threading.Lock()
"""Held while a model is built, for which transformers changes torch in all threads."""


def has_architecture(name: str) -> bool:
    """Return whether transformers has a class of that name that generates text."""
    return name.endswith(ENDS) and hasattr(transformers, name)


def build(context: ModelContext) -> PreTrainedModel:
    """Return the modules on torch's device "meta", but for buffers that no checkpoint has.

    Of a model with inputs besides text, it has the parts for text alone.

    Raises:
        ModelError: transformers cannot build them, or they are of a kind that cannot run.
    """
    name = context.config.architecture
    if not has_architecture(name):
        raise ModelError(
            f"model: transformers {transformers.__version__} has no {name} that generates text; "
            f"expected a class of it that ends with {' or '.join(ENDS)}. Code of model folders "
            "(auto_map) is never run"
        )
    config = _config(context)
    try:
        with _building, torch.device("meta"), no_init_weights():
            model = getattr(transformers, name)._from_config(
                config, attn_implementation="eager", dtype=context.dtype
            )
    except Exception as cause:
        raise ModelError(
            f"model: transformers {transformers.__version__} cannot build {name} of this "
            f"configuration: {type(cause).__name__}: {str(cause)[:300]}"
        ) from cause
    model.eval()
    _keep_text(model, name)
    _refuse_states(model, name)
    _fill_buffers(model)
    return model


def _config(context: ModelContext) -> Any:
    fields, name = _decoded(context.config.hf), context.config.architecture
    kind = fields.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
    except Exception as cause:
        raise ModelError(
            f"{name} config: model_type: transformers {transformers.__version__} cannot read a "
            f"configuration of {short(kind)}: {str(cause)[:300]}"
        ) from cause
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} config: is_encoder_decoder: expected false, got true: models with an encoder "
            "and a decoder do not run through transformers"
        )
    text = config.get_text_config()
    _refuse_lengths(text, name, context.max_model_len)
    return config


def _decoded(value: Any) -> Any:
    """Return fields with the infinite numbers that transformers writes as tables."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(field) for name, field in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _refuse_lengths(config: Any, name: str, max_model_len: int) -> None:
    """Refuse rotary embeddings that depend on the longest sequence of a step."""
    ropes = getattr(config, "rope_parameters", None) or {}
    several = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    for rope in several or [ropes]:
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = int(original or getattr(config, "max_position_embeddings", None) or 0)
        if kind in ("dynamic", "longrope") and max_model_len > limit:
            raise ModelError(
                f"{name} config: rope_parameters.rope_type: {short(kind)} depends on the longest "
                f"sequence of a step beyond {limit} tokens, expected max_model_len of at most that "
                f"through transformers, got {max_model_len}"
            )


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the modules between tokens and the last hidden states."""
    base = model.base_model
    part = base.get_decoder() if hasattr(base, "get_decoder") else base
    found = part if isinstance(part, PreTrainedModel) else base
    return found


def _keep_text(model: PreTrainedModel, name: str) -> None:
    """Remove the children that text does not need, of a model with other inputs.

    Raises:
        ModelError: its part for text is not found.
    """
    base = model.base_model
    part = text_part(model)
    if base is model or model.get_output_embeddings() is None:
        raise ModelError(f"model: {name} of transformers has no body and head that are apart")
    if part is base:
        return
    path = next(path for path, module in base.named_modules() if module is part)
    first = path.partition(".")[0]
    for child in [child for child, _ in base.named_children() if child != first]:
        delattr(base, child)
    head = model.get_output_embeddings()
    for child, module in list(model.named_children()):
        if module is not base and module is not head:
            delattr(model, child)


def _refuse_states(model: PreTrainedModel, name: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, _STATES):
            raise ModelError(
                f"model: {name} has the layer {path} ({type(module).__name__}), which keeps a "
                "state per sequence besides keys and values, and cannot run through transformers"
            )


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, rotary frequencies for example."""

    def fill(module: nn.Module, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            fill(child, owner)
        names = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name in names}
        found = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        for name, buffer in found.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if found:
            owner._init_weights(module)

    with torch.no_grad():
        fill(model, model)
