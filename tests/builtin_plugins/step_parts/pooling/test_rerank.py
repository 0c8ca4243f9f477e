"""Rerank, score and classify over HTTP, by a model that reads texts in pairs."""

from __future__ import annotations

import pytest
from support.encoders import LIMIT, TABLE
from support.http_server import running
from support.pairs import PAIRS, write_cross_encoder

from hardpoint import AsyncLLM

DOCUMENTS = ["an answer", {"text": "b"}, "some other answer", "an answer"]
TEXTS = ["an answer", "b", "some other answer", "an answer"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, and the CrossEncoder that it serves."""
    folder = tmp_path_factory.mktemp("served")
    oracle = write_cross_encoder(folder, "Bert")
    config = {"model": str(folder / "model"), **TABLE, "stats": {"sinks": []}}
    config["server"] = {"port": 0, "access_log": "off", "served_names": ["ranker"]}
    with running(AsyncLLM(config=config)) as server:
        yield server, oracle


def post(server, path, status=200, **body):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_sentence_transformers_does(served, path):
    server, oracle = served
    answer = post(server, path, query="which one?", documents=DOCUMENTS)
    scores = oracle.predict([("which one?", text) for text in TEXTS])
    relevances = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert relevances == pytest.approx(dict(enumerate(scores.tolist())), abs=1e-5)
    expected = sorted(range(4), key=lambda index: (-relevances[index], index))
    assert [entry["index"] for entry in answer["results"]] == expected
    tokens = oracle.tokenizer([("which one?", text) for text in TEXTS])["input_ids"]
    assert answer["usage"]["total_tokens"] == sum(map(len, tokens))


def test_what_a_client_of_cohere_sends_is_understood(served):
    # `cohere.ClientV2(base_url=...).rerank(model=, query=, documents=, top_n=)` sends these fields.
    server, _ = served
    body = {"model": "ranker", "query": "which one?", "documents": TEXTS, "top_n": 2}
    answer = post(server, "/v2/rerank", **body)
    assert len(answer["results"]) == 2
    assert {"id", "results"} <= answer.keys()
    assert {"index", "relevance_score"} <= answer["results"][0].keys()


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_pairs(served, path):
    server, oracle = served
    firsts, seconds = zip(*PAIRS, strict=True)
    answer = post(server, path, text_1=list(firsts), text_2=list(seconds))
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == pytest.approx(oracle.predict(PAIRS).tolist(), abs=1e-5)
    raw = post(server, path, text_1="a", text_2=["b"], use_activation=False)["data"][0]["score"]
    (score,) = oracle.predict([("a", "b")], activation_fn=lambda logits: logits)
    assert raw == pytest.approx(float(score), abs=1e-5)


def test_pairs_are_classified_beside_texts_and_ids(served):
    server, oracle = served
    pair = {"text": "a", "text_pair": "b"}
    (expected,) = oracle.predict([("a", "b")])
    answer = post(server, "/v1/classify", input=[pair, "a", [5, 6]])
    assert answer["data"][0]["probs"] == pytest.approx([float(expected)], abs=1e-5)
    assert post(server, "/v1/classify", input=pair)["data"] == answer["data"][:1]


WRONG = [
    ("/v1/score", {"text_1": "a", "text_2": ["b", [5]]}, "text_2[1]: expected a text, for the mod"),
    ("/v1/score", {"text_1": "a", "text_2": "b" * LIMIT}, "text_2: the prompt is too long"),
    ("/v1/rerank", {"query": "", "documents": ["b"]}, "query: expected a text that is not empty"),
    ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]: expected a text"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", "c" * LIMIT]},
        "documents[1]: the prompt is too long",
    ),
    (
        "/v2/rerank",
        {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3},
        "max_tokens_per_doc: not",
    ),
    ("/v1/classify", {"input": [{"text": "a"}]}, "input[0]: expected a pair of texts with `text`"),
    ("/v1/classify", {"input": {"prompt": "a"}}, "input: expected a pair of texts with `text` and"),
    (
        "/v1/classify",
        {"input": ["a", {"text": "a", "text_pair": [5]}]},
        "input[1].text_pair: expected a text, got [5]",
    ),
    ("/v1/classify", {"input": ["a", {}]}, "input[1]: expected a pair of texts with `text` and"),
    ("/v1/classify", {"input": ["a", ""]}, "not empty, or a pair of texts"),
    ("/v1/embeddings", {"input": "a"}, "embed: this model cannot do it; it can: classify, score"),
]


@pytest.mark.parametrize(("path", "body", "message"), WRONG)
def test_wrong_pairs_are_refused_with_their_place(served, path, body, message):
    assert message in post(served[0], path, 400, **body)["error"]["message"]
