"""`hardpoint embed`: vectors of texts and of files, as lines of JSON."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from support.process.forked_python import forked_python
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


def embed(folder, *arguments, status=0, stdin=""):
    command = ["-m", "hardpoint", "-q", "embed", *arguments]
    done = forked_python().run(command, folder, dict(os.environ), stdin=stdin)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_vectors_of_texts(folder, vectors):
    lines = [json.loads(line) for line in embed(folder, "one", "three").splitlines()]
    assert [(line["id"], line["prompt_tokens"]) for line in lines] == [(1, 3), (2, 5)]
    for line, text in zip(lines, ("one", "three"), strict=True):
        np.testing.assert_allclose(line["embedding"], vectors[text], atol=1e-6)
    (raw,) = embed(folder, "one", "--raw", "--pooler", "mean").splitlines()
    assert not np.allclose(json.loads(raw)["embedding"], vectors["one"], atol=1e-3)


def test_vectors_of_a_file(folder, scripted, vectors):
    with LLM(config=scripted_config(scripted)) as llm:
        two = llm.tokenizer.encode("two")
    given = ['"one"', json.dumps({"id": "b", "prompt": two}), "", '{"prompt": "three"}']
    (folder / "texts.jsonl").write_text("\n".join(given))
    assert embed(folder, "--file", "texts.jsonl", "--output", "vectors.jsonl") == ""
    lines = [json.loads(line) for line in (folder / "vectors.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, "b", 4]
    for line, text in zip(lines, ("one", "two", "three"), strict=True):
        np.testing.assert_allclose(line["embedding"], vectors[text], atol=1e-6)
    message = embed(folder, "--file", "texts.jsonl", "--output", "vectors.jsonl", status=2)
    assert "--output: expected a new file, 'vectors.jsonl' exists" in message


def test_many_lines_of_text(folder, vectors):
    text = "one\ntwo\n" * 300
    lines = embed(folder, "--file", "-", "--format", "text", stdin=text).splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, 601))
    np.testing.assert_allclose(json.loads(lines[-1])["embedding"], vectors["two"], atol=1e-6)


WRONG = [
    ([], "text: expected at least one TEXT, or --file PATH"),
    (["x", "--file", "y"], "text: expected at least one TEXT, or --file PATH"),
    (["x", "--format", "text"], "--format: it is for texts of a file; add --file PATH"),
    (["--file", "none.jsonl"], "--file: 'none.jsonl' cannot be read: No such file"),
    (["x", "--pooler", "men"], "prompts[0]: pooler: expected one of cls, last, mean"),
    (["x", "--dimensions", "4"], "dimensions: expected none, for the model was not trained"),
    (["x", "--output", "no/such/file"], "--output: 'no/such/file' cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_calls_are_explained(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    assert main(["-q", "embed", *arguments]) == 2
    assert message in capsys.readouterr().err
