"""The processor of a model in the decoder process: its results and its faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.internals import limited_process_of
from support.pictures import data_url, encoded, gradient

from hardpoint.plugins import RequestError
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import Image, ImageSource, ProcessedImage
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.toolkit.images import ImageReader

PROGRAM = """
import time

def start(settings):
    kept = []
    def process(image):
        if image.width == settings["fault"]:
            raise ValueError("it is too wide")
        if image.width == settings["slow"]:
            time.sleep(60)
        if image.width == settings["large"]:
            kept.append(bytes(1 << 31))
        if image.width == settings["text"]:
            return "pixels"
        if image.width == settings["ends"]:
            __import__("os")._exit(3)
        resized = image.resize((4, 4))
        return resized.tobytes()[: -3 if image.width == settings["short"] else None]
    return process
"""
WIDTHS = {"fault": 11, "slow": 12, "large": 13, "text": 14, "ends": 15, "short": 16}


class Small(MediaFormat):
    item_shape = (4, 4, 3)
    settings = "small"
    processor_settings = WIDTHS


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    made = Small()
    path = tmp_path_factory.mktemp("program") / "processor.py"
    path.write_text(PROGRAM)
    made.processor = str(path)
    return made


LIMITS = ImagesConfig(max_pixels=10_000, max_total_bytes=20_000, decode_seconds=60.0)


@pytest.fixture(scope="module")
def reader(media):
    made = ImageReader(LIMITS, media=media)
    yield made
    made.close()


def test_all_forms_of_an_image_are_processed_and_known_by_their_content(reader):
    picture = gradient(20, 10)
    array = np.asarray(picture)
    whole = Image(20, 10, array.tobytes())
    expected = ProcessedImage(20, 10, whole.content_hash, "small", picture.resize((4, 4)).tobytes())
    url = data_url(encoded(picture))
    forms = [picture, array, whole, encoded(picture), url, ImageSource(url, "y"), expected]
    results = reader.read([(f"x[{index}]", image) for index, image in enumerate(forms)])
    assert results == [expected] * len(forms)


TOO_MUCH = r"takes more than 60 s \(images.decode_seconds\) or too much memory$"
REFUSED = {
    "fault": r"^x: the model's image processor failed: ValueError: it is too wide$",
    "slow": f"^x: (decoding and )?processing it {TOO_MUCH}",
    "large": f"^x: (decoding and )?processing it {TOO_MUCH}",
    "ends": f"^x: (decoding and )?processing it {TOO_MUCH}",
    "text": r"^x: the model's image processor failed: TypeError: expected bytes, got str$",
    "short": r"^x: the model's image processor made 45 bytes of it, expected 48, uint8 \[4, 4, 3\]",
}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_fault_names_the_image_and_ends_nothing_else(reader, monkeypatch, name, is_encoded):
    picture = gradient(WIDTHS[name], 5)
    with monkeypatch.context() as patch:
        if name == "slow":
            patch.setattr(limited_process_of(reader._decoder), "_seconds", 0.2)
        with pytest.raises(RequestError, match=REFUSED[name]) as caught:
            reader.read([("x", encoded(picture) if is_encoded else picture)])
    assert ("decoding and" in str(caught.value)) == (is_encoded and "takes" in REFUSED[name])
    (processed,) = reader.read([("x", gradient(9, 9))])
    assert processed.data == gradient(9, 9).resize((4, 4)).tobytes()


def test_a_damaged_image_reaches_no_processor(reader):
    with pytest.raises(RequestError, match="^x: expected a whole image; this PNG image is damaged"):
        reader.read([("x", encoded(gradient(11, 5))[:-30])])


def test_encoded_images_are_limited_together(reader):
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    from PIL import Image as Pillow

    data = encoded(Pillow.fromarray(noise))
    assert 10_000 < len(data) < 20_000
    assert len(reader.read([("a", data), ("b", noise)])) == 2
    words = (
        "b: expected images of at most 20000 bytes together in a prompt (images.max_total_bytes)"
    )
    with pytest.raises(RequestError, match=f"^{re.escape(words)}, got more"):
        reader.read([("a", data), ("b", data)])


@pytest.mark.parametrize(
    "image",
    [
        ProcessedImage(4, 4, "00", "another", bytes(48)),
        ProcessedImage(4, 4, "00", "small", bytes(47)),
    ],
)
def test_what_another_model_has_made_is_refused(reader, image):
    with pytest.raises(RequestError, match="^x: expected an image that this model's processor has"):
        reader.read([("x", image)])


def test_nor_is_it_taken_without_a_model():
    with pytest.raises(RequestError, match="^x: expected an image that this model's processor has"):
        ImageReader(ImagesConfig()).read([("x", ProcessedImage(4, 4, "00", "small", bytes(48)))])
