"""The base classes of LLM and AsyncLLM: what describes an open model, and calls that pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

import msgspec
import numpy as np

from hardpoint.core.engine.utility_calls import SyncControlCalls
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.request_state import rejection
from hardpoint.core.frontend.requests.prompts import Prompt, copied, is_list
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import EngineConfig, HardpointError, RequestError, SamplingParams, Tokenizer
from hardpoint.plugins.manifest import Manifest
from hardpoint.plugins.media import Image
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.toolkit.images import ImageReader

from .requests import (
    BatchOptions,
    OpenCalls,
    make_pooling_requests,
    prompt_list,
    takes_options,
)

__all__ = ["OpenModel", "PoolingCalls", "PromptImages", "has_unread_images"]

Engine = TypeVar("Engine", LLMEngine, AsyncEngine)

_MEDIA, _IMAGE = "multi_modal_data", "image"


def has_unread_images(prompt: Any) -> bool:
    """Return whether a prompt has images that are not yet decoded."""
    media = prompt.get(_MEDIA) if isinstance(prompt, Mapping) else None
    images = media.get(_IMAGE) if isinstance(media, Mapping) else None
    listed = images if isinstance(images, list | tuple) else [images]
    return any(not isinstance(image, Image | None) for image in listed)


class PromptImages:
    """Reads the images of an open model's prompts.

    Attributes:
        tokens: ids of tokens that stand for an image or for parts of one, the placeholder first;
            none if the model takes no images.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Start nothing; the first image starts a process that decodes."""
        self.tokens: Sequence[int] = parts.step_parts.media_tokens.get(_IMAGE, ())
        self.reader = ImageReader(parts.config.images)

    def prompt(self, prompt: Any, place: str = "") -> Any:
        """Return a prompt whose images are decoded; any other prompt as it is.

        The engine refuses images for a model that takes none.

        Args:
            place: begins messages, if the prompt is one of several.

        Raises:
            RequestError: an image is wrong, or above a limit; the message names it.
        """
        if not self.tokens or not has_unread_images(prompt):
            return prompt
        media = prompt[_MEDIA]
        given = media[_IMAGE]
        listed = copied(given, f"{_MEDIA}.{_IMAGE}") if is_list(given) else [given]
        read = self.reader.read(
            [(f"{place}{_MEDIA}.{_IMAGE}[{index}]", image) for index, image in enumerate(listed)]
        )
        return {**prompt, _MEDIA: {**media, _IMAGE: read}}

    def close(self) -> None:
        """End the process that decodes."""
        self.reader.close()


class OpenModel(Generic[Engine]):
    """A model with an engine that runs it; base of LLM and AsyncLLM."""

    _engine: Engine

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""
        return self._engine.parts.config

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""
        return self._engine.parts.plugins.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    @functools.cached_property
    def _images(self) -> PromptImages:
        """Reads the images of prompts."""
        return PromptImages(self._engine.parts)

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return bool(self._images.tokens)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's tasks, such as "generate", as the engine reported them at start."""
        return self._engine.parts.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any: those that the model's files recommend."""
        return self._engine.default_sampling_params()


class PoolingCalls(OpenModel[LLMEngine], SyncControlCalls):
    """The calls of a program that waits for vectors and scores."""

    _calls: OpenCalls

    @takes_options
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the results of prompts by `PoolingParams.task`, by default vectors.

        All prompts share running batches. No token is generated, so that a prompt may be as long as
        the model's context.

        Args:
            prompts: as for `generate`; at least one.
            pooling_params: one for all, or one per prompt.
            options: `RequestOptions`, each one for all, or a list of one per prompt.

        Returns:
            One output per prompt, in the order asked: `outputs` is a float32 array [dimensions],
            or of the task "token_embed" [tokens, dimensions].

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model cannot do the task; the
                message has the prompt's index. None of them runs.
            PluginFaultError: a pooler failed.
            EnginePausedError, EngineDeadError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        listed = prompt_list(prompts)
        if not listed:
            return []
        listed = [
            self._images.prompt(prompt, f"prompts[{index}]: ")
            for index, prompt in enumerate(listed)
        ]
        calls = self._calls
        ids = calls.add(make_pooling_requests(listed, params, **options), name="prompts")
        try:
            places = {request_id: index for index, request_id in enumerate(ids)}
            found: dict[str, PoolingRequestOutput] = {}
            while len(found) < len(ids):
                output = calls.next_output_of(ids)
                place = places[output.request_id]
                found[output.request_id] = pooled(output, f"prompts[{place}]")
        finally:
            calls.drop(ids)
        return [found[request_id] for request_id in ids]

    @takes_options
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt: `encode` with the task "embed".

        Args:
            prompts, pooling_params: as for `encode`.
            prompt_name: name of the model's text that is put before texts, such as "query"; None is
                the default one of the model's folder, mostly none.
            options: `RequestOptions`.

        Raises:
            RequestError: the model has no prompt of that name; or as `encode`.
        """
        params = with_task("embed", pooling_params)
        return self.encode(self._prefixed(prompts, prompt_name), params, **options)

    def _prefixed(self, prompts: Any, name: str | None) -> list[Any]:
        """Return prompts with the model's text before those that are texts."""
        listed = prompt_list(prompts)
        if "embed" not in self.supported_tasks:
            return listed  # which is the error of the call itself
        prefix = self.call_part("pooling", "prompt", {"name": name})
        return [prefix + one if prefix and isinstance(one, str) else one for one in listed]

    @takes_options
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the probability of each class for each prompt: `encode` with "classify".

        Raises:
            As `encode`.
        """
        return self.encode(prompts, with_task("classify", pooling_params), **options)

    @takes_options
    def score(
        self,
        texts_1: Prompt | Sequence[Prompt],
        texts_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return how well texts match, in pairs: the cosine of their vectors.

        Args:
            texts_1: one text, which is compared with each of `texts_2`, or as many as these.
            texts_2: one text or several.
            pooling_params: parameters of all texts.
            options: `RequestOptions`.

        Returns:
            One output per text of `texts_2`: `outputs` is a number.

        Raises:
            RequestError: the numbers of texts do not fit; or as `encode`.
        """
        first, second = self._prefixed(texts_1, None), self._prefixed(texts_2, None)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"texts_1: expected one text or {len(second)}, as texts_2 has, got {len(first)}"
            )
        params = with_task("embed", pooling_params)
        outputs = self.encode([*first, *second], params, **options)
        return list(similarity(outputs[: len(first)], outputs[len(first) :]))


def with_task(task: Any, params: Any) -> Any:
    """Return parameters of a call that has one task.

    Raises:
        RequestError: they have another one.
    """
    if params is None:
        return PoolingParams(task=task)
    for one in copied(params, "pooling_params") if is_list(params) else [params]:
        if isinstance(one, PoolingParams) and one.task != task:
            raise RequestError(
                f'pooling_params.task: expected "{task}" in this call, got {shown(one.task)}'
            )
    return params


def pooled(output: Any, where: str) -> PoolingRequestOutput:
    """Return an output that has a result.

    Args:
        output: last output of a request that pools.
        where: names the prompt in messages.

    Raises:
        HardpointError: it has none.
    """
    assert isinstance(output, PoolingRequestOutput), "the request pools"
    if (rejected := rejection(output)) is not None:
        raise type(rejected)(f"{where}: {rejected}")
    if output.finish_reason == "error":
        raise PluginFaultError(f"{where}: {output.error}")
    if output.finish_reason != "stop":
        raise HardpointError(f'{where}: it ended without a result, by "{output.finish_reason}"')
    return output


def similarity(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> Iterator[PoolingRequestOutput]:
    """Yield the cosine of each pair of vectors; of one vector with all, if there is one."""
    for index, output in enumerate(second):
        a = np.asarray(first[index % len(first)].outputs, np.float64)
        b = np.asarray(output.outputs, np.float64)
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        yield msgspec.structs.replace(output, outputs=float(a @ b) / max(lengths, 1e-24))
