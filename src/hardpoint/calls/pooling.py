"""Parameters and results of calls that pool prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hardpoint.errors import shown
from hardpoint.plugins import RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.requests import prompt_list
from hardpoint.typed import copied, is_list

from .model import ModelGroup
from .plugins import PluginGroup

__all__ = [
    "paired_scores",
    "prefixed_prompts",
    "score_prompts",
    "similarity_scores",
    "text_pairs",
    "with_task",
]


def prefixed_prompts(
    prompts: Any, name: str | None, model: ModelGroup, plugins: PluginGroup
) -> list[Any]:
    """Return prompts, with the model's prefix before each text.

    Args:
        name: name of the text; None is the default one of the model's folder.

    Raises:
        RequestError: the model has no text of that name.
    """
    listed = prompt_list(prompts)
    if not {"embed", "score"}.intersection(model.supported_tasks):
        return listed  # the call itself raises the error
    prefix = plugins.call_part("pooling", "prompt", {"name": name})
    return [prefix + prompt if prefix and isinstance(prompt, str) else prompt for prompt in listed]


def with_task(task: Any, params: Any) -> Any:
    """Return parameters of a call that has one task.

    Raises:
        RequestError: they have another one.
    """
    if params is None:
        return PoolingParams(task=task)
    for item in copied(params, "pooling_params") if is_list(params) else [params]:
        if isinstance(item, PoolingParams) and item.task != task:
            raise RequestError(
                f'pooling_params.task: expected "{task}" in this call, got {shown(item.task)}'
            )
    return params


def text_pairs(first: Sequence[Any], second: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the prompts of texts in pairs; of one text with all others, if there is one."""
    return [
        {"text": first[index % len(first)], "text_pair": other}
        for index, other in enumerate(second)
    ]


def score_prompts(
    texts_1: Any, texts_2: Any, model: ModelGroup, plugins: PluginGroup
) -> tuple[list[Any], list[Any]]:
    """Return the prompts of `score`, with the model's text if it compares vectors.

    Raises:
        RequestError: the numbers of texts do not fit.
    """
    first, second = prefixed_prompts(texts_1, None, model, plugins), prompt_list(texts_2)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"texts_1: expected one text or {len(second)}, as texts_2 has, got {len(first)}"
        )
    if "embed" in model.supported_tasks:
        second = prefixed_prompts(second, None, model, plugins)
    return first, second


def paired_scores(outputs: Sequence[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
    """Return the outputs of pairs of texts with numbers instead of arrays."""
    return [msgspec.structs.replace(output, outputs=float(output.outputs)) for output in outputs]


def similarity_scores(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> list[PoolingRequestOutput]:
    """Return the cosine of each pair of vectors; of one vector with all, if there is one."""
    return [
        msgspec.structs.replace(output, outputs=_cosine(first[index % len(first)], output))
        for index, output in enumerate(second)
    ]


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> float:
    a = np.asarray(first.outputs, np.float64)
    b = np.asarray(second.outputs, np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / max(lengths, 1e-24)
