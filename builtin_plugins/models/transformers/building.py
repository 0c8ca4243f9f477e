"""The modules of transformers for a configuration, built without weights."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as _CLASSIFIERS,
)

from hardpoint.plugins import ModelContext, ModelError
from hardpoint.toolkit.hf_config import short

ENDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the names of architectures that generate text."""

ENCODER, CLASSIFIER = "transformers_encoder", "transformers_classifier"
"""Names of the encoder plugins: for vectors, and for models with a classification head."""

_STATES = (nn.Conv1d, nn.RNNBase)
"""Modules of decoders that mix tokens besides attention: they have a state per sequence."""


_AROUND = ("transformers.modeling_layers", "transformers.utils.deprecation")
"""Modules of transformers with decorators that change nothing in a step without gradients."""

_BIASES = ("alibi", "position_bias")
"""Parameters of attention that adds biases of positions to its scores."""

_building = threading.Lock()
"""Held while a model is built, for which transformers changes torch in all threads."""


def has_architecture(name: str) -> bool:
    """Return whether transformers has a class of that name that generates text."""
    return name.endswith(ENDS) and hasattr(transformers, name)


def plugin_of(name: str) -> str | None:
    """Return the plugin that computes an architecture by its class of transformers.

    Encoders are models that can fill in masked tokens, without that head.
    """
    if has_architecture(name):
        return "transformers"
    for plugin, names in ((ENCODER, MODEL_MAPPING_NAMES), (CLASSIFIER, _CLASSIFIERS)):
        if any(names.get(kind) == name for kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES):
            return plugin
    return None


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
    model = _made(context)
    _keep_text(model, name)
    _refuse_states(model, name)
    _refuse_own_attention(text_part(model), name, "run over a cache of blocks")
    _refuse_own_positions(text_part(model), name)
    return _completed(model)


def build_whole(context: ModelContext) -> PreTrainedModel:
    """Return the modules of a model with inputs besides text, all of them, as `build` does.

    Raises:
        ModelError: transformers cannot build them.
    """
    model = _made(context)
    _fill_buffers(model)
    return model


def build_encoder(context: ModelContext) -> PreTrainedModel:
    """Return the modules of an encoder as `build` does, with a head if it classifies.

    Raises:
        ModelError: transformers cannot build them, or they are of a kind that cannot run.
    """
    name = context.config.architecture
    if plugin_of(name) not in (ENCODER, CLASSIFIER):
        raise ModelError(f"model: transformers {transformers.__version__} has no encoder {name}")
    # Checkpoints for vectors may lack tensors that only heads read.
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    arguments = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
    model = _made(context, **arguments)
    takes = inspect.signature(type(body(model)).forward).parameters
    if model.config.get_text_config() is not model.config or "pixel_values" in takes:
        raise ModelError(f"model: {name} has inputs besides text, as no encoder here has")
    _refuse_own_attention(body(model), name, "run on several prompts in one batch")
    return _completed(model)


def _made(context: ModelContext, **arguments: Any) -> PreTrainedModel:
    config, name = _config(context), context.config.architecture
    try:
        with _building, torch.device("meta"), no_init_weights():
            model: PreTrainedModel = getattr(transformers, name)._from_config(
                config, attn_implementation="eager", dtype=context.dtype, **arguments
            )
    except Exception as cause:
        raise ModelError(
            f"model: transformers {transformers.__version__} cannot build {name} of this "
            f"configuration: {type(cause).__name__}: {str(cause)[:300]}"
        ) from cause
    return model.eval()


def _completed(model: PreTrainedModel) -> PreTrainedModel:
    _fill_buffers(model)
    _unwrap_layers(model)
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
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(field) for name, field in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _refuse_lengths(config: Any, name: str, max_model_len: int) -> None:
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


def body(model: PreTrainedModel) -> PreTrainedModel:
    """Return the modules without the head; the model itself if they are not apart."""
    base = model.base_model
    if base is model:  # the prefix of a larger model, which contains this one
        base = getattr(model, "model", model)
    return base if isinstance(base, PreTrainedModel) else model


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the modules between tokens and the last hidden states."""
    base = body(model)
    part = base.get_decoder() if hasattr(base, "get_decoder") else base
    text_model = part if isinstance(part, PreTrainedModel) else base
    return text_model


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules and their names, without models of other inputs in the part for text."""
    part, others = text_part(model), list[str]()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and part not in set(module.modules()):
            others.append(f"{path}.")
        elif not path.startswith(tuple(others)):
            yield path, module


def _keep_text(model: PreTrainedModel, name: str) -> None:
    """Remove the children that text does not need, of a model with other inputs.

    Raises:
        ModelError: its part for text is not found.
    """
    base, part = body(model), text_part(model)
    if base is model or model.get_output_embeddings() is None:
        raise ModelError(
            f"model: {name} of transformers has no body (base_model) apart from a head of tokens "
            "(get_output_embeddings), as models that generate text have"
        )
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
    for path, module in text_modules(model):
        if isinstance(module, _STATES):
            raise ModelError(
                f"model: {name} has the layer {path} ({type(module).__name__}), which keeps a "
                "state per sequence besides keys and values, and cannot run through transformers"
            )
    if model._is_stateful:
        raise ModelError(
            f"model: {name} has layers that keep a state per sequence besides keys and values, as "
            "transformers declares (_is_stateful), and cannot run through transformers"
        )


def _refuse_own_attention(part: PreTrainedModel, name: str, aim: str) -> None:
    if type(part)._can_set_attn_implementation():
        return
    taken = {p for m in part.modules() for p in inspect.signature(m.forward).parameters}
    biases = ", ".join(bias for bias in _BIASES if bias in taken)
    added = f" and adds biases of positions to its scores ({biases})" if biases else ""
    raise ModelError(
        f"model: {name}: attention of {type(part).__name__} does not call the attention interface "
        f"of transformers{added}, so that it cannot {aim}"
    )


def _refuse_own_positions(part: PreTrainedModel, name: str) -> None:
    if "position_ids" not in inspect.signature(type(part).forward).parameters:
        raise ModelError(
            f"model: {name}: {type(part).__name__} takes no position_ids and counts positions from "
            "the beginning of a step, in which there are several requests, so that it cannot run "
            "through transformers"
        )


def _unwrap_layers(model: PreTrainedModel) -> None:
    """Call the layers without transformers' wrappers for training and for old names.

    It takes a few percent of a step of one token.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            continue
        forward = type(module).forward
        while forward.__globals__["__name__"] in _AROUND and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if forward is not type(module).forward:
            module.forward = types.MethodType(forward, module)


def _fill_buffers(model: PreTrainedModel) -> None:
    def fill(module: nn.Module, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            fill(child, owner)
        names = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name in names}
        missing = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        for name, buffer in missing.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if missing:
            owner._init_weights(module)

    with torch.no_grad():
        fill(model, model)
