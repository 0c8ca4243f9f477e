"""Spans in a program, and over HTTP."""

from __future__ import annotations

import numpy as np
import pytest
from acme_spans import Document, Spans, Summary
from acme_spans.windows import Frame, windows

from hardpoint import LLM
from hardpoint.errors import ConfigError, RequestError
from hardpoint.testing import scripted_config, serve, write_scripted_model

TEXT = "".join(f"sentence {number} of a long document. " for number in range(40))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of the scripted model."""
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def config(model, **options):
    """Return a configuration with the processor."""
    enabled = [*scripted_config(model)["plugins"]["enable"], "spans"]
    return scripted_config(model, {"plugins": {"enable": enabled}, "plugin": {"spans": options}})


def test_spans_cover_the_document_and_the_best_come_first(model):
    with LLM(config=config(model, size=50, overlap=10)) as llm:
        whole = llm.plugins.process({"text": TEXT, "vectors": True}, "spans")
        texts = [span.text for span in whole.spans]
        assert texts[0] + "".join(text[10:] for text in texts[1:]) == TEXT
        vectors = np.array([span.vector for span in whole.spans])
        alone = [output.outputs for output in llm.embed(texts)]
        assert np.allclose(vectors, alone, atol=1e-6)
        mean = np.array([len(text) for text in texts]) @ vectors
        assert np.allclose(whole.vector, mean / np.linalg.norm(mean))

        (query,) = llm.embed("of a long")
        best = llm.plugins.process(Document(text=TEXT, query="of a long", top_n=3))
        expected = sorted(vectors @ query.outputs, reverse=True)[:3]
        assert np.allclose([span.score for span in best.spans], expected, atol=1e-6)
        assert best.spans[0].text == texts[best.spans[0].index]


def test_what_is_wrong_is_named(model):
    with LLM(config=config(model, spans=3, size=50)) as llm:
        with pytest.raises(RequestError, match=r"^data.text: expected at most 3 spans, got \d+$"):
            llm.plugins.process({"text": TEXT})
        with pytest.raises(RequestError, match="^data.text: missing, and it has no default$"):
            llm.plugins.process({"query": "x"})
        with pytest.raises(
            RequestError, match=r"^data.query: expected 1 to 512 tokens, got \d{4}$"
        ):
            llm.plugins.process({"text": "a", "query": TEXT})
        assert llm.plugins.health().faults == {}
    with pytest.raises(ConfigError, match=r"plugin\.spans\.size: expected 17 to 512 tokens"):
        LLM(config=config(model, size=600))


def test_summaries_are_summarized_until_one_is_left(tmp_path):
    replies = {"Summarize: aaaa\n": "a", "Summarize: bbbb\n": "b", "Summarize: cc\n": "c"}
    folder = write_scripted_model(tmp_path, replies | {"Summarize: abc\n": "ok"})
    tables = {"plugins": {"enable": ["digest"]}, "plugin": {"digest": {"size": 4, "max_tokens": 2}}}
    with LLM(config=scripted_config(folder, tables)) as llm:
        assert llm.plugins.process({"text": "aaaabbbbcc"}) == Summary(summary="ok", rounds=2)
        with pytest.raises(RequestError, match="^data.text: missing"):
            llm.plugins.process({})
    with pytest.raises(ConfigError, match=r"plugin\.digest\.size: expected 128 to \d+ tokens"):
        LLM(config=scripted_config(folder, tables | {"plugin": {"digest": {"size": 4}}}))


def test_over_http():
    with serve({"plugins": {"enable": ["spans"]}}) as server:
        body = {"data": {"text": TEXT, "query": "document", "top_n": 1}, "io_processor": "spans"}
        answer = server.ask("/pooling", body).json()["data"]
        assert answer["spans"][0]["text"] in TEXT
        assert answer["spans"][0]["num_tokens"] <= 256
        wrong = server.ask("/pooling", {"data": {"text": ""}})
        assert wrong.status == 400
        assert wrong.json()["error"]["param"] == "data.text"


def test_windows_and_frames():
    assert list(windows(5, 10, 3)) == [(0, 5)]
    assert list(windows(10, 4, 1)) == [(0, 4), (3, 7), (6, 10)]

    class Marked:
        def encode(self, text, *, add_special_tokens=True):
            return [1, *map(ord, text), 2, 3] if add_special_tokens else [*map(ord, text)]

    frame = Frame.of(Marked())
    assert (frame.around([7]), len(frame)) == ([1, 7, 2, 3], 3)
    assert Spans.contract == 1
