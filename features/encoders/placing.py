"""Media in the frontend: they are read, processed, and placed in the tokens of their prompt."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import FrontendHalf
from hardpoint.plugins.frontend_half import GivenPrompt, PromptReader
from hardpoint.plugins.media import Image
from hardpoint.plugins.media_format import MediaFormat
from hardpoint.plugins.requests import MultiModalFeature
from hardpoint.typed import copied, is_list

_FIELD = "multi_modal_data"
_LONGEST_RUN = 64  # newlines of a token


class MediaPrompts(FrontendHalf):
    """Places media in prompts, in the order of their placeholders."""

    prompt_keys = (_FIELD,)

    def __init__(
        self,
        media: MediaFormat | None,
        model: str,
        max_items: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Place media of a format.

        Args:
            media: format of the model; None refuses all media.
            model: names it in messages.
            max_items: images of a prompt, at most.
            encode: returns the tokens of a text.
        """
        self._media, self._model, self._max_items = media, model, max_items
        self._encode = encode
        if media is not None:
            tokens = dict.fromkeys(
                (media.placeholder_id, media.token_id, *media.begin_ids, *media.end_ids)
            )
            self.media_tokens = {modality: tuple(tokens) for modality in media.modalities}
        self._runs: dict[int, int] | None = None

    def read_prompt(self, prompt: Mapping[str, Any], reader: PromptReader) -> GivenPrompt:
        """Return a prompt with the tokens of its media, the i-th one at the i-th placeholder.

        Without media no token is a placeholder.

        Raises:
            RequestError: the model does not take them, one is no image, there are more or fewer
                than placeholders, or the prompt has something else besides tokens.
        """
        media = _listed(prompt[_FIELD])
        rest = {key: value for key, value in prompt.items() if key != _FIELD}
        given = reader.read(rest)
        if not media:
            return given
        if given.fields:
            raise RequestError(f"{_FIELD}: expected none with {', '.join(sorted(rest))}")
        token_ids, features = self._with_media(given.token_ids, media)
        return dataclasses.replace(
            given,
            token_ids=token_ids,
            fields={"features": features},
            cut=functools.partial(_refuse_cut, len(token_ids)),
        )

    def _with_media(
        self, token_ids: Sequence[int], media: Mapping[str, Sequence[Any]]
    ) -> tuple[list[int], list[MultiModalFeature]]:
        images = self._checked(media)
        found = self._media
        assert found is not None, "others are refused"
        places = [i for i, token in enumerate(token_ids) if token == found.placeholder_id]
        if len(places) != len(images):
            raise RequestError(
                f"{_FIELD}.image: expected one image for each {found.placeholder} of the prompt, "
                f"got {len(images)} images and {len(places)} placeholders"
            )
        if found.token_id in token_ids:
            raise RequestError(
                f"prompt: expected no token {found.token_id}, which stands for a part of an image, "
                f"got one at position {list(token_ids).index(found.token_id)}"
            )
        return self._placed(token_ids, places, images)

    def _checked(self, media: Mapping[str, Sequence[Any]]) -> list[Image]:
        """Return the images of a prompt.

        Raises:
            RequestError: the model takes no such media, there are too many, or one is no image.
        """
        known = () if self._media is None else self._media.modalities
        for modality in media:
            if modality not in known:
                takes = ", ".join(known) or "text alone"
                raise RequestError(
                    f"{_FIELD}: {shown(modality)}: the model {self._model} takes {takes}"
                )
        given = media.get("image", ())
        if len(given) > self._max_items:
            raise RequestError(
                f"{_FIELD}.image: expected at most {self._max_items} images "
                f"(plugin.encoders.max_items), got {len(given)}"
            )
        return [read_image(value, f"{_FIELD}.image[{i}]") for i, value in enumerate(given)]

    def _placed(
        self, token_ids: Sequence[int], places: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], list[MultiModalFeature]]:
        media = self._media
        assert media is not None
        result: list[int] = []
        features: list[MultiModalFeature] = []
        made: dict[str, Any] = {}  # equal images are processed once
        position = 0
        for place, image in zip(places, images, strict=True):
            result += token_ids[position:place]
            self._add_around(result, media.around)
            result += media.begin_ids
            identifier = media.identifier(image)
            if identifier not in made:
                made[identifier] = self._processed(image, len(features))
            features.append(
                MultiModalFeature(
                    identifier,
                    len(result),
                    media.num_tokens,
                    sees_itself=media.sees_itself,
                    data=made[identifier],
                )
            )
            result += [media.token_id] * media.num_tokens
            result += media.end_ids
            position = self._add_around(result, media.around, token_ids, place + 1)
        return result + list(token_ids[position:]), features

    def _processed(self, image: Image, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        media = self._media
        assert media is not None
        data = media.process(image)
        if data.dtype != np.uint8 or data.shape != media.item_shape:
            raise RequestError(
                f"{_FIELD}.image[{index}]: the model's format made {data.dtype} "
                f"{list(data.shape)} of it, expected uint8 {list(media.item_shape)}"
            )
        return data

    def _add_around(
        self,
        result: list[int],
        around: str,
        token_ids: Sequence[int] = (),
        position: int = 0,
    ) -> int:
        """Append newlines, in one token with those next to them; return the position after."""
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
        """Return the number of newlines of the tokens that have nothing else."""
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


def read_image(value: Any, path: str) -> Image:
    """Return an image that is given as one, as one of Pillow, or as an array.

    Args:
        value: `Image`, `PIL.Image.Image`, or a uint8 array [height, width, 3].
        path: names it in messages.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(value, Image):
        sizes = (value.width, value.height)
        if min(sizes) < 1 or len(value.pixels) != 3 * value.width * value.height:
            raise RequestError(
                f"{path}: expected 3 * width * height bytes of pixels, got {len(value.pixels)} for "
                f"{value.width} x {value.height}"
            )
        return value
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        converted = value.convert("RGB")
        width, height = converted.size
        return Image(width, height, converted.tobytes())
    if not isinstance(value, np.ndarray):
        raise RequestError(
            f"{path}: expected an Image, an image of Pillow or an array, got {shown(value)}"
        )
    if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
        raise RequestError(
            f"{path}: expected a uint8 array [height, width, 3], got {value.dtype} "
            f"{list(value.shape)}"
        )
    return Image(value.shape[1], value.shape[0], value.tobytes())
