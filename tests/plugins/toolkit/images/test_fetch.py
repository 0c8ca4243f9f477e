"""Images by URL: permitted URLs, resolved addresses, and the contents of messages."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time

import pytest
from support.pictures import encoded, gradient
from support.waiting import PATIENCE_S

from hardpoint.plugins import RequestError
from hardpoint.plugins.config.engine import ImagesConfig, RemoteImagesConfig
from hardpoint.toolkit.images import Fetcher, ImageReader
from hardpoint.toolkit.images.addresses import is_public

DATA = encoded(gradient())
LOOPBACK = "127.0.0.1"
PLACE = "messages[0].content[0].image_url.url"


def response(body, status="200 OK", **headers):
    fields = {"content-length": len(body), "content-type": "text/x-lie", **headers}
    head = [f"HTTP/1.1 {status}", *(f"{n.replace('_', '-')}: {v}" for n, v in fields.items())]
    return "\r\n".join([*head, "", ""]).encode() + body


def redirect(location, status="302 Found"):
    return response(b"", status, location=location)


class Server:
    """Answers by path with bytes, on the loopback address; keeps the heads of requests."""

    def __init__(self, answers):
        self.answers, self.heads, self.tls = answers, [], None
        self._socket = socket.create_server((LOOPBACK, 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), self._secured(connection) as connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    part = connection.recv(4096)
                    if not part:
                        raise ConnectionError("the client has left")
                    head += part
                self.heads.append(head.decode())
                answer = self.answers[head.split(b" ")[1].decode()]
                for part in answer if isinstance(answer, list) else [answer]:
                    connection.sendall(part)
                    if isinstance(answer, list):
                        time.sleep(0.05)

    def _secured(self, connection):
        if self.tls is None:
            return connection
        return self.tls.wrap_socket(connection, server_side=True)

    def close(self):
        """End the thread first: it would accept connections of the next socket of this number."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._socket.close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(**answers):
            server = Server({f"/{path}": answer for path, answer in answers.items()})
            stack.callback(server.close)
            return server

        yield start


def fetcher(server=None, resolve=lambda host, port: [LOOPBACK], **settings):
    ports = settings.pop("ports", [80, 443] if server is None else [server.port])
    permits = settings.pop("permits", lambda address: address == LOOPBACK)
    tls = settings.pop("tls", None)
    remote = RemoteImagesConfig(enabled=True, ports=ports, **{"seconds": 60.0, **settings})
    return Fetcher(remote, 10_000, resolve=resolve, permits=permits, tls=tls)


def fetch(fetcher_, url):
    return fetcher_.fetch(url, PLACE)


def refused(fetcher_, url):
    with pytest.raises(RequestError) as caught:
        fetch(fetcher_, url)
    message = str(caught.value)
    assert message.startswith(f"{PLACE}: ")
    assert LOOPBACK not in message  # of the network behind the server, they reveal nothing
    return message.removeprefix(f"{PLACE}: ")


def test_nothing_is_fetched_unless_that_is_switched_on():
    assert not ImagesConfig().remote.enabled
    resolved = []
    off = Fetcher(RemoteImagesConfig(), 10, resolve=lambda *where: resolved.append(where))
    assert refused(off, "https://example.com/a.png").startswith("expected a data: URL, because")
    assert resolved == []


def test_an_image_is_fetched_by_the_address_that_was_checked(serve):
    server = serve(image=response(DATA))
    connections = []

    def resolve(host, port):
        connections.append((host, port))
        return [LOOPBACK]

    url = f"http://Images.Example.com:{server.port}/image?size=big#part"
    server.answers["/image?size=big"] = response(DATA)
    assert fetch(fetcher(server, resolve), url) == DATA
    assert connections == [
        ("images.example.com", server.port)
    ]  # once: a name cannot change between
    (head,) = server.heads
    assert head.startswith("GET /image?size=big HTTP/1.1\r\n")
    assert f"\r\nHost: images.example.com:{server.port}\r\n" in head
    assert "cookie" not in head.lower()
    assert "authorization" not in head.lower()


def test_the_type_that_a_host_gives_is_not_asked_and_the_content_is(serve):
    server = serve(image=response(DATA), page=response(b"<html>", content_type="image/png"))
    limits = ImagesConfig()
    with contextlib.closing(ImageReader(limits, fetcher(server))) as reader:
        url = f"http://example.com:{server.port}"
        assert reader.read([(PLACE, f"{url}/image")])[0].width == 6
        with pytest.raises(RequestError, match="by its content; got another format"):
            reader.read([(PLACE, f"{url}/page")])


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ([], "its host has no public address"),
        (["127.0.0.1"], "its host has no public address"),
        (["93.184.216.34", "10.0.0.1"], "its host has no public address"),
        (["::ffff:8.8.8.8"], "its host has no public address"),
        (["fe80::1%2"], "its host has no public address"),
    ],
)
def test_all_addresses_of_a_host_have_to_be_public(addresses, words):
    strict = fetcher(None, lambda host, port: addresses, permits=is_public)
    assert refused(strict, "http://example.com/") == words


def test_a_host_that_is_not_found_looks_like_one_that_leads_inside():
    def fails(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    assert refused(fetcher(None, fails), "http://db.corp/") == "its host has no public address"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.com/a", "begins with https:// or http://"),
        ("gopher://example.com/a", "begins with https:// or http://"),
        ("//example.com/a", "begins with https:// or http://"),
        ("http:///a", "the name of a host, in its usual form"),
        ("http://2130706433/", "the name of a host, in its usual form"),
        ("http://0x7f000001/", "the name of a host, in its usual form"),
        ("http://0177.0.0.1/", "the name of a host, in its usual form"),
        ("http://127.1/", "the name of a host, in its usual form"),
        ("http://127.0.0.1%2f@example.com/", "without a user's name or password"),
        ("http://me:you@example.com/", "without a user's name or password"),
        ("http://example.com@10.0.0.1/", "without a user's name or password"),
        ("http://exa mple.com/", "printable ASCII characters without blanks"),
        ("http://example.com\\@10.0.0.1/", "printable ASCII characters without blanks"),
        ("http://example.com/\r\nHost: x", "printable ASCII characters without blanks"),
        ("http://①②⑦.⓪.⓪.①/", "printable ASCII characters without blanks"),
        ("http://example.com:22/", "one of the ports 80, 443 (images.remote.ports)"),
        ("http://example.com:99999/", "expected a URL such as"),
        ("http://[::1", "expected a URL such as"),
        ("http://[::1%25eth0]/", "has no public address"),
        ("http://[::ffff:127.0.0.1]/", "the name of a host, in its usual form"),
        ("http://[::ffff:7f00:1]/", "has no public address"),
        ("http://-a.com/", "the name of a host, in its usual form"),
        ("http://" + "a" * 5000, "at most 4096 characters"),
    ],
)
def test_forged_urls(url, words):
    def as_given(host, port):
        return [host]

    assert words in refused(fetcher(None, as_given, permits=is_public), url)


def test_hosts_may_be_listed_and_each_redirect_is_checked(serve):
    server = serve(image=response(DATA))
    port = server.port
    server.answers["/out"] = redirect(f"http://evil.com:{port}/image")
    server.answers["/in"] = redirect("/image")
    listed = fetcher(server, hosts=["a.com", "*.b.com"])
    for host in ("a.com", "x.b.com", "y.x.b.com", "A.COM", "a.com."):
        assert fetch(listed, f"http://{host}:{port}/image") == DATA
    assert fetch(listed, f"http://a.com:{port}/in") == DATA
    words = "its host is not allowed by images.remote.hosts"
    for url in ("http://b.com", "http://evil.com", "http://xb.com", "http://a.com.evil.com"):
        assert refused(listed, f"{url}:{port}/image") == words
    assert refused(listed, f"http://a.com:{port}/out") == words


def test_redirects_lead_to_public_addresses_alone_and_not_on_and_on(serve):
    server = serve()
    port = server.port
    chain = {f"/{n}": redirect(f"/{n + 1}") for n in range(1, 9)}
    server.answers.update(chain | {"/4": response(DATA)})
    server.answers["/inside"] = redirect(f"http://inside.corp:{port}/4", "307 Temporary Redirect")
    server.answers["/file"] = redirect("file:///etc/passwd")
    server.answers["/decimal"] = redirect(f"http://2130706433:{port}/4")

    def resolve(host, port):
        return ["10.0.0.7"] if host == "inside.corp" else [LOOPBACK]

    redirecting = fetcher(server, resolve)
    assert fetch(redirecting, f"http://a.com:{port}/1") == DATA
    server.answers["/4"] = redirect("/5")
    assert "leads to more than 3 others" in refused(redirecting, f"http://a.com:{port}/1")
    assert refused(redirecting, f"http://a.com:{port}/inside") == "its host has no public address"
    assert "begins with https://" in refused(redirecting, f"http://a.com:{port}/file")
    assert "in its usual form" in refused(redirecting, f"http://a.com:{port}/decimal")


def test_a_name_that_changes_between_hops_is_checked_again(serve):
    """Rebinding: the first answer is public, the next one is not."""
    server = serve(image=response(DATA))
    server.answers["/again"] = redirect("/image")
    answers = iter([[LOOPBACK], ["169.254.169.254"]])
    changing = fetcher(server, lambda host, port: next(answers))
    assert refused(changing, f"http://a.com:{server.port}/again") == (
        "its host has no public address"
    )
    assert len(server.heads) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response(b"x" * 10_001), "at most 10000 bytes (images.max_bytes), got more"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000, "images.max_bytes"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 300_000, "does not answer as it should"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", "sent less than it announced"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nx",
            "does not answer as it should",
        ),
        (response(DATA, content_encoding="gzip"), "sent a compressed answer"),
        (response(b"no", "404 Not Found"), "its host answered with the status 404"),
        (response(b"no", "302 Found"), "its host answered with the status 302"),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer as it should"),
        (b"", "does not answer as it should"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 40], "more than 0.2 s to fetch"),
        ([b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n"] * 40], "more than 0.2 s to fetch"),
    ],
)
def test_what_a_host_may_answer(serve, answer, words):
    server = serve(image=answer)
    limited = fetcher(server, **({"seconds": 0.2} if isinstance(answer, list) else {}))
    assert words in refused(limited, f"http://a.com:{server.port}/image")


def test_chunks_are_read(serve):
    half = len(DATA) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (DATA[:half], DATA[half:], b""))
    server = serve(image=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    assert fetch(fetcher(server), f"http://a.com:{server.port}/image") == DATA


def test_a_resolver_that_hangs_and_a_host_that_does_not_listen():
    hanging = threading.Event()
    slow = fetcher(None, lambda host, port: hanging.wait(60) and [], seconds=0.2)
    assert "more than 0.2 s to fetch (images.remote.seconds)" in refused(slow, "http://a.com/")
    hanging.set()
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))  # and nothing listens
        port = taken.getsockname()[1]
        closed = fetcher(None, ports=[port])
        assert refused(closed, f"http://a.com:{port}/") == "its host does not answer as it should"


def test_no_proxy_is_used(serve, monkeypatch):
    server = serve(image=response(DATA))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert fetch(fetcher(server), f"http://a.com:{server.port}/image") == DATA


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ("-subj", "/CN=a.com", "-addext", "subjectAltName=DNS:a.com")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [*names, "-nodes", "-days", "2", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


def test_https_asks_for_the_name_of_the_host_and_is_not_left_for_http(serve, certificate):
    server = serve(image=response(DATA))
    server.answers["/down"] = redirect(f"http://a.com:{server.port}/image")
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(*certificate)
    names = []
    server.tls.sni_callback = lambda connection, name, context: names.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    trusting_fetcher = fetcher(server, tls=trusting)
    assert fetch(trusting_fetcher, f"https://a.com:{server.port}/image") == DATA
    assert names == ["a.com"]
    assert (
        refused(trusting_fetcher, f"https://a.com:{server.port}/down")
        == "it leads from https to http"
    )
    # The certificate has to be of that name, and of an authority that is trusted.
    words = "its host does not answer as it should"
    assert refused(trusting_fetcher, f"https://b.com:{server.port}/image") == words
    assert refused(fetcher(server), f"https://a.com:{server.port}/image") == words
