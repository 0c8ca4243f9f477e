"""Files of a model on the Hugging Face hub: `OWNER/NAME`, or `OWNER/NAME:QUANT` of GGUF files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hardpoint.errors import ModelError

__all__ = [
    "HubName",
    "check_hub_settings",
    "fetch_files",
    "hub_name",
    "quantization_of",
    "select_files",
]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?::([\w.-]+))?")
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+_\w+|TQ\d_\d|MXFP4\w*|BF16|F16|F32|FP16|FP32))"
    r"(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[\x21-\x7e]+")
_PROJECTORS = "*[mM][mM][pP][rR][oO][jJ]*"  # the image encoders of GGUF models
_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


class HubName(NamedTuple):
    """A model's name on the hub.

    Attributes:
        repo: `OWNER/NAME`.
        quantization: quantization of its GGUF files, such as `Q4_K_M`; None is safetensors.
    """

    repo: str
    quantization: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quantization is None else f"{self.repo}:{self.quantization}"


def hub_name(text: str) -> HubName | None:
    """Return the name in a text; None if the text is not a name of the hub."""
    match = _NAME.fullmatch(text)
    return None if match is None or text.endswith(".gguf") else HubName(match[1], match[2])


def quantization_of(file: str) -> str | None:
    """Return the quantization in the name of a GGUF file; None if it has none, or is no model."""
    match = None if fnmatchcase(file, _PROJECTORS) else _QUANTIZATION.search(file)
    return None if match is None else match[1].upper()


def select_files(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the files of a repository that the model needs.

    Raises:
        ModelError: there are no weights, or none of the quantization; the message lists the
            quantizations that exist.
    """
    files = sorted(files)
    gguf = [file for file in files if file.endswith(".gguf") and not fnmatchcase(file, _PROJECTORS)]
    known = ", ".join(sorted({label for file in gguf if (label := quantization_of(file))}))
    if name.quantization is None:
        chosen = [file for file in files if any(fnmatchcase(file, p) for p in _PATTERNS)]
        if any(file.endswith(".safetensors") for file in chosen):
            return chosen
        if not gguf:
            raise ModelError(f"{name}: expected .safetensors or .gguf files, found neither")
        raise ModelError(
            f"{name}: it has GGUF files alone; add a quantization, as in "
            f"{name.repo}:{known.partition(',')[0] or 'NAME'} (found: {known or ', '.join(gguf)})"
        )
    wanted = name.quantization.upper()
    chosen = [file for file in gguf if quantization_of(file) == wanted]
    if not chosen:
        raise ModelError(
            f"{name}: there is no GGUF file of the quantization {name.quantization}; found: "
            f"{known or 'none'}"
        )
    return chosen


def check_hub_settings() -> None:
    """Check HF_ENDPOINT and the token of the hub before huggingface_hub reads them.

    Its import fails with a malformed endpoint, and its errors contain a malformed token.

    Raises:
        ModelError: one is malformed; the message does not repeat the token.
    """
    if endpoint := os.environ.get("HF_ENDPOINT"):
        try:
            parts = urlsplit(endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ModelError(
                f"HF_ENDPOINT: expected a URL such as https://huggingface.co, got {endpoint!r}"
            )
    from huggingface_hub import get_token  # noqa: PLC0415 - as below

    token = get_token()
    if token is not None and not _TOKEN.fullmatch(token):
        raise ModelError(
            "HF_TOKEN: expected a token of visible ASCII characters, got one with a blank, a line "
            "end or another character, there or in the file of `hf auth login`"
        )


def fetch_files(name: HubName) -> Path:
    """Return the model's folder, or its GGUF file, from the cache; download missing files.

    Raises:
        ModelError: the repository has no such files.
        Exception: an error of huggingface_hub.
    """
    # Imported here because it takes time and only models of the hub need it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    if name.quantization is None:
        return Path(snapshot_download(name.repo, allow_patterns=list(_PATTERNS)))
    folder = Path(
        snapshot_download(
            name.repo,
            allow_patterns=_gguf_patterns(name.quantization),
            # `*-Q4_K_XL.gguf` matches files of UD-Q4_K_XL, too.
            ignore_patterns=[_PROJECTORS, *_gguf_patterns(f"UD-{name.quantization}")],
        )
    )
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    first = [file for file in select_files(name, files) if not _PART.search(file)]
    return folder / first[0]


def _gguf_patterns(quantization: str) -> list[str]:
    """Return patterns of the files of a quantization, in which case does not count."""
    word = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in quantization)
    ends = (".gguf", "-[0-9]*-of-[0-9]*.gguf")
    return [f"{start}{word}{end}" for start in ("", "*[-._/]") for end in ends]
