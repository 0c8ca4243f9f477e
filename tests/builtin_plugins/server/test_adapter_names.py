"""Adapters as models: chosen by name, listed, loaded by administrators and by resolvers."""

import asyncio
import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.waiting import wait_until

from hardpoint.builtin_plugins.server.access.counts import SharedCounts
from hardpoint.builtin_plugins.server.operations.adapters import ServedAdapters, UnloadAdapter
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import LoRARequest, ModelError, RequestError

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}


@dataclasses.dataclass
class AdapterEngine(FakeEngine):
    """Holds adapters.

    Attributes:
        held: by name.
        resolved: results of resolvers by name: a path, a request or an error.
        did: the calls so far.
        removed: numbers of those that were removed.
        gate: set: `remove_lora` and `resolve_adapter` end.
    """

    held: dict = dataclasses.field(default_factory=dict)
    resolved: dict = dataclasses.field(default_factory=dict)
    did: list = dataclasses.field(default_factory=list)
    removed: list = dataclasses.field(default_factory=list)
    gate: threading.Event = dataclasses.field(default_factory=threading.Event)
    wrong: Exception | None = None

    def __post_init__(self):
        super().__post_init__()
        self.gate.set()

    async def _passed(self):
        while not self.gate.is_set():
            await asyncio.sleep(0.005)

    async def add(self, request):
        self.did.append(("add", request))
        await asyncio.sleep(0.01)
        if self.wrong is not None:
            raise self.wrong
        self.held[request.name] = request

    async def remove(self, adapter_id, mode="drain"):
        self.did.append(("remove", adapter_id, mode))
        await self._passed()
        self.removed.append(adapter_id)
        for name in [name for name, held in self.held.items() if held.id == adapter_id]:
            del self.held[name]

    async def call_part(self, part, method, arguments=None):
        assert (part, method) == ("adapters", "removed")
        return self.removed

    async def list(self):
        return list(self.held.values())

    async def resolve(self, name):
        self.did.append(("resolve", name))
        await self._passed()
        adapter = self.resolved.get(name)
        if isinstance(adapter, Exception):
            raise adapter
        return adapter


@pytest.fixture
def folder(tmp_path):
    for name in ("sql", "chat"):
        (tmp_path / "offered" / name).mkdir(parents=True)
        (tmp_path / "offered" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    return tmp_path / "offered"


@pytest.fixture
def server(folder, tmp_path):
    settings = {"admin": f"unix:{tmp_path}/admin.sock", "adapter_folders": [str(folder)]}
    with running(AdapterEngine(config=configured(**settings))) as running_server:
        yield running_server


def load(server, path, name="sql", **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.admin.post("/v1/load_lora_adapter", json=body)


def complete(server, model, path="/v1/completions"):
    return server.client.post(path, json={**BODIES[path], "model": model})


def adapter_of(server):
    return server.engine.asked[-1][2].get("lora_request")


def error_of(answer):
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_names_an_adapter_runs_with_it(server, folder, path):
    answer = load(server, folder / "sql")
    assert (answer.status_code, answer.json()) == (200, {"lora_name": "sql", "lora_int_id": 1})
    done = complete(server, "sql", path)
    assert done.status_code == 200
    assert adapter_of(server) == LoRARequest("sql", 1, str(folder / "sql"))
    if path != "/inference/v1/generate":  # whose answers have no model
        assert done.json()["model"] == "sql"
    assert complete(server, "smollm2", path).status_code == 200
    assert adapter_of(server) is None
    refused = complete(server, "sqll", path)
    assert refused.status_code == 404
    assert error_of(refused) == "model: expected 'smollm2' or an adapter ('sql'), got 'sqll'"


def test_an_unknown_name_lists_the_nearest_adapters(server):
    for index in range(20):
        server.engine.held[f"other-{index}"] = LoRARequest(f"other-{index}", index + 1, "/x")
    server.engine.held["sql-large"] = LoRARequest("sql-large", 30, "/x")
    message = error_of(complete(server, "sql-larg"))
    start = "model: expected 'smollm2' or an adapter ('sql-large', "
    assert message.startswith(start), message
    assert message.endswith(" and 13 more), got 'sql-larg'")
    missing = server.client.get("/v1/models/sql-larg")
    assert (missing.status_code, error_of(missing)) == (404, message)
    pooled = server.client.post("/v1/embeddings", json={"input": "Hi", "model": "sql-larg"})
    assert error_of(pooled) == "model: expected 'smollm2', got 'sql-larg'"


def test_streams_have_the_name_of_the_adapter(server, folder):
    load(server, folder / "sql")
    body = {**BODIES["/v1/completions"], "model": "sql", "stream": True}
    text = server.client.post("/v1/completions", json=body).text
    assert '"model":"sql"' in text
    assert adapter_of(server).name == "sql"


def test_tokens_may_be_counted_for_an_adapter(server, folder):
    load(server, folder / "sql")
    for path, body in (
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [72]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ):
        answers = [server.client.post(path, json={**body, "model": m}) for m in ("sql", "other")]
        assert [answer.status_code for answer in answers] == [200, 404]


def test_adapters_are_models_with_a_parent(server, folder):
    load(server, folder / "sql")
    server.engine.held["by program"] = LoRARequest("by program", 7, "/elsewhere")
    base, *others = server.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"], base["root"]) == ("smollm2", None, "smollm2")
    assert [(m["id"], m["parent"], m["root"]) for m in others] == [
        ("sql", "smollm2", str(folder / "sql")),
        ("by program", "smollm2", "/elsewhere"),
    ]
    assert others[0]["created"] > 0
    assert server.client.get("/v1/models/sql").json() == others[0]
    assert server.client.get("/v1/models/absent").status_code == 404
    assert complete(server, "by program").status_code == 200
    assert adapter_of(server).id == 7
    assert load(server, folder / "chat", "chat").json()["lora_int_id"] == 8


def test_the_users_address_loads_nothing(server, folder):
    body = {"lora_name": "sql", "lora_path": str(folder / "sql")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.client.post(path, json=body).status_code == 404
    assert server.engine.did == []


def test_paths_outside_of_the_allowed_folders_are_refused(server, folder, tmp_path):
    (folder / "link").symlink_to(tmp_path / "outside")
    for path in (tmp_path / "outside", folder / ".." / "outside", folder / "link", "/"):
        answer = load(server, path)
        assert answer.status_code == 403
        expected = f"lora_path: expected a path in one of server.adapter_folders ({folder}), got"
        assert error_of(answer).startswith(expected)
    for path in ("offered/sql", "sql", "org/adapter", f"{folder}/sql\0"):
        answer = load(server, path)
        assert answer.status_code == 400
        assert error_of(answer).startswith("lora_path: expected an absolute path, got")
    answer = load(server, folder)
    assert answer.status_code == 404
    assert "expected a folder with adapter_config.json" in error_of(answer)
    assert server.engine.did == []


def test_without_allowed_folders_nothing_is_loaded(folder, tmp_path):
    config = configured(admin=f"unix:{tmp_path}/admin.sock")
    with running(AdapterEngine(config=config)) as server:
        answer = load(server, folder / "sql")
    assert answer.status_code == 403
    assert "server.adapter_folders (which is empty)" in error_of(answer)


def test_a_name_is_taken_until_it_is_replaced(server, folder):
    load(server, folder / "sql")
    answer = load(server, folder / "chat")
    assert (answer.status_code, error_of(answer)) == (
        400,
        "lora_name: 'sql' is loaded already; load_inplace = true replaces it",
    )
    assert load(server, folder / "chat", load_inplace=True).json()["lora_int_id"] == 2
    complete(server, "sql")
    assert adapter_of(server).path == str(folder / "chat")
    answer = load(server, folder / "chat", "smollm2")
    assert answer.status_code == 400
    assert "expected another name than those of the model, got 'smollm2'" in error_of(answer)


def test_unloading_ends_the_name(server, folder):
    load(server, folder / "sql")

    def unload(**body):
        return server.admin.post("/v1/unload_lora_adapter", json=body)

    answer = unload(lora_name="sql", lora_int_id=3)
    assert (answer.status_code, error_of(answer)) == (
        400,
        "lora_int_id: expected 1, which 'sql' has, got 3",
    )
    server.engine.gate.clear()
    with ThreadPoolExecutor() as threads:
        future = threads.submit(unload, lora_name="sql", lora_int_id=1, mode="abort")
        wait_until(lambda: ("remove", 1, "abort") in server.engine.did)
        server.engine.resolved["sql"] = folder / "sql"
        waiting = threads.submit(complete, server, "sql")  # of another adapter of that name
        server.engine.gate.set()
        assert future.result().json() == {"lora_name": "sql", "lora_int_id": 1}
        assert waiting.result().status_code == 200
    assert adapter_of(server).id == 2
    del server.engine.resolved["sql"]
    assert unload(lora_name="sql").status_code == 200
    assert complete(server, "sql").status_code == 404
    assert unload(lora_name="sql").status_code == 404


def test_what_the_engine_refuses_is_answered(server, folder):
    server.engine.wrong = RequestError("r: expected at most 16 (adapters.max_lora_rank), got 64")
    answer = load(server, folder / "sql")
    assert (answer.status_code, error_of(answer)) == (400, str(server.engine.wrong))
    assert complete(server, "sql").status_code == 404


def test_resolvers_are_asked_once_for_requests_at_the_same_time(server, folder):
    server.engine.resolved["sql"] = folder / "sql"
    server.engine.gate.clear()
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(complete, server, "sql") for _ in range(4)]
        wait_until(lambda: server.engine.did)
        server.engine.gate.set()
        assert {future.result().status_code for future in futures} == {200}
    request = LoRARequest("sql", 1, str(folder / "sql"))
    assert server.engine.did == [("resolve", "sql"), ("add", request)]
    assert complete(server, "sql").status_code == 200
    assert len(server.engine.did) == 2
    assert complete(server, "absent").status_code == 404


def test_the_hash_of_a_resolver_is_kept(server):
    server.engine.resolved["sql"] = LoRARequest("sql", 99, "/there", "abc")
    complete(server, "sql")
    assert adapter_of(server) == LoRARequest("sql", 1, "/there", "abc")


def test_a_faulty_resolver_ends_its_requests_alone(server, folder):
    server.engine.resolved["sql"] = PluginFaultError("plugin 'acme': its resolve failed: KeyError")
    server.engine.resolved["secret"] = RequestError("model: not for you")
    answer = complete(server, "sql")
    assert answer.status_code == 500
    assert "plugin 'acme'" in error_of(answer)
    answer = complete(server, "secret")
    assert (answer.status_code, error_of(answer)) == (400, "model: not for you")
    assert complete(server, "smollm2").status_code == 200


def test_an_engine_without_adapters_is_reported(folder, tmp_path):
    settings = {"admin": f"unix:{tmp_path}/admin.sock", "adapter_folders": [str(folder)]}
    with running(FakeEngine(config=configured(**settings))) as server:
        answer = load(server, folder / "sql")
        assert (answer.status_code, error_of(answer)) == (
            400,
            "lora_name: expected none, because this engine holds no adapters",
        )
        assert complete(server, "sql").status_code == 404


@pytest.mark.parametrize("path", BODIES)
def test_a_request_scales_its_adapter(server, folder, path):
    load(server, folder / "sql")

    def ask(model, scale):
        body = {**BODIES[path], "model": model, "lora_scale": scale}
        return server.client.post(path, json=body)

    for scale in (0.5, 0, -100, None):
        assert ask("sql", scale).status_code == 200
        expected = 1.0 if scale is None else float(scale)
        assert adapter_of(server) == LoRARequest("sql", 1, str(folder / "sql"), scale=expected)
    num_asked = len(server.engine.asked)
    refused = ask("smollm2", 0.5)
    assert refused.status_code == 400
    expected = "lora_scale: expected none, as the model of the request is no adapter, got 0.5"
    assert expected in refused.text
    for scale, words in ((101, "lora_scale"), ("half", "lora_scale")):
        wrong = ask("sql", scale)
        assert (wrong.status_code, words in wrong.text) == (400, True)
    assert len(server.engine.asked) == num_asked


def test_workers_know_what_others_load_and_unload():
    memory = SharedCounts.create(2)
    engine = AdapterEngine(config=configured())
    engine.resolved = {"poet": "/poet", "cook": "/cook"}
    first, second = (
        ServedAdapters(engine, ["base"], [], SharedCounts(os.dup(memory), column, 2))
        for column in (0, 1)
    )

    async def check():
        poet, cook = await asyncio.gather(first.find("poet"), second.find("cook"))
        assert poet.id != cook.id
        assert [await adapters.find("cook") for adapters in (first, second)] == [cook, cook]
        assert await second.find("poet") == poet
        added = [call[1].name for call in engine.did if call[0] == "add"]
        assert sorted(added) == ["cook", "poet"]
        del engine.resolved["poet"]
        await first.unload(UnloadAdapter(lora_name="poet"))
        assert [await adapters.find("poet") for adapters in (first, second)] == [None, None]
        assert await second.find("cook") == cook

    asyncio.run(check())
    os.close(memory)


def test_adapters_outlast_a_restart_of_the_engine_until_they_are_removed(server, folder):
    def listed():
        return [model["id"] for model in server.client.get("/v1/models").json()["data"][1:]]

    for name in ("sql", "chat", "other"):
        load(server, folder / "sql", name)
    server.engine.held = {}  # as after a restart
    server.engine.removed.append(3)  # by another client
    assert listed() == ["sql", "chat"]
    assert complete(server, "absent").status_code == 404
    assert complete(server, "sql").status_code == 200
    assert adapter_of(server) == LoRARequest("sql", 1, str(folder / "sql"))
    server.engine.held["new"] = LoRARequest("new", 2, "/x")  # by another client
    assert listed() == ["new", "sql"]
    body = {"lora_name": "sql"}
    assert server.admin.post("/v1/unload_lora_adapter", json=body).status_code == 200
    assert listed() == ["new"]
    assert load(server, folder / "chat", "chat").json()["lora_int_id"] == 4


@pytest.mark.parametrize("resolved", [False, True])
def test_defective_files_are_the_error_of_a_request(server, folder, resolved):
    message = f"{folder / 'sql' / 'adapter_config.json'}: r: expected a rank of at least 1, got 0"

    async def add(request):
        raise ModelError(message)

    server.engine.add = add
    if resolved:
        server.engine.resolved["sql"] = folder / "sql"
        answer, field = complete(server, "sql"), "model"
    else:
        answer, field = load(server, folder / "sql"), "lora_path"
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, message, field)


@pytest.mark.parametrize("name", ["a" * 256, "a/" * 2500])
def test_a_path_that_is_too_long_is_an_error_of_its_field(server, folder, name):
    answer = load(server, folder / name)
    assert answer.status_code == 400
    assert error_of(answer).startswith("lora_path: expected a path of at most 4000 characters")
