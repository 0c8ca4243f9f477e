"""The data file of the families, of which scripts/reference makes a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import transformers

from .survey import Family

DATA = Path(__file__).with_name("families.json")


@dataclass(frozen=True)
class Data:
    """Results of runs.

    Attributes:
        transformers: its version, of the last run.
        families: sorted by name.
    """

    transformers: str
    families: list[Family]


def read_data() -> Data:
    """Return the results of the last runs."""
    return msgspec.json.decode(DATA.read_bytes(), type=Data)


def write(families: Iterable[Family]) -> None:
    """Write the results of runs."""
    data = Data(transformers.__version__, sorted(families, key=lambda family: family.name))
    rows = b",\n".join(msgspec.json.encode(family) for family in data.families)
    version = msgspec.json.encode(data.transformers)
    DATA.write_bytes(b'{"transformers":' + version + b',"families":[\n' + rows + b"\n]}\n")
