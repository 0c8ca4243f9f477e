"""Every built-in tokenizer and reasoning parser passes the public conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builtins.tokenizer_harness import write_gguf
from support.searching import kit_examples

from hardpoint.builtin_plugins.reasoning import ThinkTags
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.testing import ReasoningParserSuite, TokenizerSuite

pytest_plugins = ["hardpoint.testing"]


class TestTransformers(TokenizerSuite):
    examples = kit_examples()
    tokenizer = TransformersTokenizer

    @pytest.fixture(autouse=True)
    def _files(self, scripted: Path) -> None:
        type(self).files = scripted


class TestGGUF(TokenizerSuite):
    examples = kit_examples(0.3)
    tokenizer = TransformersTokenizer

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        type(self).files = write_gguf(tmp_path / "t.gguf")


class TestThinkTags(ReasoningParserSuite):
    examples = kit_examples()
    parser = ThinkTags


class TestOtherTags(ReasoningParserSuite):
    examples = kit_examples(0.3)
    parser = ThinkTags
    options = {"start": "[THINK]", "end": "[/THINK]", "starts_inside": True}
