"""Every built-in tokenizer passes the public conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builtins.tokenizer_harness import write_gguf
from support.searching import kit_examples

from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.testing import TokenizerSuite
from hardpoint.testing.scripted_tokenizer import ScriptedTokenizer

pytest_plugins = ["hardpoint.testing"]


class TestTransformers(TokenizerSuite):
    examples = kit_examples()
    tokenizer = TransformersTokenizer

    @pytest.fixture(autouse=True)
    def _files(self, scripted: Path) -> None:
        type(self).files = scripted


class TestScripted(TokenizerSuite):
    examples = kit_examples()
    tokenizer = ScriptedTokenizer

    @pytest.fixture(autouse=True)
    def _files(self, scripted: Path) -> None:
        type(self).files = scripted


class TestGGUF(TokenizerSuite):
    examples = kit_examples(0.3)
    tokenizer = TransformersTokenizer

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        type(self).files = write_gguf(tmp_path / "t.gguf")
