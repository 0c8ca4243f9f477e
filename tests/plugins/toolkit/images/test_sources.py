"""The forms in which users have images, and which of them are taken."""

from __future__ import annotations

import base64
import os

import numpy as np
import pytest
from PIL import Image as Pillow
from support.pictures import data_url, encoded, gradient

from hardpoint.plugins import RequestError
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import Image, ImageSource
from hardpoint.toolkit.images import ImageReader

PICTURE = gradient()
DATA = encoded(PICTURE)
WHOLE = Image(PICTURE.width, PICTURE.height, PICTURE.tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    permitted = tmp_path_factory.mktemp("permitted")
    (permitted / "a.png").write_bytes(DATA)
    (permitted / "b.txt").write_text("no image")
    (permitted / "inner").mkdir()
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.png").write_bytes(DATA)
    (permitted / "link.png").symlink_to(outside / "secret.png")
    (permitted / "way").symlink_to(outside)
    (permitted / "round").symlink_to(permitted / "round")
    os.mkfifo(permitted / "pipe.png")
    return permitted


@pytest.fixture(scope="module")
def reader(folder):
    made = ImageReader(ImagesConfig(folders=[str(folder)], max_bytes=100_000, max_pixels=10_000))
    yield made
    made.close()


def read(reader, source):
    return reader.read([("messages[0].content[1].image", source)])[0]


def refused(reader, source):
    with pytest.raises(RequestError) as caught:
        read(reader, source)
    assert str(caught.value).startswith("messages[0].content[1].image: ")
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        bytearray(DATA),
        memoryview(DATA),
        data_url(DATA),
        data_url(DATA, ""),
        data_url(DATA, "text/plain;charset=x"),
        data_url(DATA).replace("data:", "DATA:").replace("base64", "BASE64"),
        PICTURE,
        PICTURE.convert("RGBA"),
        np.asarray(PICTURE),
        np.asarray(PICTURE)[::-1][::-1],
        WHOLE,
        ImageSource(data_url(DATA), "input[0]"),
    ],
    ids=lambda source: type(source).__name__,
)
def test_forms_of_one_image_are_the_same(reader, source):
    assert read(reader, source) == WHOLE
    assert read(reader, source).content_hash == WHOLE.content_hash


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("data:image/png," + "A" * 8, "expected a data: URL with base64"),
        ("data:;base64", "expected a data: URL with base64, data:image/png;base64,..., got"),
        ("data:;base64,AAA", "expected base64 after the comma"),
        ("data:;base64,A-_A", "expected base64 after the comma"),
        ("data:;base64,AA AA", "expected base64 after the comma"),
        ("data:;base64,ÄÄÄÄ", "expected base64 after the comma"),
        ("data:;base64,AA==AAAA", "expected base64 after the comma"),
        ("data:;base64,", "got nothing"),
        ("data:;base64," + "A" * 200_000, "at most 100000 bytes (images.max_bytes), got about"),
        ("https://example.com/a.png", "(images.remote.enabled)"),
        ("ftp://example.com/a.png", "(images.remote.enabled)"),
        ("file://[x", "expected a file: URL such as file:///folder/image.png, got 'file://[x'"),
        ("file://\u2100/a.png", "expected a file: URL such as"),
        (None, "expected a data: URL, bytes of an encoded image"),
        (7, "got int"),
        (["x"], "got list"),
        (np.zeros((2, 2, 3)), "expected a uint8 array [height, width, 3], got float64 [2, 2, 3]"),
        (np.zeros((2, 2), np.uint8), "got uint8 [2, 2]"),
        (np.zeros((2, 2, 4), np.uint8), "got uint8 [2, 2, 4]"),
        (np.zeros((0, 2, 3), np.uint8), "got uint8 [0, 2, 3]"),
        (np.zeros((101, 100, 3), np.uint8), "at most 10000 pixels"),
        (Pillow.new("RGB", (101, 100)), "at most 10000 pixels"),
        (Pillow.new("RGB", (0, 1)), "expected an image with pixels"),
        (Image(2, 2, b"x"), "expected 3 * width * height bytes of pixels, got 1 for 2 x 2"),
        (Image(-1, -1, b"xxx"), "expected 3 * width * height"),
    ],
)
def test_other_forms_are_refused(reader, source, words):
    assert words in refused(reader, source)


def test_an_image_that_a_server_hands_over_has_its_own_place(reader):
    with pytest.raises(RequestError, match=r"^input\[3\]\.image_url: expected base64"):
        read(reader, ImageSource("data:;base64,?", "input[3].image_url"))


def test_paths_lead_into_permitted_folders(reader, folder, monkeypatch):
    for path in (
        folder / "a.png",
        str(folder / "inner" / ".." / "a.png"),
        f"file://{folder}/a.png",
    ):
        assert read(reader, path) == WHOLE
    monkeypatch.chdir(folder)
    assert read(reader, "a.png") == WHOLE
    assert "expected an image in the format" in refused(reader, folder / "b.txt")


NOWHERE = ["link.png", "way/secret.png", "round", "../outside/secret.png", "inner/../../x", "\0"]
NOWHERE += ["\ud800"]
ELSEWHERE = ["/etc/passwd", "/proc/self/environ", "~/x.png", "../x.png", "file:///etc/passwd"]
ELSEWHERE += ["~x\0/y", "~\ud800/y"]


@pytest.mark.parametrize("name", [*NOWHERE, *ELSEWHERE])
def test_and_nowhere_else(reader, folder, name):
    paths = [name] if name in ELSEWHERE else [folder / name, f"file://{folder}/{name}"]
    for path in paths:
        message = refused(reader, path)
        assert message.endswith("expected a path in one of images.folders")
        assert str(folder) not in message  # where it would lead is the operator's to know
    assert "without a host" in refused(reader, f"file://host{folder}/a.png")


@pytest.mark.parametrize("name", ["missing.png", "inner", "pipe.png"])
def test_what_is_no_file_is_not_waited_for(reader, folder, name):
    message = refused(reader, folder / name)
    assert message.endswith("expected the path of a file that can be read")


def test_no_folder_is_permitted_by_default(folder):
    with ImageReaderOf(ImagesConfig()) as reader:
        assert refused(reader, folder / "a.png").endswith("images.folders, which is empty")


class ImageReaderOf:
    def __init__(self, limits):
        self.reader = ImageReader(limits)

    def __enter__(self):
        return self.reader

    def __exit__(self, *error):
        self.reader.close()


def test_limits_of_a_prompt_are_checked_before_and_while_it_is_read():
    with ImageReaderOf(ImagesConfig(max_items=2, max_total_pixels=30)) as reader:
        assert reader.read([("a", WHOLE)]) == [WHOLE]
        with pytest.raises(RequestError, match=r"^b: .*at most 30 pixels together .*total_pixels"):
            reader.read([("a", WHOLE), ("b", WHOLE)])
        with pytest.raises(RequestError, match=r"^c: expected at most 2 images .*max_items.*got 3"):
            reader.read([("a", "data:?"), ("b", "data:?"), ("c", "data:?")])


def test_base64_of_urls_with_padding_of_each_length(reader):
    for extra in range(3):
        padded = DATA + b"\0" * extra
        assert read(reader, f"data:;base64,{base64.b64encode(padded).decode()}") == WHOLE
