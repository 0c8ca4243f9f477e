"""The package keeps every rule of the engine for its kind: the conformance kit checks it."""

import tempfile
from pathlib import Path

import pytest
from acme_corpus import Corpus

from hardpoint.testing import SpeculatorSuite, write_scripted_model

pytest_plugins = ["hardpoint.testing"]

FOLDER = Path(tempfile.mkdtemp())


@pytest.fixture(scope="module", autouse=True)
def files():
    """Documents of a few different characters, so that texts of the suite are found in them."""
    write_scripted_model(FOLDER)  # has a tokenizer.json, with a token for each byte
    (FOLDER / "one.txt").write_text('!"#$' * 50 + '!$#"!!' * 30)
    (FOLDER / "two.txt").write_text("a manual of three pages " * 20)
    yield
    for file in FOLDER.iterdir():
        file.unlink()
    FOLDER.rmdir()


class TestCorpus(SpeculatorSuite):
    speculator = Corpus
    vocab_size = 257
    options = {
        "documents": [str(FOLDER / "*.txt")],
        "tokenizer": str(FOLDER / "tokenizer.json"),
        "shortest": 1,
    }
