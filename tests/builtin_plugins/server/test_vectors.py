"""Routes that pool: embeddings, rerank, score and classify."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import openai
import pytest
from support.http_server import running
from support.scripted_server import scripted_server, server_config, write_model

from hardpoint import LLM, AsyncLLM, PoolingParams
from hardpoint.testing import scripted_config

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["say abc", "fox", "a longer text than others"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def server(folder):
    with scripted_server(folder) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def vectors(folder):
    """The vectors of an engine of its own, by text."""
    with LLM(config=scripted_config(write_model(folder / "own"))) as llm:
        return {text: llm.embed(text)[0].outputs for text in TEXTS}


def post(server, path, status=200, **body):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return response.json()


def refused(server, path, status=400, **body):
    return post(server, path, status, **body)["error"]["message"]


def test_embeddings_of_texts_and_ids_come_in_their_order(server, vectors):
    ids = post(server, "/tokenize", prompt="fox")["tokens"]
    given = ["say abc", ids, "fox"]
    answer = post(server, EMBEDDINGS, input=given, model="other", request_id="mine")
    assert answer["object"] == "list"
    assert answer["model"] == "other"
    assert answer["id"] == "embd-mine"
    for index, (entry, text) in enumerate(
        zip(answer["data"], ["say abc", "fox", "fox"], strict=True)
    ):
        assert (entry["object"], entry["index"]) == ("embedding", index)
        np.testing.assert_allclose(entry["embedding"], vectors[text], atol=1e-6)
    count = 7 + 3 + 3
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_one_text_and_one_list_of_ids(server, vectors):
    (entry,) = post(server, EMBEDDINGS, input="fox")["data"]
    ids = post(server, "/tokenize", prompt="fox")["tokens"]
    (same,) = post(server, EMBEDDINGS, input=ids)["data"]
    assert entry == same
    np.testing.assert_allclose(entry["embedding"], vectors["fox"], atol=1e-6)


def test_base64_is_float32_little_endian(server, vectors):
    (entry,) = post(server, EMBEDDINGS, input="fox", encoding_format="base64")["data"]
    data = base64.b64decode(entry["embedding"])
    numbers = struct.unpack(f"<{len(vectors['fox'])}f", data)
    np.testing.assert_array_equal(np.float32(numbers), vectors["fox"])


def test_the_openai_client(server, vectors):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(model="scripted", input=TEXTS, user="me", **form)
            for entry, text in zip(found.data, TEXTS, strict=True):
                vector = entry.embedding
                if form.get("encoding_format") == "base64":
                    vector = np.frombuffer(base64.b64decode(vector), "<f4")
                np.testing.assert_allclose(vector, vectors[text], atol=1e-6)
        with pytest.raises(
            openai.BadRequestError, match="dimensions: expected none, because the mod"
        ):
            client.embeddings.create(model="scripted", input="fox", dimensions=4)
        with pytest.raises(openai.NotFoundError, match="model: expected"):
            client.embeddings.create(model="another", input="fox")


@pytest.mark.nightly
def test_many_texts(server):
    texts = [f"text {number % 9}" for number in range(2048)]
    answer = post(server, EMBEDDINGS, input=texts)
    assert [entry["index"] for entry in answer["data"]] == list(range(2048))
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert all(vector == vectors[number % 9] for number, vector in enumerate(vectors))


def test_poolers_by_name(server, vectors):
    mean = post(server, EMBEDDINGS, input="fox", pooler="mean", normalize=False)["data"][0]
    assert not np.allclose(mean["embedding"], vectors["fox"], atol=1e-3)


def test_documents_are_sorted_by_a_query(server, vectors):
    documents = ["fox", {"text": "say abc"}, "a longer text than others", "fox"]
    answer = post(server, "/v1/rerank", query="fox", documents=documents)
    results = answer["results"]
    assert [entry["index"] for entry in results][:2] == [0, 3]
    scores = [entry["relevance_score"] for entry in results]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1.0)
    for entry in results:
        given = documents[entry["index"]]
        text = given["text"] if isinstance(given, dict) else given
        assert entry["document"] == {"text": text}
        cosine = float(vectors["fox"] @ vectors[text])
        assert entry["relevance_score"] == pytest.approx(cosine, abs=1e-6)
    few = post(
        server, "/v1/rerank", query="fox", documents=documents, top_n=1, return_documents=False
    )
    assert few["results"] == [{"index": 0, "relevance_score": pytest.approx(1.0)}]


def test_scores_of_one_with_each_and_of_pairs(server, vectors):
    answer = post(server, "/v1/score", text_1="fox", text_2=["fox", "say abc"])
    expected = [1.0, float(vectors["fox"] @ vectors["say abc"])]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-6)
    pairs = post(server, "/v1/score", text_1=["fox", "say abc"], text_2=["fox", "say abc"])
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1.0, 1.0])
    assert pairs["usage"]["total_tokens"] == 2 * (3 + 7)


WRONG = [
    (EMBEDDINGS, {}, "input"),
    (EMBEDDINGS, {"input": []}, "input: expected 1 to 2048 texts, got 0"),
    (EMBEDDINGS, {"input": ""}, "input: expected a text or token ids, not empty"),
    (EMBEDDINGS, {"input": [[]]}, "input[0]: expected a text or a list of token ids, not empty"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input: expected 1 to 2048 texts, got 2049"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input[1]: expected a text or a list of token ids, not emp"),
    (EMBEDDINGS, {"input": ["a", [1, "b"]]}, "input[1]: expected a text or a list of token ids"),
    (EMBEDDINGS, {"input": {"text": "a"}}, "input: expected a text, token ids, or a list of these"),
    (EMBEDDINGS, {"input": ["a", [99999]]}, "input[1]"),
    (EMBEDDINGS, {"input": ["a", [1] * 1025]}, "input[1]: the prompt is too long: 1025 tokens"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions: expected"),
    (
        EMBEDDINGS,
        {"input": "a", "dimensions": 3},
        "dimensions: expected none, because the model was",
    ),
    (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "pooler": "men"}, "pooler: expected one of cls, last, mean"),
    (
        EMBEDDINGS,
        {"input": "a", "prompt_name": "query"},
        "prompt_name: expected one of none",
    ),
    (EMBEDDINGS, {"input": "a", "inputs": "b"}, "inputs"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b", 1]}, "documents[1]: expected a text that is"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b"], "rank_fields": ["c"]},
        "rank_fields: not",
    ),
    (
        "/v1/score",
        {"text_1": ["a", "b"], "text_2": ["c"] * 3},
        "text_1: expected one text or 3",
    ),
    ("/v1/classify", {"input": "a"}, "classify: this model cannot do it; it can: generate, embed"),
]


@pytest.mark.parametrize(("path", "body", "message"), WRONG)
def test_wrong_requests_are_refused_with_the_place_of_the_field(server, path, body, message):
    assert message in refused(server, path, **body)


def test_a_prompt_of_the_whole_context_has_a_vector(server):
    answer = post(server, EMBEDDINGS, input=[[65] * 1024])
    assert answer["usage"]["total_tokens"] == 1024
    cut = post(server, EMBEDDINGS, input=[[66] * 9 + [65] * 1024], truncate_prompt_tokens=-1)
    assert cut["data"] == answer["data"]


def test_texts_are_cut_on_the_left(server):
    text = {"input": "a long text", "truncate_prompt_tokens": 4}
    cut = post(server, EMBEDDINGS, **text)
    assert post(server, EMBEDDINGS, **text, truncation_side="left")["data"] == cut["data"]
    message = refused(server, EMBEDDINGS, **text, truncation_side="right")
    assert 'truncation_side: expected "left" with truncate_prompt_tokens, got "right"' in message


def test_prompts_of_the_model_are_put_before_texts(tmp_path):
    folder = write_model(tmp_path)
    (folder / "1_Pooling").mkdir()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(config=scripted_config(folder)) as llm:
        raw = llm.encode(["q: fox", "p: fox", "fox"], PoolingParams(pooler="mean"))
        query, document, plain = (output.outputs for output in raw)
        np.testing.assert_array_equal(llm.embed("fox", prompt_name="query")[0].outputs, query)
        np.testing.assert_array_equal(llm.embed(["fox"])[0].outputs, plain)
    with running(AsyncLLM(config=server_config(folder))) as server:
        (entry,) = post(server, EMBEDDINGS, input="fox", prompt_name="query")["data"]
        np.testing.assert_allclose(entry["embedding"], query, atol=1e-6)
        (result,) = post(server, "/v1/rerank", query="fox", documents=["fox"])["results"]
        assert result["relevance_score"] == pytest.approx(float(query @ document), abs=1e-6)
        message = refused(server, EMBEDDINGS, input="fox", prompt_name="que")
        assert message == "prompt_name: expected one of passage, query, got 'que'"
