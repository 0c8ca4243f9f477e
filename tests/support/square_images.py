"""A model's program that processes images, to squares; by its settings, with a mistake."""

from __future__ import annotations

import os


def start(settings):
    """Return a function that cuts or repeats images to `side`; `mistake` may be one's name."""
    side, mistake = settings["side"], settings.get("mistake")

    def process(image):
        places = [(x % image.width, y % image.height) for y in range(side) for x in range(side)]
        pixels = b"".join(bytes(image.getpixel(place)) for place in places)
        if mistake == "text":
            return pixels.hex()
        if mistake == "own size":
            return image.tobytes()
        if mistake == "noise":
            return os.urandom(len(pixels))
        return pixels

    return process
