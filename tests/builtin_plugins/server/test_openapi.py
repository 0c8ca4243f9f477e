"""`/openapi.json` describes every route, and the server answers accordingly."""

import functools
import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint import typed
from hardpoint.plugins.server import Authenticator, Client, Route

REF = "#/components/schemas/"


class Inner(typed.Strict):
    """A part."""

    size: int


class DryArguments(typed.Arguments):
    """Arguments of a processor.

    Attributes:
        base: how much.
    """

    base: float = 1.5
    inner: Inner | None = None


class Asked(typed.Strict):
    """A body of a plugin's route."""

    name: str


class Answered(typed.Strict):
    """An answer of a plugin's route."""

    length: int


async def endpoint(request):
    return Answered(length=len(request.path_params["name"]))


ROUTE = Route(
    path="/acme/{name}/{n:int}",
    endpoint=endpoint,
    methods=("GET", "POST"),
    summary="Count.",
    request_type=Asked,
    response_type=Answered,
)


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(
        config=configured(served_names=["m"]),
        extensions=(("acme", ROUTE),),
        arguments={"dry": typed.json_schema(DryArguments)},
    )
    with running(engine) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def document(server):
    response = server.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_the_introduction_describes_the_default_for_unknown_fields(document):
    assert (
        "ignored and listed in the header `x-hardpoint-ignored-fields`"
        in (document["info"]["description"])
    )


def test_every_route_is_described(server, document):
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == "9.9"
    for route in server.service.routes:
        item = document["paths"][re.sub(r":\w+", "", route.path)]
        of_path = [each for each in server.service.routes if each.path == route.path]
        assert set(item) == {method.lower() for each in of_path for method in each.methods}
        for method in route.methods:
            operation = item[method.lower()]
            assert operation["summary"]
            done = "101" if route.websocket else "200"
            assert {done, "400", "401", "429", "500", "503"} <= set(operation["responses"])
    ids = [o["operationId"] for item in document["paths"].values() for o in item.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_to_a_schema(document):
    references = re.findall(r'"\$ref":\s*"([^"]*)"', json.dumps(document))
    names = {reference.removeprefix(REF) for reference in references}
    assert names <= document["components"]["schemas"].keys()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


def test_schemas_are_json_schemas(document):
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_fields_are_described_and_treated(document):
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    properties = chat["properties"]
    assert properties["timeout"]["description"].startswith("seconds after which")
    assert properties["min_p"]["description"].startswith("drop tokens less likely")
    assert properties["user"] == {"description": "Ignored: it is for the provider's own platform."}
    assert chat["x-refused"]["functions"] == "use tools"


def test_fields_of_one_name_have_their_own_meaning(document):
    schemas = document["components"]["schemas"]
    of_tokens = schemas["TokenSampling"]["properties"]["logprobs"]["description"]
    assert of_tokens == "likeliest tokens per position."
    for name in ("AssistantText", "ChunkChoice"):
        if name in schemas:
            assert "description" not in schemas[name]["properties"]["logprobs"], name


def test_arguments_of_plugins_are_described(document):
    schemas = document["components"]["schemas"]
    chat = schemas["ChatCompletionRequest"]["properties"]["plugin_args"]
    assert {"$ref": f"{REF}PluginArgs"} in chat["anyOf"]
    assert schemas["PluginArgs"]["properties"] == {
        "dry": {"$ref": f"{REF}PluginArgs_dry_DryArguments"}
    }
    dry = schemas["PluginArgs_dry_DryArguments"]
    assert dry["properties"]["base"]["description"] == "how much."
    assert {"$ref": f"{REF}PluginArgs_dry_Inner"} in dry["properties"]["inner"]["anyOf"]


def test_routes_of_plugins_are_described(document):
    operation = document["paths"]["/acme/{name}/{n}"]["post"]
    assert operation["summary"] == "Count."
    assert [(p["name"], p["schema"]["type"]) for p in operation["parameters"]] == [
        ("name", "string"),
        ("n", "integer"),
    ]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": f"{REF}Asked"}
    assert (
        document["components"]["schemas"]["Asked"]["description"] == "A body of a plugin's route."
    )


def test_keys_are_described():
    async def authenticate(headers, path):
        return Client(name="anybody")

    engine = FakeEngine(
        config=configured(), extensions=(("k", Authenticator(authenticate=authenticate)),)
    )
    with running(engine) as server:
        document = server.client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]


# Requests drawn from the document


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


def drawn(schema, schemas):
    """Return a strategy of values that mostly fit a schema."""
    if "$ref" in schema:
        return drawn(schemas[schema["$ref"].removeprefix(REF)], schemas)
    if "anyOf" in schema:
        return st.one_of([drawn(option, schemas) for option in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    draw = DRAWN.get(schema.get("type"))
    return draw(schema, schemas) if draw else ANY


def drawn_object(schema, schemas):
    if "properties" in schema:
        required = schema.get("required", [])
        fields = {name: drawn(inner, schemas) for name, inner in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: fields[name] for name in required},
            optional={name: field for name, field in fields.items() if name not in required},
        )
    inner = schema.get("additionalProperties")
    values = drawn(inner, schemas) if isinstance(inner, dict) else ANY
    return st.dictionaries(st.text(max_size=4), values, max_size=2)


def drawn_list(schema, schemas):
    items = drawn(schema.get("items", {}), schemas)
    return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)


def drawn_number(schema, _):
    limits = schema.get("minimum"), schema.get("maximum")
    return st.floats(*limits, allow_nan=False, allow_infinity=False)


DRAWN = {
    "object": drawn_object,
    "array": drawn_list,
    "number": drawn_number,
    "string": lambda schema, _: st.text(min_size=schema.get("minLength", 0), max_size=8),
    "integer": lambda schema, _: st.integers(schema.get("minimum", -3), 2**70),
    "boolean": lambda *_: st.booleans(),
    "null": lambda *_: st.none(),
}


def bodies_of(schema, schemas):
    """Return a strategy of bodies with few of the optional fields, and of others."""
    schema = schemas[schema["$ref"].removeprefix(REF)]
    fields = {name: drawn(inner, schemas) for name, inner in schema["properties"].items()}

    def with_fields(chosen):
        return st.fixed_dictionaries({n: fields[n] for n in {*schema.get("required", ()), *chosen}})

    return st.sets(st.sampled_from(sorted(fields)), max_size=3).flatmap(with_fields) | ANY


def check(server, document, path, method, operation, body):
    """Ask, and compare the answer with its description in the document."""
    response = server.client.request(method, path, json=body)
    assert response.status_code != 500, (body, response.text[:500])
    kind = response.headers["content-type"].partition(";")[0]
    described = operation["responses"][str(response.status_code)].get("content")
    if described is None:
        return
    assert kind in described
    if kind == "application/json":
        schema = {**described[kind]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(response.json())


def requests_of(document):
    return [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


def search(asking, bodies, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies)
    def run(body):
        asking(body)

    run()


def fuzz(server, document, examples):
    schemas = document["components"]["schemas"]
    for path, method, operation in requests_of(document):
        request_body, bodies = operation.get("requestBody"), st.none()
        if request_body is not None:
            bodies = bodies_of(request_body["content"]["application/json"]["schema"], schemas)
        filled = path.replace("{model}", "m").replace("{name}", "ann").replace("{n}", "3")
        asking = functools.partial(check, server, document, filled, method, operation)
        search(asking, bodies, examples if request_body else 1)
    assert (server.engine.open, server.service.load.open) == (0, 0)


def test_drawn_requests_get_answers_of_the_document(server, document):
    fuzz(server, document, 8)


@pytest.mark.nightly
def test_many_drawn_requests_get_answers_of_the_document(server, document):
    fuzz(server, document, 200)


def allows(document, name, body):
    schema = {"$ref": f"{REF}{name}", "components": document["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "n", "stream", "metadata", "stop", "logit_bias"]
)
def test_fields_that_may_be_left_out_may_be_null(server, document, field):
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert allows(document, "ChatCompletionRequest", {**body, field: None})
    assert server.post("/v1/chat/completions", {**body, field: None}).status_code == 200
    assert not allows(document, "ChatCompletionRequest", {"messages": None})
    assert not allows(document, "ChatCompletionRequest", {**body, "temperature": "hot"})


@pytest.mark.parametrize(
    ("path", "name"),
    [("/health", "EngineHealth"), ("/ready", "Readiness"), ("/version", "Version")],
)
def test_the_state_of_the_server_is_described(server, document, path, name):
    answers = document["paths"][path]["get"]["responses"]
    content = {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}
    assert answers["200"]["content"] == content
    assert answers["503"].get("content") == (None if path == "/version" else content)
    assert allows(document, name, server.client.get(path).json())


def test_figures_are_described_as_text(document):
    answer = document["paths"]["/metrics"]["get"]["responses"]["200"]
    assert answer["content"] == {"text/plain": {"schema": {"type": "string"}}}


def test_errors_of_messages_are_described(server, document):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for status in ("400", "500", "503"):
            content = document["paths"][path]["post"]["responses"][status]["content"]
            schema = content["application/json"]["schema"]
            assert schema == {"$ref": f"{REF}MessagesErrorBody"}
    assert allows(document, "MessagesErrorBody", server.post("/v1/messages", {}).json())
