"""The program that runs the processor of a checkpoint on an image, in a limited process.

The result is the number of bytes of a description in JSON, the description, and the numbers of the
arrays: `token_ids` of the tokens of an image in a prompt, and name, dtype and shape of each array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<I")
_TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def start(settings: dict[str, Any]) -> Callable[[Any], tuple[tuple[int, ...], bytes]]:
    """Return the function from an image to its tokens and to the arrays for the vision tower.

    Args:
        settings: `folder` of the model, and the text `placeholder` of an image.
    """
    try:
        processor = _processor(settings["folder"])
    except Exception as cause:  # the first image gets the error, since a start has no answer
        return _raising(cause)
    added = set(processor.tokenizer.get_added_vocab().values())
    placeholder: str = settings["placeholder"]

    def process(image: Any) -> tuple[tuple[int, ...], bytes]:
        result = processor(
            text=[placeholder], images=[[image]], return_tensors="np", add_special_tokens=False
        )
        token_ids = result["input_ids"][0].tolist()
        places = [place for place, token in enumerate(token_ids) if token in added]
        arrays = {
            name: value
            for name, value in result.items()
            if name not in _TEXT_ARRAYS and hasattr(value, "tobytes")
        }
        description = {
            "token_ids": token_ids[places[0] : places[-1] + 1],
            "arrays": {name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()},
        }
        head = json.dumps(description).encode()
        data = b"".join([LENGTH.pack(len(head)), head, *(a.tobytes() for a in arrays.values())])
        return (len(data),), data

    return process


def _raising(cause: Exception) -> Callable[[Any], tuple[tuple[int, ...], bytes]]:
    def process(image: Any) -> tuple[tuple[int, ...], bytes]:  # noqa: ARG001
        raise cause

    return process


def _processor(folder: str) -> Any:
    import transformers  # noqa: PLC0415 - in the limited process alone

    options = {"local_files_only": True, "trust_remote_code": False}
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
    processor = transformers.AutoProcessor.from_pretrained(folder, **options)
    processor.image_processor = images  # even if torchvision is installed
    return processor
