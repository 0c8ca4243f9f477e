"""Small functions of vLLM's utilities that programs import."""

from __future__ import annotations

import base64
import functools
import io
import logging
import random
import socket
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from hardpoint.errors import RequestError

VLLMValidationError = RequestError
"""The error for wrong parameters of a request; a ValueError in both engines."""


class GenerationError(Exception):
    """An error of a generation; Hardpoint raises the errors of `hardpoint.errors`."""


class UsageContext(StrEnum):
    """Where an engine is used; no usage is collected."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class LoggingStatLogger:
    """vLLM's stat logger for logs: the sink "log". Derive others from StatLoggerBase."""


class PrometheusStatLogger:
    """vLLM's stat logger for Prometheus: the sink "prometheus"."""


class Counter:
    """Numbers from `start` on, one at each `next`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number = self.counter
        self.counter += 1
        return number

    def reset(self) -> None:
        """Start at 0 again."""
        self.counter = 0


def random_uuid() -> str:
    """Return a new id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a name, which also has `debug_once`, `info_once` and `warning_once`."""
    named = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(named, f"{level}_once", functools.cache(_without_scope(getattr(named, level))))
    return named


def _without_scope(log: Callable[..., None]) -> Callable[..., None]:
    def call(message: str, *args: Any, scope: str | None = None) -> None:
        del scope  # of ranks, which log in their own processes
        log(message, *args)

    return call


logger = init_logger("vllm")


def get_ip() -> str:
    """Return an address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 80))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def print_embeddings(vector: list[float]) -> None:
    """Print the beginning and the size of a vector."""
    print(f"Embeddings: [{', '.join(f'{x:.4f}' for x in vector[:4])}, ...] (size={len(vector)})")


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch in this process."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def encode_image_base64(image: Any, format: str = "PNG") -> str:
    """Return an image of PIL as a base64 text."""
    buffer = io.BytesIO()
    image.save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode()


def encode_image_url(image: Any, format: str = "PNG") -> str:
    """Return an image of PIL as a `data:` URL."""
    return f"data:image/{format.lower()};base64,{encode_image_base64(image, format)}"


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """Return an image of PIL in a mode, on a white background."""
    if image.mode == to_mode:
        return image
    if image.mode == "RGBA" and to_mode == "RGB":
        from PIL import Image  # noqa: PLC0415

        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert(to_mode)


def fetch_image(image_url: str, **_: Any) -> Any:
    """Return the image of a `data:` URL or a path as one of PIL.

    Raises:
        RequestError: the URL is of another kind; this function opens no connection.
    """
    from PIL import Image  # noqa: PLC0415

    if image_url.startswith("data:"):
        return Image.open(io.BytesIO(base64.b64decode(image_url.partition(",")[2])))
    if "://" in image_url and not image_url.startswith("file://"):
        raise RequestError(
            f"image_url: expected a data: URL or a path, got {image_url!r}; give the URL in a "
            f"message instead, where images.remote of the configuration allows it"
        )
    return Image.open(image_url.removeprefix("file://"))
