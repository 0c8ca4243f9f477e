"""`hardpoint embed`: vectors of texts and of files, as lines of JSON."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
from support.scripted_folder import write_config

from hardpoint import LLM
from hardpoint.cli import main
from hardpoint.testing import scripted_config


@pytest.fixture
def folder(tmp_path, scripted):
    write_config(tmp_path, scripted)
    return tmp_path


@pytest.fixture(scope="module")
def vectors(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        texts = ["one", "two", "three"]
        return dict(zip(texts, (o.outputs for o in llm.embed(texts)), strict=True))


@pytest.fixture
def embed(folder, monkeypatch, capsys):
    """Return a function that runs the command, and returns its output or its errors."""
    monkeypatch.chdir(folder)

    def run(*arguments, status=0, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        found = main(["-q", "embed", *arguments]), *capsys.readouterr()
        assert found[0] == status, found[2]
        return found[1 if status == 0 else 2]

    return run


def test_vectors_of_texts(embed, vectors):
    lines = [json.loads(line) for line in embed("one", "three").splitlines()]
    assert [(line["id"], line["prompt_tokens"]) for line in lines] == [(1, 3), (2, 5)]
    for line, text in zip(lines, ("one", "three"), strict=True):
        np.testing.assert_allclose(line["embedding"], vectors[text], atol=1e-6)
    (raw,) = embed("one", "--raw", "--pooler", "mean").splitlines()
    assert not np.allclose(json.loads(raw)["embedding"], vectors["one"], atol=1e-3)


def test_vectors_of_a_file(folder, embed, scripted, vectors):
    with LLM(config=scripted_config(scripted)) as llm:
        two = llm.tokenizer.encode("two")
    given = ['"one"', json.dumps({"id": "b", "prompt": two}), "", '{"prompt": "three"}']
    (folder / "texts.jsonl").write_text("\n".join(given))
    assert embed("--file", "texts.jsonl", "--output", "vectors.jsonl") == ""
    lines = [json.loads(line) for line in (folder / "vectors.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, "b", 4]
    for line, text in zip(lines, ("one", "two", "three"), strict=True):
        np.testing.assert_allclose(line["embedding"], vectors[text], atol=1e-6)
    message = embed("--file", "texts.jsonl", "--output", "vectors.jsonl", status=2)
    assert "--output: expected a new file, 'vectors.jsonl' exists" in message


def test_many_lines_of_text(embed, vectors):
    text = "one\ntwo\n" * 300
    lines = embed("--file", "-", "--format", "text", stdin=text).splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, 601))
    np.testing.assert_allclose(json.loads(lines[-1])["embedding"], vectors["two"], atol=1e-6)


def test_a_wrong_text_has_its_number(folder, embed):
    """Texts before its group have their vectors."""
    given = ['"one"'] * 320
    given[300] = '{"prompt": [999999]}'
    (folder / "texts.jsonl").write_text("\n".join(given))
    message = embed("--file", "texts.jsonl", "--output", "vectors.jsonl", status=2)
    assert "error: texts.jsonl:301: prompt_token_ids[0]: expected" in message
    assert len((folder / "vectors.jsonl").read_text().splitlines()) == 256
    texts = ["one"] * 300
    texts[290] = "two " * 5000
    assert "error: prompts[290]: " in embed(*texts, status=2)


def test_a_run_that_fails_at_once_leaves_no_file(folder, embed):
    for wrong in (["--model", "typo"], ["--pooler", "men"]):
        embed("one", "--output", "vectors.jsonl", *wrong, status=2)
        assert not (folder / "vectors.jsonl").exists()
    embed("one", "--output", "vectors.jsonl")


WRONG = [
    ([], "text: expected at least one TEXT, or --file PATH"),
    (["x", "--file", "y"], "text: expected at least one TEXT, or --file PATH"),
    (["x", "--format", "text"], "--format: it is for texts of a file; add --file PATH"),
    (["--file", "none.jsonl"], "--file: 'none.jsonl' cannot be read: No such file"),
    (["x", "--pooler", "men"], "prompts[0]: pooler: expected one of cls, last, mean"),
    (["x", "--dimensions", "4"], "dimensions: expected none, because the model was not trained"),
    (["x", "--output", "no/such/file"], "--output: 'no/such/file' cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_calls_are_explained(embed, arguments, message):
    assert message in embed(*arguments, status=2)
