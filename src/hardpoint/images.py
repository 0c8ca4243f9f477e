"""Images of prompts and messages in LLM and AsyncLLM: read by the part that places them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.errors import EngineClosedError, OverloadedError, RequestError, shown
from hardpoint.plugins.requests.media import ImageSource, ProcessedImage
from hardpoint.typed import copied, is_list

__all__ = ["IMAGE_PARTS", "ImageThreads", "PromptImages", "has_unread_images", "image_of"]

T = TypeVar("T")

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts of messages that have an image."""

_MEDIA, _IMAGE = "multi_modal_data", "image"

_THREADS = 8  # of an owner; images are decoded one after the other; it is hosts that they wait for

_DETAILS = (None, "auto")
"""Values of `detail` that are taken: how large an image is read, the model's processor decides."""


def has_unread_images(prompt: Any) -> bool:
    """Return whether a prompt has images that are not yet read."""
    media = prompt.get(_MEDIA) if isinstance(prompt, Mapping) else None
    images = media.get(_IMAGE) if isinstance(media, Mapping) else None
    return any(not isinstance(image, ProcessedImage | None) for image in _listed(images))


def _listed(images: Any) -> Sequence[Any]:
    return images if isinstance(images, list | tuple) else [images]


class PromptImages:
    """Reads the images of an open model's prompts.

    Attributes:
        tokens: ids of tokens that stand for an image or for parts of one, the placeholder first;
            none if the model takes no images.
    """

    def __init__(self, parts: EngineParts, check_wanted: Callable[[], None] = lambda: None) -> None:
        """`check_wanted`: called before each image; raises an error once no more are wanted."""
        self._parts, self._check_wanted = parts.step_parts, check_wanted
        self.tokens: Sequence[int] = self._parts.media_tokens.get(_IMAGE, ())

    def read(self, images: Sequence[tuple[str, Any]]) -> Sequence[Any]:
        """Return images as prompts have them, in any thread.

        Args:
            images: each with its place, which names it in messages.

        Raises:
            RequestError: one is wrong, or above a limit; the message names it.
        """
        if not images:
            return []
        return self._parts.read_media(_IMAGE, _WhileWanted(images, self._check_wanted))

    def prompt(self, prompt: Any, place: str = "") -> Any:
        """Return a prompt with its images read; any other prompt as it is.

        The engine refuses images for a model that takes none.

        Args:
            place: begins messages, if the prompt is one of several.

        Raises:
            RequestError: an image is wrong, or above a limit; the message names it.
        """
        if not self.tokens or not has_unread_images(prompt):
            return prompt
        media = prompt[_MEDIA]
        images = media[_IMAGE]
        listed = copied(images, f"{_MEDIA}.{_IMAGE}") if is_list(images) else [images]
        read = self.read(
            [(f"{place}{_MEDIA}.{_IMAGE}[{index}]", image) for index, image in enumerate(listed)]
        )
        return {**prompt, _MEDIA: {**media, _IMAGE: read}}


class _WhileWanted(Sequence[tuple[str, Any]]):
    """The images of a prompt; an iteration ends with an error once no more are wanted."""

    def __init__(self, images: Sequence[tuple[str, Any]], check: Callable[[], None]) -> None:
        self._images, self._check = images, check

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: Any) -> Any:
        return self._images[index]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for image in self._images:
            self._check()
            yield image


class ImageThreads:
    """Reads the images of an event loop's prompts in threads of their own.

    Those of the loop stay free for what is quick. Each owner of images has threads of its own, so
    that none waits for those of others. Nothing more is read for a caller that is cancelled, nor
    once it is closed, than the image under way.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._max_queued = parts, parts.config.images.max_queued
        self._lock, self._queues = threading.Lock(), dict[str, _Queue]()
        self._closed = threading.Event()

    async def prompt(self, prompt: Any) -> Any:
        """Return a prompt with its images read.

        Raises:
            RequestError: an image is wrong, or above a limit; the message names it.
            OverloadedError: too many images of the owner wait.
            EngineClosedError: it was closed.
        """
        return await self._run(
            lambda images: images.prompt(prompt), _listed(prompt[_MEDIA][_IMAGE])
        )

    async def rendered(
        self, render: Callable[..., Mapping[str, Any]], messages: Any
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt, rendered in another thread.

        Args:
            render: `Chat.rendered`.

        Raises:
            RequestError: raised by `render`.
            OverloadedError: too many images of the owner wait.
            EngineClosedError: it was closed while it had images to read.
        """
        tokenizer, images = self._parts.tokenizer, PromptImages(self._parts)
        if images.tokens and (sources := _images_of(messages)):
            return await self._run(lambda images: render(tokenizer, messages, images), sources)
        return await asyncio.to_thread(render, tokenizer, messages, images)

    def close(self) -> None:
        """Read no further images; callers that wait for some get EngineClosedError."""
        self._closed.set()
        with self._lock:
            for queue in self._queues.values():
                queue.threads.shutdown(wait=False)

    async def _run(self, read: Callable[[PromptImages], T], images: Sequence[Any]) -> T:
        """Read images in a thread of their owner.

        Args:
            images: the images, as they were given.
        """
        gone = threading.Event()

        def check_wanted() -> None:
            if gone.is_set() or self._closed.is_set():
                raise _closed()

        running = self._submit(lambda: read(PromptImages(self._parts, check_wanted)), images)
        try:
            return await asyncio.wrap_future(running)
        finally:
            gone.set()

    def _submit(self, read: Callable[[], T], images: Sequence[Any]) -> Future[T]:
        owner = next((image.owner for image in images if isinstance(image, ImageSource)), "")
        with self._lock:
            if self._closed.is_set():
                raise _closed()
            queue = self._queues.setdefault(owner, _Queue())
            if owner and queue.count and queue.count + len(images) > self._max_queued:
                raise OverloadedError(
                    f"overloaded: {queue.count} images of this key are being read or wait, and "
                    f"{len(images)} more would be above the maximum, {self._max_queued} "
                    f"(images.max_queued); try again later"
                )
            queue.count += len(images)
            running = queue.threads.submit(read)
        running.add_done_callback(lambda _: self._done(owner, queue, len(images)))
        return running

    def _done(self, owner: str, queue: _Queue, count: int) -> None:
        with self._lock:
            queue.count -= count
            if not queue.count and not self._closed.is_set():
                del self._queues[owner]
                queue.threads.shutdown(wait=False)


class _Queue:
    """The images of an owner that are being read or wait, and the threads that read them."""

    def __init__(self) -> None:
        self.count, self.threads = 0, ThreadPoolExecutor(_THREADS, "images")


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed")


def _images_of(messages: Any) -> list[Any]:
    plain = (
        [message for message in messages if isinstance(message, dict)] if is_list(messages) else []
    )
    contents = [message.get("content") for message in plain]
    parts = [
        part
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS
    ]
    urls = [part.get("image_url") for part in parts]
    return [url.get("url") if isinstance(url, dict) else url for url in urls]


def image_of(part: dict[Any, Any], type_: str, path: str) -> tuple[str, Any]:
    """Return the image of a part of a message, and its place.

    Raises:
        RequestError: it has none, or something else besides.
    """
    names = ("image", "url", "path") if type_ == "image" else ("image_url",)
    present = [name for name in names if part.get(name) is not None]
    for name in part:
        if name not in ("type", "detail", *names) and part[name] is not None:
            raise RequestError(
                f"{path}.{shown(name)[1:-1]}: not supported; a part of the type {type_!r} has "
                f"{' or '.join(names)}"
            )
    if len(present) != 1:
        raise RequestError(f"{path}: expected {' or '.join(names)}, got {len(present)} of them")
    (name,) = present
    value, place, details = part[name], f"{path}.{name}", [part.get("detail")]
    if name == "image_url" and isinstance(value, Mapping):
        fields, place = dict(copied(value, place)), f"{place}.url"
        value = fields.pop("url", None)
        details.append(fields.pop("detail", None))
        if fields:
            raise RequestError(
                f"{path}.{name}: expected url and detail alone, got {shown(next(iter(fields)))}"
            )
    if name != "image" and not isinstance(value, str | ImageSource):
        raise RequestError(f"{place}: expected a string, got {type(value).__name__}")
    place = value.place if isinstance(value, ImageSource) else place
    for detail in details:
        if detail not in _DETAILS:
            raise RequestError(
                f'{place.rpartition(".")[0]}.detail: expected "auto", got {shown(detail)}; the '
                f"model reads every image in its own size"
            )
    return place, value
