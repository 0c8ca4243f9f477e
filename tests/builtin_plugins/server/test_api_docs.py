"""`/docs`: Swagger UI from files of the package."""

import gzip

import pytest
from support.browser import new_page, running_browser
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.live_view import bearer
from support.processes import ROOT

FOLDER = ROOT / "builtin_plugins" / "server" / "api_docs"
PATHS = ["/docs", *(f"/docs/{name}" for name in ("docs.js", "docs.css", "swagger-ui.css"))]
BUNDLE = "/docs/swagger-ui-bundle.js"


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured())) as running_server:
        yield running_server


def test_the_page_and_its_files_are_served(server):
    for path in [*PATHS, BUNDLE]:
        response = server.client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
    assert server.client.get("/docs/LICENSE.swagger-ui").status_code == 404


@pytest.mark.parametrize("coding", ["gzip", "identity"])
def test_compressed_files_are_sent_as_the_client_reads_them(server, coding):
    response = server.client.get(BUNDLE, headers={"accept-encoding": coding})
    assert response.headers.get("content-encoding", "identity") == coding
    stored = (FOLDER / "swagger-ui-bundle.js.gz").read_bytes()
    assert response.content == gzip.decompress(stored)
    assert response.headers["content-type"] == "text/javascript; charset=utf-8"
    again = server.client.get(BUNDLE, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_licenses_of_vendored_files_are_with_them():
    assert "Apache License" in (FOLDER / "LICENSE.swagger-ui").read_text()
    assert "SmartBear" in (FOLDER / "NOTICE.swagger-ui").read_text()


def test_the_page_is_open_with_the_chat_page_and_its_data_is_not():
    with running(FakeEngine(config=configured(), extensions=[("one", bearer("k"))])) as server:
        assert {server.client.get(path).status_code for path in PATHS} == {200}
        assert server.client.get("/openapi.json").status_code == 401
    engine = FakeEngine(config=configured(open_routes=["/health"]))
    engine.extensions = [("one", bearer("k"))]
    with running(engine) as server:
        assert {server.client.get(path).status_code for path in PATHS} == {401}


def test_the_configuration_can_leave_the_page_out():
    with running(FakeEngine(config=configured(page=False))) as server:
        assert {server.client.get(path).status_code for path in PATHS} == {404}


@pytest.mark.nightly
def test_a_browser_shows_the_routes_and_asks_for_a_key(tmp_path):
    with running_browser() as browser:
        with (
            running(FakeEngine(config=configured())) as server,
            new_page(browser, server.url + "/docs") as page,
        ):
            page.wait_for("document.querySelectorAll('.opblock').length > 20")
            page.evaluate("document.querySelector('.opblock-summary-control').click()")
            page.wait_for("document.querySelector('.opblock-body')")
            page.screenshot(tmp_path / "docs.png")
            outside = [url for url in page.requested() if not url.startswith((server.url, "data:"))]
            assert outside == []
            assert page.problems() == []
        engine = FakeEngine(config=configured(), extensions=[("one", bearer("k"))])
        with running(engine) as server, new_page(browser, server.url + "/docs") as page:
            page.wait_for("!document.querySelector('#key-form').hidden")
            page.evaluate("document.querySelector('#key').focus()")
            page.type("k")
            page.press("Enter", "\r")
            page.wait_for("document.querySelectorAll('.opblock').length > 20")
            page.wait_for("document.querySelector('.authorize.locked')")
