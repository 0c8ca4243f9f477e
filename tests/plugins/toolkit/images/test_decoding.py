"""Encoded images become pixels: formats, colors, and rejected inputs."""

from __future__ import annotations

import contextlib
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps
from support.pictures import encoded, gradient

from hardpoint.plugins import RequestError
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.toolkit.images import ImageDecoder
from hardpoint.toolkit.images.header import read_header

PLACE = "messages[1].content[0].image_url.url"
LIMITS = ImagesConfig(max_pixels=10_000, max_aspect_ratio=20.0, max_bytes=100_000)


@pytest.fixture(scope="module")
def decoder():
    made = ImageDecoder(LIMITS)
    yield made
    made.close()


def pixels(image):
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def refused(decoder, data):
    with pytest.raises(RequestError) as caught:
        decoder.decode(data, PLACE)
    message = str(caught.value)
    assert message.startswith(f"{PLACE}: ")
    # Neither the library's words, nor a path, nor the address of an object.
    assert re.findall(r"PIL|Pillow|cannot identify|0x[0-9a-f]{6}|/usr|/tmp|\.py", message) == []
    return message


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_formats_without_loss_keep_every_pixel(decoder, format):
    image = gradient(13, 7)
    options = {"lossless": True} if format == "WEBP" else {}
    decoded = decoder.decode(encoded(image, format, **options), PLACE)
    assert (decoded.width, decoded.height) == (13, 7)
    assert (pixels(decoded) == np.asarray(image)).all()


@pytest.mark.parametrize("format", ["JPEG", "GIF"])
def test_others_are_what_pillow_makes_of_them(decoder, format, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(encoded(gradient(33, 17), format))
    decoded = decoder.decode(path.read_bytes(), PLACE)
    assert (pixels(decoded) == np.asarray(Pillow.open(path).convert("RGB"))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_exif_is_applied(decoder, orientation):
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    image = gradient(12, 5)
    for format in ("PNG", "WEBP"):
        options = {"lossless": True} if format == "WEBP" else {}
        data = encoded(image, format, exif=exif, **options)
        decoded = decoder.decode(data, PLACE)
        turned = image.copy()
        turned.getexif()[0x0112] = orientation
        assert (pixels(decoded) == np.asarray(ImageOps.exif_transpose(turned))).all()


def test_alpha_is_dropped_palettes_and_cmyk_become_colours(decoder):
    clear = Pillow.new("RGBA", (2, 1), (10, 20, 30, 0))
    assert pixels(decoder.decode(encoded(clear), PLACE))[0, 0].tolist() == [10, 20, 30]
    palette = gradient(8, 8).quantize(16)
    pixels_of = pixels(decoder.decode(encoded(palette), PLACE))
    assert (pixels_of == np.asarray(palette.convert("RGB"))).all()
    grey = Pillow.new("LA", (1, 1), (77, 3))
    assert pixels(decoder.decode(encoded(grey), PLACE))[0, 0].tolist() == [77, 77, 77]
    ink = Pillow.new("CMYK", (8, 8), (0, 255, 0, 0))
    pixels_of = pixels(decoder.decode(encoded(ink, "JPEG"), PLACE))
    assert np.abs(pixels_of[0, 0].astype(int) - [255, 0, 255]).max() < 8


def test_of_16_bits_the_high_ones_are_kept(decoder):
    values = np.arange(0, 65536, 8, dtype=np.uint16).reshape(64, 128)
    pixels_of = pixels(decoder.decode(encoded(Pillow.fromarray(values)), PLACE))
    assert (pixels_of[:, :, 0] == values >> 8).all()
    assert (pixels_of[:, :, 0] == pixels_of[:, :, 2]).all()


def test_of_a_gif_the_first_frame_is_taken_and_other_animations_are_refused(decoder):
    frames = [Pillow.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]}
    pixels_of = pixels(decoder.decode(encoded(frames[0], "GIF", **options), PLACE))
    assert pixels_of[0, 0].tolist() == [255, 0, 0]
    for format in ("PNG", "WEBP"):
        message = refused(decoder, encoded(frames[0], format, **options))
        assert "expected an image of one frame, got 3 frames" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"",
            "expected an image in the format PNG, JPEG, WEBP or GIF, by its content; got nothing",
        ),
        (b"<svg xmlns='x'/>", "got another format"),
        (b"%PDF-1.7", "got another format"),
        (encoded(gradient(), "BMP"), "got another format"),
        (encoded(gradient(), "TIFF"), "got another format"),
        (b"\x89PNG\r\n\x1a\n", "this PNG image does not begin with its size"),
        (b"\xff\xd8\xff\xd9", "this JPEG image does not begin with its size"),
        (b"\xff\xd8\xff", "this JPEG image ends before its size"),
        (b"GIF89a\x01", "this GIF image ends before its size"),
        (b"GIF89a\x00\x00\x00\x00", "this GIF image has the size 0 x 0"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "this WEBP image ends before its size"),
        (b"RIFF\x00\x00\x00\x00WEBPALPH", "this WEBP image does not begin with its size"),
        *[
            (
                encoded(gradient(20, 20), format)[:-30],
                f"this {format} image is damaged or truncated",
            )
            for format in ("PNG", "JPEG", "WEBP")
        ],
        (encoded(gradient(40, 40), "GIF")[:60], "this GIF image is damaged or truncated"),
        (b"\0" * 100_001, "at most 100000 bytes (images.max_bytes), got 100001"),
        (encoded(Pillow.new("1", (101, 100))), "at most 10000 pixels (images.max_pixels)"),
        (encoded(Pillow.new("1", (210, 10))), "20 times the shorter one (images.max_aspect_ratio)"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused(decoder, data, words):
    assert words in refused(decoder, data)


def png(width, height, *chunks):
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def test_sizes_are_known_before_anything_is_decoded(decoder):
    """Bombs: a few bytes that announce a huge image never reach the process that decodes."""
    before = decoder.pid
    bombs = [
        png(100_000, 100_000),
        b"GIF89a" + struct.pack("<HH", 65535, 65535),
        b"RIFF\0\0\0\0WEBPVP8X" + struct.pack("<II", 10, 0) + b"\xff\xff\xff" * 2,
        b"\xff\xd8\xff\xe0\x00\x02\xff\xc2\x00\x0b\x08\xff\xff\xff\xff\x03",
    ]
    for bomb in bombs:
        assert "pixels (images.max_pixels), got " in refused(decoder, bomb)
    assert decoder.pid == before
    assert decoder.decode(encoded(gradient()), PLACE).width == 6


def test_a_header_that_lies_is_found_out(decoder):
    # The frame of a GIF is larger than the image claims to be.
    gif = bytearray(encoded(Pillow.new("P", (150, 150)), "GIF"))
    assert read_header(bytes(gif)).width == 150
    gif[6:10] = struct.pack("<HH", 2, 2)
    assert read_header(bytes(gif)).width == 2
    assert "at most 10000 pixels" in refused(decoder, bytes(gif))


def test_bombs_of_frames_and_of_texts_cost_nothing(decoder):
    animation = (b"acTL", struct.pack(">II", 2_000_000_000, 0))
    data = zlib.compress(b"\0\0")
    assert "got 2000000001 frames" in refused(decoder, png(1, 1, animation, (b"IDAT", data)))
    text = (b"zTXt", b"a\0\0" + zlib.compress(b"x" * 50_000_000))
    assert "damaged or truncated" in refused(decoder, png(1, 1, text, (b"IDAT", data)))
    assert decoder.decode(encoded(gradient()), PLACE).width == 6


def test_too_slow_a_process_ends_and_the_next_image_is_decoded(monkeypatch):
    with contextlib.closing(ImageDecoder(ImagesConfig(decode_seconds=0.001))) as decoder:
        message = refused(decoder, encoded(gradient(2000, 2000)))
        assert "decoding it takes more than 0.001 s (images.decode_seconds)" in message
    assert decoder.pid is None
