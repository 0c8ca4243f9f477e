"""HTTPS, sessions and adapters with several worker processes: whoever answers, it is one server."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import httpx
import pytest
from support.adapters import write_adapter, write_model
from support.serve_program import serving

WORKERS = 3
TRIES = 12  # over connections of their own, which any worker may accept
PROMPT = [7, 9, 11, 13] * 8
BODY = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a small Llama that speaks HTTPS, with a folder of adapters."""
    assert shutil.which("openssl"), "the test needs the program openssl"
    folder = tmp_path_factory.mktemp("server")
    model = write_model(folder / "model")
    write_adapter(folder / "adapters" / "poet", model)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    files = ("-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", "req", "-x509", *curve, *names, *files], check=True, timeout=60)
    key.chmod(0o600)
    with serving(
        folder,
        folder / "model",
        f"server.workers = {WORKERS}",
        f'server.tls_certificate = "{certificate}"',
        f'server.tls_key = "{key}"',
        f'server.admin = "unix:{folder / "admin"}"',
        f'server.adapter_folders = ["{folder / "adapters"}"]',
        "adapters.max_loras = 2",
        options=("--set", 'attention.use="torch"', "--set", 'load.use="safetensors"'),
        verify=ssl.create_default_context(cafile=certificate),
    ) as running:
        running.folder = folder
        running.trusted = certificate
        yield running


def answers(server, **body):
    """Return the answers to a request, asked again and again."""
    context = ssl.create_default_context(cafile=server.trusted)
    texts = []
    for _ in range(TRIES):
        with httpx.Client(base_url=server.url, timeout=30, verify=context) as client:
            texts.append(client.post("/v1/completions", json={**BODY, **body}))
    return texts


def admin(server, path, **body):
    transport = httpx.HTTPTransport(uds=str(server.folder / "admin"))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as client:
        return client.post(path, json=body)


def texts(responses):
    assert {response.status_code for response in responses} == {200}, responses[0].text
    return {response.json()["choices"][0]["text"] for response in responses}


@pytest.mark.nightly
def test_all_workers_speak_https(server):
    assert server.url.startswith("https://")
    assert len(texts(answers(server))) == 1
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http"))


@pytest.mark.nightly
def test_a_session_is_that_of_all_workers(server):
    cached = answers(server, session="anna", retain_seconds=60)
    outcomes = {r.json()["choices"][0]["part_figures"]["retention"]["outcome"] for r in cached}
    assert outcomes == {"accepted"}
    path = "/v1/sessions/anna/release"
    context = ssl.create_default_context(cafile=server.trusted)
    released = []
    for _ in range(TRIES):
        with httpx.Client(base_url=server.url, timeout=30, verify=context) as client:
            released.append(client.post(path, json={}).json()["outcome"])
    assert released == ["accepted", *["missing"] * (TRIES - 1)]


@pytest.mark.nightly
def test_an_adapter_is_loaded_for_all_workers(server):
    plain = texts(answers(server))
    refused = answers(server, model="poet")
    assert {response.status_code for response in refused} == {404}
    loaded = admin(
        server,
        "/v1/load_lora_adapter",
        lora_name="poet",
        lora_path=str(server.folder / "adapters" / "poet"),
    )
    assert loaded.status_code == 200, loaded.text
    adapted = texts(answers(server, model="poet"))
    assert len(adapted) == 1
    assert adapted != plain
    assert texts(answers(server)) == plain
    assert admin(server, "/v1/unload_lora_adapter", lora_name="poet").status_code == 200
    assert {response.status_code for response in answers(server, model="poet")} == {404}
