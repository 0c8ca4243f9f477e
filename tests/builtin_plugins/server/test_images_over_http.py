"""Images in the dialects of the server: inputs of the engine, and errors by name."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.fake_engine import FakeEngine, configured
from support.gemma_images import SOFT_TOKENS
from support.http_server import running
from support.image_model import settings, write_image_model
from support.pictures import data_url, encoded, gradient

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import ImageSource

DATA = encoded(gradient())
URL = data_url(DATA)
BASE64 = URL.partition(",")[2]
TEXT = {"type": "text", "text": "see"}


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured(), takes_images=True)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def text_server():
    with running(FakeEngine(config=configured())) as running_server:
        yield running_server


def post(server, path, body):
    response = server.client.post(path, json=body)
    return response, (server.engine.asked[-1][0] if response.is_success else response.json())


def test_chat_completions(server):
    parts = [TEXT, {"type": "image_url", "image_url": {"url": URL}}]
    body = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]}
    _, messages = post(server, "/v1/chat/completions", body)
    assert messages[1]["content"] == [
        TEXT,
        {
            "type": "image_url",
            "image_url": {"url": ImageSource(URL, "messages[1].content[1].image_url.url")},
        },
    ]


def test_responses(server):
    items = [
        {"role": "developer", "content": "x"},
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": URL, "detail": "auto"},
                {"type": "input_text", "text": "see"},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": URL}],
        },
    ]
    _, messages = post(server, "/v1/responses", {"input": items})
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    image = ImageSource(URL, "input[1].content[0].image_url")
    part = {"type": "image_url", "image_url": image, "detail": "auto"}
    assert messages[1]["content"] == [part, TEXT]
    result = ImageSource(URL, "input[3].output[0].image_url")
    assert messages[3]["content"] == [{"type": "image_url", "image_url": result}]


def test_messages(server):
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
    }
    elsewhere = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, block]}
    body = {
        "max_tokens": 9,
        "system": "x",
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "user", "content": [block, TEXT, elsewhere]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }
    _, messages = post(server, "/v1/messages", body)
    place = "messages[1].content"
    assert messages[1]["content"] == [
        {"type": "text", "text": "first"},
        {
            "type": "image_url",
            "image_url": ImageSource(f"data:;base64,{BASE64}", f"{place}[0].source.data"),
        },
        TEXT,
        {
            "type": "image_url",
            "image_url": ImageSource("https://example.com/a.png", f"{place}[2].source.url"),
        },
    ]
    (text, image) = messages[3]["content"]
    assert text == TEXT
    assert image["image_url"].place == "messages[3].content[0].content[1].source.data"
    response = server.client.post(
        "/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": [block]}]}
    )
    assert response.json()["input_tokens"] > 0


def chat(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def message(*blocks):
    return {"max_tokens": 9, **chat(*blocks)}


def items(*parts, role="user"):
    return {"input": [{"role": role, "content": list(parts)}]}


IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "x", "data": BASE64}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
WRONG = [
    ("/v1/responses", items({"type": "input_image"}), "input[0].content[0].image_url"),
    ("/v1/responses", items(INPUT_IMAGE | {"file_id": "f"}), "input[0].content[0].file_id"),
    (
        "/v1/responses",
        items({"type": "input_audio"}),
        "'input_audio' is not supported: there",
    ),
    (
        "/v1/responses",
        items({"type": "input_file"}),
        "'input_file' is not supported: give",
    ),
    (
        "/v1/responses",
        items(INPUT_IMAGE, role="system"),
        "input[0].content[0].type: messages of role 'system' cannot hold 'input_image'",
    ),
    (
        "/v1/responses",
        items({"type": "output_text", "text": "x"}, INPUT_IMAGE, role="assistant"),
        "input[0].content[1].type: messages of role 'assistant' cannot hold 'input_image'",
    ),
    ("/v1/messages", message({"type": "document"}), "'document' is not supported: give its text"),
    (
        "/v1/messages",
        message({"type": "image", "source": {"type": "file", "file_id": "f"}}),
        "messages[0].content[0].source",
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "assistant", "content": [IMAGE_BLOCK]}]},
        "messages[0].content[0].type: messages of role 'assistant' cannot hold 'image'",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), WRONG)
def test_other_parts_are_refused_by_name(server, path, body, words):
    response, answer = post(server, path, body)
    assert response.status_code == 400
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/v1/responses",
            items({"type": "input_text", "text": "a"}, INPUT_IMAGE),
            "input[0].content[1].type: 'input_image' is not supported: the model reads text alone",
        ),
        (
            "/v1/messages",
            message(TEXT, IMAGE_BLOCK),
            "messages[0].content[1].type: 'image' is not supported: the model reads text alone",
        ),
    ],
)
def test_a_model_without_images_refuses_them_by_name(text_server, path, body, words):
    response, answer = post(text_server, path, body)
    assert (response.status_code, answer["error"]["message"]) == (400, words)


def test_so_does_it_in_the_result_of_a_tool(text_server):
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE_BLOCK]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"messages": messages} | ({"max_tokens": 9} if path == "/v1/messages" else {})
        answer = text_server.client.post(path, json=body).json()
        assert answer["error"]["message"] == (
            "messages[2].content[0].content[0].type: 'image' is not supported: the model reads "
            "text alone"
        )


def test_models_are_listed_with_what_they_take(server, text_server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]
    limits = server.engine.config.images
    assert model["images"] == {
        "max_items": limits.max_items,
        "max_bytes": limits.max_bytes,
        "max_total_bytes": limits.max_total_bytes,
        "max_pixels": limits.max_pixels,
        "max_body_bytes": (8 << 20) + 44_739_244,
    }
    (model,) = text_server.client.get("/v1/models").json()["data"]
    assert (model["input_modalities"], model["images"]) == (["text"], None)


def test_the_characters_of_an_image_are_no_prompt():
    limits = {"prompt_characters": 100}
    with running(FakeEngine(config=configured(limits=limits), takes_images=True)) as server:
        image = {"type": "image_url", "image_url": {"url": URL}}
        assert len(URL) > 100
        assert post(server, "/v1/chat/completions", chat(TEXT, image))[0].status_code == 200
        body = chat({"type": "text", "text": "x" * 101}, image)
        assert post(server, "/v1/chat/completions", body)[0].status_code == 400


def test_a_body_may_have_all_images_that_a_prompt_may_have():
    images = ImagesConfig(max_items=2, max_bytes=4_000_000, max_total_bytes=7_000_000)
    part = {"type": "image_url", "image_url": {"url": data_url(bytes(3_400_000))}}
    engine = FakeEngine(config=configured(), takes_images=True)
    engine.config = msgspec.structs.replace(engine.config, images=images)
    path, body = "/v1/chat/completions", chat(part, part)
    assert len(json.dumps(body)) > 9_000_000
    with running(engine) as server:
        assert server.client.post(path, json=body).status_code == 200
        (model,) = server.client.get("/v1/models").json()["data"]
        assert model["images"]["max_body_bytes"] == 8_388_608 + 9_333_336
    with running(FakeEngine(config=configured())) as server:
        refused = server.client.post(path, json=body)
        assert refused.status_code == 413
        assert "at most 8388608 bytes (server.limits" in refused.json()["error"]["message"]
    engine.config = configured(limits={"body_bytes": 1_000_000})
    with running(engine) as server:
        refused = server.client.post(path, json=body)
        assert "at most 1000000 bytes (server.limits" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    folder = write_image_model(tmp_path_factory.mktemp("images"))
    config = settings(server={"access_log": "off"}, images={"max_items": 2}, stats={"sinks": []})
    llm = AsyncLLM(str(folder), config=config)
    with running(llm) as running_server:
        yield running_server
    llm.close()


def test_images_are_answered_and_their_tokens_counted(real_server):
    client = real_server.client
    image = {"type": "image_url", "image_url": {"url": URL}}
    common = {"max_tokens": 4, "temperature": 0}
    text = len("user: see\nmodel:")  # a token for each letter
    around = 4  # two newlines as one token before and after, and the ends of the image
    expected = text + around + SOFT_TOKENS

    answer = client.post("/v1/chat/completions", json=chat(image, TEXT) | common).json()
    assert answer["usage"]["prompt_tokens"] == expected
    assert answer["usage"]["completion_tokens"] == 4
    counted = client.post("/tokenize", json=chat(image, TEXT)).json()
    assert counted["count"] == len(counted["tokens"]) == expected
    refused = client.post("/tokenize", json=chat(image, TEXT) | {"add_special_tokens": True})
    assert "add_special_tokens: expected false" in refused.json()["error"]["message"]

    parts = [INPUT_IMAGE, {"type": "input_text", "text": "see"}]
    same = client.post(
        "/v1/responses", json=items(*parts) | {"max_output_tokens": 4, "temperature": 0}
    ).json()
    assert same["usage"]["input_tokens"] == expected
    message_answer = client.post("/v1/messages", json=message(IMAGE_BLOCK, TEXT) | common).json()
    usage = message_answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    texts = {
        answer["choices"][0]["message"]["content"],
        same["output"][0]["content"][0]["text"],
        message_answer["content"][0]["text"],
    }
    assert len(texts) == 1
    count = client.post("/v1/messages/count_tokens", json=chat(IMAGE_BLOCK, TEXT)).json()
    assert count == {"input_tokens": expected}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/v1/chat/completions",
            chat(TEXT, {"type": "image_url", "image_url": {"url": "data:;base64,?"}}),
            "messages[0].content[1].image_url.url: expected base64",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}),
            "messages[0].content[0].image_url.url: expected a data: URL, because images are not",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
            "messages[0].content[0].image_url.url: expected a path in one of images.folders",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "video_url", "video_url": {"url": "x"}}),
            'messages[0].content[0].type: expected "text" or "image_url", got \'video_url\'',
        ),
        (
            "/v1/responses",
            items(*[INPUT_IMAGE] * 3),
            "input[0].content[2].image_url: expected at most 2 images in a prompt",
        ),
        (
            "/v1/messages",
            message({"type": "image", "source": {"type": "base64", "data": BASE64[:40]}}),
            "messages[0].content[0].source.data: expected",
        ),
        ("/tokenize", chat({"type": "image_url"}), "messages[0].content[0]: expected image_url"),
        *(
            (
                path,
                chat(TEXT, {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}),
                "messages[0].content[1].image_url.detail: expected \"auto\", got 'high'; the",
            )
            for path in ("/v1/chat/completions", "/tokenize")
        ),
        (
            "/v1/chat/completions",
            chat({"type": "image_url", "image_url": {"url": URL, "format": "png"}}),
            "messages[0].content[0].image_url: expected url and detail alone, got 'format'",
        ),
        (
            "/v1/responses",
            items({"type": "input_text", "text": "a"}, INPUT_IMAGE | {"detail": "low"}),
            "input[0].content[1].detail: expected \"auto\", got 'low'; the model reads every image",
        ),
    ],
)
def test_what_is_wrong_with_an_image_names_its_part(real_server, path, body, words):
    response = real_server.client.post(path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_unknown_fields_of_an_image_block_are_ignored(real_server):
    body = message(TEXT, IMAGE_BLOCK | {"detail": "high"})
    response = real_server.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-hardpoint-ignored-fields"] == "messages[].content[].detail"


ROUTES = {
    "/v1/chat/completions": ("messages", lambda url: {"type": "image_url", "image_url": url}),
    "/v1/responses": ("input", lambda url: {"type": "input_image", "image_url": url}),
    "/v1/messages": (
        "messages",
        lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    ),
    "/v1/messages/count_tokens": (
        "messages",
        lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    ),
    "/tokenize": ("messages", lambda url: {"type": "image_url", "image_url": {"url": url}}),
}


@pytest.fixture(scope="module")
def server_with_keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(f'[[key]]\nname = "alice"\nkey = "{"a" * 32}"\n')
    path.chmod(0o600)
    engine = FakeEngine(config=configured(), takes_images=True)
    with running(engine, authenticators=[installed(KeyStore(str(path)))]) as running_server:
        yield running_server


@pytest.mark.parametrize("route", ROUTES)
def test_images_belong_to_the_key_of_their_request(server_with_keys, route, monkeypatch):
    field, part = ROUTES[route]
    engine, seen = server_with_keys.engine, []
    render = engine.model.apply_chat_template

    async def recorded(messages, **options):
        seen.append(messages)
        return await render(messages, **options)

    monkeypatch.setattr(engine.model, "apply_chat_template", recorded)
    item = {"role": "user", "content": [part("https://example.com/a.png")]}
    body = {field: [item]} | ({"max_tokens": 4} if route == "/v1/messages" else {})
    if route == "/v1/responses":
        body["store"] = False
    headers = {"x-api-key": "a" * 32}
    assert server_with_keys.client.post(route, json=body, headers=headers).is_success
    messages = seen[-1] if seen else engine.asked[-1][0]
    image = messages[-1]["content"][0]["image_url"]
    source = image["url"] if isinstance(image, dict) else image
    assert (source.url, source.owner) == ("https://example.com/a.png", "alice")
