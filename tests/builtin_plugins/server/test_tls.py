"""HTTPS, with a certificate of the test's own."""

import shutil
import ssl
import subprocess

import httpx
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.access.tls import check_tls
from hardpoint.plugins import ConfigError


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with cert.pem and key.pem, an other.pem of another pair, and an encrypted one."""
    assert shutil.which("openssl"), "the test needs the program openssl"
    folder = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    openssl("req", "-x509", *curve, *names, "-nodes", "-days", "2", "-keyout", key, "-out", cert)
    openssl(
        "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(folder / "other.pem")
    )
    encrypted = ("-aes256", "-passout", "pass:secret", "-out", str(folder / "encrypted.pem"))
    openssl("ec", "-in", key, *encrypted)
    return folder


def settings(files, certificate, key):
    paths = {"tls_certificate": certificate, "tls_key": key}
    options = {name: str(files / file) for name, file in paths.items() if file is not None}
    return configured(**options)


def test_a_server_speaks_https(files):
    config = settings(files, "cert.pem", "key.pem")
    context = ssl.create_default_context(cafile=files / "cert.pem")
    with running(FakeEngine(config=config)) as server:
        url = f"https://127.0.0.1:{server.port}/v1/models"
        assert httpx.get(url, verify=context).json()["object"] == "list"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/v1/models")
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            httpx.get(url)


def test_a_handshake_that_does_not_come_ends_the_connection(files):
    config = configured(
        tls_certificate=str(files / "cert.pem"), tls_key=str(files / "key.pem"), header_seconds=0.3
    )
    with running(FakeEngine(config=config)) as server, server.socket() as connection:
        assert connection.recv(1) == b""


def test_whether_there_is_tls(files):
    assert check_tls(settings(files, "cert.pem", "key.pem").server)
    assert not check_tls(configured().server)


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        (
            "cert.pem",
            None,
            "server.tls_key: expected a PEM file, because there is a tls_certificate",
        ),
        (
            None,
            "key.pem",
            "server.tls_certificate: expected a PEM file, because there is a tls_key",
        ),
        ("none.pem", "key.pem", "server.tls_certificate: .*none.pem' cannot be read: No such file"),
        ("cert.pem", "none.pem", "server.tls_key: .*none.pem' cannot be read: No such file"),
        (".", "key.pem", "server.tls_certificate: .* cannot be read: Is a directory"),
        ("cert.pem", "other.pem", "the key of .*other.pem' is not the certificate's"),
        ("cert.pem", "encrypted.pem", "encrypted.pem' is encrypted; expected a key without"),
        ("key.pem", "cert.pem", "are no certificate and key in PEM"),
    ],
)
def test_files_that_do_not_fit(files, certificate, key, message):
    with pytest.raises(ConfigError, match=message):
        check_tls(settings(files, certificate, key).server)
