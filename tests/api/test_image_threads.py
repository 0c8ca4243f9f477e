"""Images of several keys: none waits for the threads of others, and each has a limit."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from support.pictures import data_url, encoded, gradient

from hardpoint.errors import EngineClosedError, OverloadedError
from hardpoint.images import ImageThreads
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import ImageSource, ProcessedImage

URL = data_url(encoded(gradient()))
DONE = ProcessedImage(1, 1, "", "", b"")


class Parts:
    """The part that reads images, which are slow for one owner until the test lets them go."""

    def __init__(self, **limits):
        self.config = SimpleNamespace(images=ImagesConfig(**limits))
        self.step_parts = self
        self.media_tokens = {"image": (6,)}
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def read_media(self, _modality, images):
        read = []
        for _, image in images:
            if image.owner != "quick":
                self.begun.release()
                assert self.go.wait(60)
            read.append(DONE)
        return read


def prompt(owner, count=1):
    images = [ImageSource(URL, f"image[{i}]", owner) for i in range(count)]
    return {"prompt": "x", "multi_modal_data": {"image": images}}


@pytest.fixture
def parts():
    made = Parts(max_queued=40)
    yield made
    made.go.set()


async def test_a_keys_images_wait_for_no_thread_of_another(parts):
    """As many requests with images as a key may have leave another one's request alone."""
    threads = ImageThreads(parts)
    slow = [asyncio.ensure_future(threads.prompt(prompt("slow", 2))) for _ in range(20)]
    read = await asyncio.wait_for(threads.prompt(prompt("quick")), 60)
    assert read["multi_modal_data"]["image"] == [DONE]
    assert not any(one.done() for one in slow)
    parts.go.set()
    await asyncio.gather(*slow)
    threads.close()


async def test_one_above_the_limit_of_a_key_is_refused(parts):
    threads = ImageThreads(parts)
    slow = [asyncio.ensure_future(threads.prompt(prompt("slow", 2))) for _ in range(20)]
    await asyncio.sleep(0)  # they are handed on
    with pytest.raises(OverloadedError) as error:
        await threads.prompt(prompt("slow"))
    assert str(error.value) == (
        "overloaded: 40 images of this key are being read or wait, and 1 more would be above "
        "the maximum, 40 (images.max_queued); try again later"
    )
    assert await threads.prompt(prompt("quick", 16))
    parts.go.set()
    await asyncio.gather(*slow)
    assert await threads.prompt(prompt("slow", 16))
    threads.close()


async def test_one_request_may_have_more_than_the_limit(parts):
    parts.config.images = ImagesConfig(max_queued=1)
    threads = ImageThreads(parts)
    assert await threads.prompt(prompt("quick", 16))
    threads.close()


async def test_a_programs_own_images_have_no_limit(parts):
    parts.config.images = ImagesConfig(max_queued=1)
    threads = ImageThreads(parts)
    waiting = [asyncio.ensure_future(threads.prompt(prompt(""))) for _ in range(12)]
    await asyncio.sleep(0)
    parts.go.set()
    assert len(await asyncio.gather(*waiting)) == 12
    threads.close()


async def test_cancelled_ones_count_until_the_image_under_way_is_read(parts):
    parts.config.images = ImagesConfig(max_queued=2)
    threads = ImageThreads(parts)
    gone = asyncio.ensure_future(threads.prompt(prompt("slow", 2)))
    await asyncio.to_thread(parts.begun.acquire)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    with pytest.raises(OverloadedError):
        await threads.prompt(prompt("slow"))
    threads.close()


async def test_closing_ends_what_waits(parts):
    threads = ImageThreads(parts)
    waiting = [asyncio.ensure_future(threads.prompt(prompt("slow", 2))) for _ in range(12)]
    await asyncio.to_thread(parts.begun.acquire)
    threads.close()
    parts.go.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, EngineClosedError) for one in ended)
    with pytest.raises(EngineClosedError):
        await threads.prompt(prompt("quick"))
