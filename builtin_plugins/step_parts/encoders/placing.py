"""Media in the frontend: they are read, processed, and placed in the tokens of their prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import FrontendHalf
from hardpoint.plugins.requests import MediaFormat, MultiModalFeature
from hardpoint.plugins.step_part import (
    GivenPrompt,
)
from hardpoint.toolkit.images import ImageReader, ImagesConfig, ProcessedImage
from hardpoint.typed import copied, is_list

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.part import PromptReader


_FIELD = "multi_modal_data"
_LONGEST_RUN = 64  # newlines of a token


class MediaPrompts(FrontendHalf):
    """Places media in prompts, in the order of their placeholders."""

    prompt_keys = (_FIELD,)

    def __init__(
        self,
        media: MediaFormat | None,
        model: str,
        limits: ImagesConfig,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Place media of a format.

        Args:
            media: format of the model; None refuses all media.
            model: names it in messages.
            encode: returns the tokens of a text.
        """
        self._media, self._model, self._encode = media, model, encode
        self._reader: ImageReader | None = None
        if media is not None:
            self._reader = ImageReader(limits, media=media)
            tokens = dict.fromkeys(
                (media.placeholder_id, media.token_id, *media.begin_ids, *media.end_ids)
            )
            self.media_tokens = {modality: tuple(tokens) for modality in media.modalities}
        self._runs: dict[int, int] | None = None

    def read_media(
        self, modality: str, items: Sequence[tuple[str, Any]]
    ) -> Sequence[ProcessedImage]:
        """Return images as the encoder gets them.

        Raises:
            RequestError: the model takes no such media, or one is wrong; names its place.
            HardpointError: no process that decodes can be started.
        """
        if self._reader is None or self._media is None or modality not in self._media.modalities:
            known = () if self._media is None else self._media.modalities
            takes = ", ".join(known) or "text alone"
            raise RequestError(
                f"{_FIELD}: {shown(modality)}: the model {self._model} takes {takes}"
            )
        return cast("list[ProcessedImage]", self._reader.read(items))

    def close(self) -> None:
        """End the process that decodes and processes images."""
        if self._reader is not None:
            self._reader.close()

    def read_prompt(self, prompt: Mapping[str, Any], reader: PromptReader) -> GivenPrompt:
        """Return a prompt with the tokens of its media, the i-th one at the i-th placeholder.

        Without media no token is a placeholder.

        Raises:
            RequestError: the model does not take them, one is no image, there are more or fewer
                than placeholders, or the prompt has something else besides tokens.
        """
        media = _listed(prompt[_FIELD])
        rest = {key: value for key, value in prompt.items() if key != _FIELD}
        parsed = reader.read(rest)
        if not media:
            return parsed
        if parsed.fields:
            raise RequestError(f"{_FIELD}: expected none with {', '.join(sorted(rest))}")
        token_ids, features = self._with_media(parsed.token_ids, media)
        return dataclasses.replace(
            parsed,
            token_ids=token_ids,
            fields={"features": features},
            cut=functools.partial(_refuse_cut, len(token_ids)),
        )

    def _with_media(
        self, token_ids: Sequence[int], media: Mapping[str, Sequence[Any]]
    ) -> tuple[list[int], list[MultiModalFeature]]:
        read = {
            modality: self.read_media(
                modality, [(f"{_FIELD}.{modality}[{i}]", item) for i, item in enumerate(items)]
            )
            for modality, items in media.items()
        }
        images, config = read.get("image", ()), self._media
        assert config is not None, "others are refused"
        places = [i for i, token in enumerate(token_ids) if token == config.placeholder_id]
        if len(places) != len(images):
            raise RequestError(
                f"{_FIELD}.image: expected one image for each {config.placeholder} of the prompt, "
                f"got {len(images)} images and {len(places)} placeholders"
            )
        if config.token_id != config.placeholder_id and config.token_id in token_ids:
            raise RequestError(
                f"prompt: expected no token {config.token_id}, which stands for a part of an "
                f"image, got one at position {list(token_ids).index(config.token_id)}"
            )
        return self._placed(token_ids, places, images)

    def _placed(
        self, token_ids: Sequence[int], places: Sequence[int], images: Sequence[ProcessedImage]
    ) -> tuple[list[int], list[MultiModalFeature]]:
        media = self._media
        assert media is not None
        result: list[int] = []
        features: list[MultiModalFeature] = []
        position = 0
        for place, image in zip(places, images, strict=True):
            result += token_ids[position:place]
            self._add_around(result, media.around)
            result += media.begin_ids
            item = np.frombuffer(image.data, np.uint8).reshape(image.shape or media.item_shape)
            tokens = media.token_ids(item)
            features.append(
                MultiModalFeature(
                    media.identifier(image.content_hash),
                    len(result),
                    len(tokens),
                    sees_itself=media.sees_itself,
                    data=item,
                )
            )
            result += tokens
            result += media.end_ids
            position = self._add_around(result, media.around, token_ids, place + 1)
        return result + list(token_ids[position:]), features

    def _add_around(
        self,
        result: list[int],
        around: str,
        token_ids: Sequence[int] = (),
        position: int = 0,
    ) -> int:
        if not around:
            return position
        runs, count = self._newlines(), len(around)
        while result and result[-1] in runs:
            count += runs[result.pop()]
        while position < len(token_ids) and token_ids[position] in runs:
            count += runs[token_ids[position]]
            position += 1
        result += self._encode("\n" * count)
        return position

    def _newlines(self) -> Mapping[int, int]:
        if self._runs is None:
            self._runs = {}
            for count in range(1, _LONGEST_RUN + 1):
                ids = self._encode("\n" * count)
                if len(ids) == 1:
                    self._runs.setdefault(ids[0], count)
        return self._runs


def _listed(value: Any) -> dict[str, list[Any]]:
    """Return media by modality, each as a list; one item alone is a list of it.

    Raises:
        RequestError: they are no mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{_FIELD}: expected a mapping such as {{'image': [...]}}, got {type(value).__name__}"
        )
    media: dict[str, list[Any]] = {}
    for modality, items in copied(value, _FIELD).items():
        if not isinstance(modality, str):
            raise RequestError(f"{_FIELD}: expected modalities as strings, got {shown(modality)}")
        media[modality] = copied(items, f"{_FIELD}.{modality}") if is_list(items) else [items]
    return {modality: list(items) for modality, items in media.items() if items}


def _refuse_cut(length: int, limit: int) -> GivenPrompt:
    raise RequestError(
        f"truncate_prompt_tokens: expected at least {length}, the tokens of the prompt with its "
        f"media, which is not cut, got {limit}"
    )
