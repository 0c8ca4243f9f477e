"""Routes that programs written for vLLM, Cohere and SageMaker use, and fill-in-the-middle."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.keyed_server import ALICE, BOB, keyed_server
from support.scripted_server import LENGTH, server_config

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.dialects.completions.fim import FillInFormat
from hardpoint.plugins import RequestError
from hardpoint.testing import write_scripted_model

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with keyed_server(folder, requests_per_minute=1, server={"tokenizer_info": True}) as server:
        yield server


def post(server, path, status=200, key=ALICE, **body):
    answer = server.post(path, body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    return answer.json()


def message_of(server, path, status=400, **body):
    return post(server, path, status, **body)["error"]["message"]


def test_new_routes_need_a_key_and_count_for_its_rate(server):
    paths = ("/v1/chat/completions/render", "/v2/embed", "/invocations")
    for path in paths:
        assert post(server, path, 401, key="nobodys")
    assert server.client.get("/tokenizer_info").status_code == 401
    post(server, "/v2/embed", key=BOB, texts=["fox"])
    for path in paths:
        assert post(server, path, 429, key=BOB)


def test_an_unknown_route_is_404_whatever_its_content_type_is(server):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json"}):
        headers["authorization"] = f"Bearer {ALICE}"
        answer = server.client.post("/v1/nothing", content=b"x", headers=headers)
        assert answer.status_code == 404
    headers["content-type"] = "text/plain"
    answer = server.client.post("/v1/completions", content=b"x", headers=headers)
    assert answer.status_code == 415


class TestRender:
    @pytest.mark.parametrize(
        "fields",
        [
            GREEDY,
            {"temperature": 0, "n_predict": 8},
            {**GREEDY, "repeat_penalty": 1.5},
            {**GREEDY, "truncate_prompt_tokens": 5},
            {**GREEDY, "truncate_prompt_tokens": -1, "max_tokens": LENGTH - 5},
        ],
        ids=lambda fields: "-".join(fields),
    )
    def test_the_rendered_request_generates_the_same_answer(self, server, fields):
        fields = {"messages": [{"role": "user", "content": "say abc"}], **fields}
        rendered = post(server, "/v1/chat/completions/render", **fields)
        assert rendered["sampling_params"]["max_tokens"] == fields.get("max_tokens", 8)
        generated = post(server, "/inference/v1/generate", **rendered)
        chat = post(server, "/v1/chat/completions", return_token_ids=True, **fields)
        assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
        assert rendered["token_ids"] == chat["prompt_token_ids"]

    def test_without_a_limit_the_answer_has_the_rest_of_the_context(self, server):
        messages = [{"role": "user", "content": "hi"}]
        rendered = post(server, "/v1/chat/completions/render", messages=messages, stop=["x"])
        length = server.engine.config.max_model_len
        assert rendered["sampling_params"]["max_tokens"] == length - len(rendered["token_ids"])
        assert rendered["sampling_params"]["stop"] == ["x"]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"messages": [{"role": "user", "content": "x" * LENGTH}]}, "messages: the prompt is"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: expected at least 1"),
            ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "truncation_side: "),
            ({"max_tokens": 0}, "max_tokens: expected at least 1"),
            ({"n_predict": 0}, "n_predict: expected at least 1"),
            ({"top_logprobs": 2}, "top_logprobs: expected logprobs"),
            ({"n": 1000}, "n: expected at most 128 on this server"),
            ({"stream_options": {"include_usage": True}}, "stream_options: expected stream"),
        ],
    )
    def test_what_the_chat_route_rejects_is_not_rendered(self, server, fields, message):
        fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
        for path in ("/v1/chat/completions/render", "/v1/chat/completions"):
            assert message_of(server, path, **fields).startswith(message)

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "now"}}]
    )
    def test_required_tool_calls_are_a_grammar(self, server, choice):
        fields = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [tool("now"), tool("later")],
            "tool_choice": choice,
            "response_format": None,
            "temperature": 0,
            "max_tokens": 700,
        }
        rendered = post(server, "/v1/chat/completions/render", **fields)
        assert "structural_tag" in rendered["sampling_params"]["structured_outputs"]
        generated = post(server, "/inference/v1/generate", **rendered)
        chat = post(server, "/v1/chat/completions", return_token_ids=True, **fields)
        assert chat["choices"][0]["message"]["tool_calls"]
        assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]

    def test_a_free_choice_of_tools_needs_no_grammar(self, server):
        messages = [{"role": "user", "content": "hi"}]
        for choice in ("auto", "none"):
            rendered = post(
                server,
                "/v1/chat/completions/render",
                messages=messages,
                tools=[tool("now")],
                tool_choice=choice,
            )
            assert rendered["sampling_params"]["structured_outputs"] is None


def tool(name):
    """Return a function that takes a zone."""
    parameters = {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_tokenizer_is_described(server):
    headers = {"authorization": f"Bearer {ALICE}"}
    info = server.client.get("/tokenizer_info", headers=headers).json()
    tokenizer = server.engine.tokenizer
    assert info["vocab_size"] == tokenizer.vocab_size
    assert {
        token["content"]: int(number) for number, token in info["added_tokens_decoder"].items()
    } == tokenizer.special_tokens
    assert info["chat_template"] == tokenizer.chat_template


def test_the_tokenizer_is_not_described_by_default():
    with running(FakeEngine(config=configured())) as server:
        answer = server.client.get("/tokenizer_info")
    assert answer.status_code == 404
    assert "server.tokenizer_info" in answer.json()["error"]["message"]


class TestInvocations:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "say abc"}], **GREEDY},
            ),
            ("/v1/completions", {"prompt": "say abc", **GREEDY}),
            ("/v1/embeddings", {"input": ["fox"]}),
            ("/v1/rerank", {"query": "fox", "documents": ["fox", "say abc"]}),
            ("/v1/score", {"text_1": "fox", "text_2": "say abc"}),
        ],
    )
    def test_a_body_is_answered_by_its_route(self, server, path, body):
        invoked = post(server, "/invocations", request_id="mine", **body)
        answer = post(server, path, request_id="mine", **body)
        for each in (invoked, answer):
            each.pop("created", None)
            each.pop("usage", None)
        assert invoked == answer

    def test_streams_and_errors_are_those_of_the_route(self, server):
        messages = [{"role": "user", "content": "say abc"}]
        headers = {"authorization": f"Bearer {ALICE}"}
        body = {"messages": messages, "stream": True, **GREEDY}
        streamed = server.post("/invocations", body, headers=headers).text
        assert streamed.rstrip().endswith("data: [DONE]")
        assert message_of(server, "/invocations", messages=messages, n=0).startswith("n:")

    def test_a_body_of_no_route_is_rejected(self, server):
        assert message_of(server, "/invocations", hello=1).startswith("body: expected the fields")
        assert message_of(server, "/invocations", messages=[]).startswith("messages:")


class TestCohere:
    def test_vectors_are_those_of_openais_route(self, server):
        texts = ["fox", "say abc"]
        answer = post(
            server,
            "/v2/embed",
            texts=texts,
            embedding_types=["float", "base64", "ubinary", "binary", "int8", "uint8"],
        )
        openais = post(server, "/v1/embeddings", input=texts)["data"]
        assert answer["texts"] == texts
        embeddings = answer["embeddings"]
        for index, entry in enumerate(openais):
            vector = np.float32(entry["embedding"])
            np.testing.assert_allclose(embeddings["float"][index], vector, atol=1e-6)
            data = base64.b64decode(embeddings["base64"][index])
            np.testing.assert_allclose(np.frombuffer(data, "<f4"), vector, atol=1e-6)
            bits = np.packbits(vector > 0).astype(int)
            assert embeddings["ubinary"][index] == bits.tolist()
            assert embeddings["binary"][index] == (bits - 128).tolist()
            scaled = np.array(embeddings["int8"][index])
            assert np.abs(scaled).max() == 127
            np.testing.assert_allclose(scaled / 127 * np.abs(vector).max(), vector, atol=0.01)
            assert embeddings["uint8"][index] == (scaled + 128).tolist()
        assert answer["meta"]["billed_units"]["input_tokens"] == 10

    def test_inputs_are_texts_in_parts(self, server):
        parts = [{"type": "text", "text": "fox"}]
        answer = post(server, "/v2/embed", inputs=[{"content": parts}], input_type="clustering")
        same = post(server, "/v2/embed", texts=["fox"])
        assert answer["embeddings"] == same["embeddings"]

    def test_long_texts_lose_an_end(self, server):
        length = server.engine.config.max_model_len
        text = "".join(chr(ord("a") + index % 26) for index in range(length + 30))
        cut = {
            name: post(server, "/v2/embed", texts=[text], truncate=name)
            for name in ("START", "END")
        }
        default = post(server, "/v2/embed", texts=[text])
        assert default["embeddings"] == cut["END"]["embeddings"]
        for name, content in (("START", text[-length:]), ("END", text[:length])):
            same = post(server, "/v2/embed", texts=[content])
            assert cut[name]["embeddings"] == same["embeddings"]
            assert cut[name]["meta"]["billed_units"]["input_tokens"] == length

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "texts and inputs: expected one of them"),
            ({"texts": ["a", ""]}, "texts[1]: expected a text that is not empty"),
            ({"texts": ["a" * 9000], "truncate": "NONE"}, "texts[0]: "),
            ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate: "),
            ({"images": ["data:"]}, "images: not supported"),
            ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]: "),
            ({"texts": ["a"], "output_dimension": 1}, "output_dimension: expected none"),
        ],
    )
    def test_wrong_requests_are_rejected(self, server, fields, message):
        assert message_of(server, "/v2/embed", **fields).startswith(message)


class TestEmbeddingsOfMessages:
    def test_the_template_makes_one_text(self, server):
        messages = [{"role": "user", "content": "say abc"}]
        answer = post(server, "/v1/embeddings", messages=messages)
        tokens = post(server, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
        same = post(server, "/v1/embeddings", input=tokens)
        assert answer["data"] == same["data"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)

    def test_one_of_input_and_messages_is_needed(self, server):
        messages = [{"role": "user", "content": "hi"}]
        for fields in ({}, {"input": "a", "messages": messages}):
            message = message_of(server, "/v1/embeddings", **fields)
            assert message == "input and messages: expected one of them"


class TestFillInTheMiddle:
    @pytest.fixture(scope="class")
    def fim(self, tmp_path_factory):
        model = write_scripted_model(tmp_path_factory.mktemp("fim"), {}, special_tokens=FIM)
        with running(AsyncLLM(config=server_config(model))) as server:
            yield server

    def test_the_prompt_has_the_tokens_of_the_format(self, fim):
        with openai.OpenAI(base_url=f"{fim.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(
                model=client.models.list().data[0].id,
                prompt="def f(",
                suffix="return 1",
                max_tokens=2,
                extra_body={"return_token_ids": True},
            )
        ids = answer.choices[0].prompt_token_ids
        special = fim.engine.tokenizer.special_tokens
        places = [ids.index(special[token]) for token in FIM]
        decode = fim.engine.tokenizer.decode
        assert decode(ids[places[0] + 1 : places[1]]) == "def f("
        assert decode(ids[places[1] + 1 : places[2]]) == "return 1"
        assert places[2] == len(ids) - 1
        plain = fim.post("/tokenize", {"prompt": "x"}).json()["tokens"]
        assert ids[: places[0]] == plain[: places[0]]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"prompt": "a", "echo": True}, "echo: expected false with suffix"),
            ({"prompt": [3, 4]}, "prompt: expected a text with suffix, got token ids"),
            ({"prompt": [[3], [4]]}, "prompt[0]: expected a text with suffix, got token ids"),
        ],
    )
    def test_what_cannot_have_a_suffix_is_rejected(self, fim, fields, message):
        answer = fim.post("/v1/completions", {"suffix": "b", **fields}).json()
        assert answer["error"]["message"].startswith(message)

    def test_a_tokenizer_without_the_tokens_is_named(self, server):
        message = message_of(server, "/v1/completions", prompt="a", suffix="b")
        assert message.startswith("suffix: not supported: the tokenizer of this model has no tok")

    def test_formats(self):
        deepseek = FillInFormat.of_tokenizer(
            {"<｜fim▁begin｜>": 1, "<｜fim▁hole｜>": 2, "<｜fim▁end｜>": 3}  # noqa: RUF001
        )
        assert deepseek.prompt([0], [10], [20]) == [0, 1, 10, 2, 20, 3]
        codestral = FillInFormat.of_tokenizer({"[SUFFIX]": 1, "[PREFIX]": 2})
        assert codestral.prompt([0], [10], [20]) == [0, 1, 20, 2, 10]
        with pytest.raises(RequestError, match="suffix: not supported"):
            FillInFormat.of_tokenizer({"<fim_prefix>": 1})
