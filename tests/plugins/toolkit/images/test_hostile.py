"""Damaged images: each is decoded or refused by one message, and nothing hangs or dies of it."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pytest
from PIL import Image as Pillow
from support.pictures import encoded, gradient

from hardpoint.plugins import RequestError
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.toolkit.images import ImageDecoder

LIMITS = ImagesConfig(max_pixels=1 << 20, decode_seconds=60.0)
WORDS = re.compile(
    r"messages\[0\]\.content\[\d+\]: ("
    r"expected an image (in the format|of at most|of one frame|whose|with a longer side of at most)"
    r"|expected a whole image; this \w+ image|decoding it takes more than)"
)


def originals():
    exif = Pillow.Exif()
    exif[0x0112] = 6
    image = gradient(64, 48)
    frames = [gradient(16, 16), Pillow.new("RGB", (16, 16), "red")]
    return [
        encoded(image, exif=exif),
        encoded(image.quantize(8), transparency=1),
        encoded(image, "JPEG", exif=exif, quality=80),
        encoded(image, "JPEG", progressive=True),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "WEBP", lossless=True),
        encoded(image.convert("RGBA"), "WEBP", quality=60),
        encoded(image, "GIF"),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
    ]


def mutant(random_, data):
    """Return an image with damage: bytes changed, cut out, doubled or swapped, or its end gone."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        place = random_.randrange(len(changed) or 1)
        changed = changed or bytearray(b"\0")
        length = random_.choice((1, 1, 2, 4, 64))
        match random_.randrange(6):
            case 0:
                changed[place] = random_.randrange(256)
            case 1:
                changed[place] ^= 1 << random_.randrange(8)
            case 2:
                changed[place : place + length] = random_.choice((b"\xff", b"\0", b"\x7f")) * length
            case 3:
                del changed[place : place + length]
            case 4:
                changed[place:place] = changed[place : place + length]
            case 5:
                changed = changed[: max(place, 12)]
    return bytes(changed)


def survived(count, seed):
    random_ = random.Random(seed)
    decoder = ImageDecoder(LIMITS)
    decoded, refused = 0, []
    with contextlib.closing(decoder):
        for index in range(count):
            data = mutant(random_, random_.choice(originals()))
            begun = time.monotonic()
            try:
                image = decoder.decode(data, f"messages[0].content[{index}]")
            except RequestError as error:
                refused.append(str(error))
            else:
                decoded += 1
                assert len(image.pixels) == 3 * image.width * image.height
            assert time.monotonic() - begun < LIMITS.decode_seconds
        assert decoder.decode(originals()[0], "x").width == 48  # it still runs
    assert [message for message in refused if not WORDS.match(message)] == []
    return decoded


def test_thirty_mutants():
    assert 0 < survived(30, seed=1) < 30


@pytest.mark.nightly
def test_five_hundred_mutants():
    assert 50 < survived(500, seed=2) < 450
