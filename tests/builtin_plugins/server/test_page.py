"""The files of the web page. Tests in a browser are in another file."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.live_view import bearer, running_live_view
from support.processes import ROOT

from hardpoint.builtin_plugins.server.routes.page import live_routes, page_routes, with_page_files

PAGE = ROOT / "builtin_plugins" / "server" / "page"
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
DOCUMENTS = [path for path in FILES if path.suffix == ".html"]
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


def label(path):
    return str(path.relative_to(PAGE))


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured())) as running_server:
        yield running_server


def check_headers(response):
    parts = [
        part.strip().split(" ", 1)
        for part in response.headers["content-security-policy"].split(";")
    ]
    assert dict(parts) == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_the_page_and_its_files_are_served_with_their_types(server):
    root = server.client.get("/")
    assert root.headers["content-type"] == "text/html; charset=utf-8"
    assert root.content == (PAGE / "chat" / "chat.html").read_bytes()
    check_headers(root)
    served = [path for path in FILES if path.parent.name != "live" and path.suffix != ".html"]
    assert len(served) > 10
    for path in served:
        response = server.client.get(f"/page/{label(path)}")
        assert response.content == path.read_bytes()
        assert response.headers["content-type"].partition(";")[0] == TYPES[path.suffix]
        check_headers(response)


def test_nothing_else_of_the_folder_is_served(server):
    others = [
        "live/live.js",
        "chat/chat.html",
        "chat/",
        "",
        "../routes/page.py",
        "%2e%2e/__init__.py",
    ]
    assert {server.client.get(f"/page/{name}").status_code for name in others} == {404}
    assert server.client.post("/").status_code == 405


def test_a_browser_that_has_a_file_gets_it_no_second_time(server):
    tag = server.client.get("/page/chat/chat.js").headers["etag"]
    for header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = server.client.get("/page/chat/chat.js", headers={"if-none-match": header})
        assert (again.status_code, again.content) == (304, b"")
        check_headers(again)
    changed = server.client.get("/page/chat/chat.js", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200
    assert server.client.get("/page/chat/chat.css").headers["etag"] != tag


def test_the_page_is_there_without_a_key_and_its_data_is_not():
    with running(FakeEngine(config=configured(), extensions=[("one", bearer("k"))])) as server:
        paths = [route.path for route in page_routes()]
        assert {server.client.get(path).status_code for path in paths} == {200}
        assert server.client.get("/v1/models").status_code == 401
        assert server.client.get("/page/chat/other.js").status_code == 401


def test_a_closed_page_is_closed_with_its_files():
    engine = FakeEngine(config=configured(open_routes=["/health"]))
    engine.extensions = [("one", bearer("k"))]
    with running(engine) as server:
        paths = [route.path for route in page_routes()]
        assert {server.client.get(path).status_code for path in paths} == {401}
    assert with_page_files(["/health"], page_routes()) == {"/health"}


def test_the_configuration_can_leave_the_page_out():
    with running(FakeEngine(config=configured(page=False))) as server:
        for path in ("/", "/page/chat/chat.js"):
            response = server.client.get(path)
            assert response.status_code == 404
            assert response.json()["error"]["message"] == f"path: there is no route {path!r}"


def test_the_live_view_is_of_the_admin_address():
    assert all(route.admin for route in live_routes())
    assert not any(route.admin for route in page_routes())
    with running_live_view() as (server, _):
        assert server.client.get("/").content == (PAGE / "live" / "live.html").read_bytes()
        check_headers(server.client.get("/"))
        assert server.client.get("/page/live/live.js").status_code == 200
        assert server.client.get("/page/chat/chat.js").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=label)
def test_files_name_nothing_outside(path):
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:|wss?:)?//[\w.]+\.\w+", text) == []
    assert (
        re.findall(
            r"@import|url\(|//cdn|eval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML"
            r"|document\.write|localStorage|document\.cookie",
            text,
        )
        == []
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_imports_lead_to_files(path):
    for target in re.findall(r'from "([^"]+)"', path.read_text()):
        assert (path.parent / target).resolve() in SCRIPTS, target


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_imported_names_exist(path):
    for names, target in re.findall(r'import \{([^}]+)\} from "([^"]+)"', path.read_text()):
        exporting = (path.parent / target).read_text()
        exported = set(
            re.findall(r"^export (?:async )?(?:function\*? ?|class |const )(\w+)", exporting, re.M)
        )
        assert {name.strip() for name in names.split(",")} - exported == set()


class Document(html.parser.HTMLParser):
    """The tags of a document, in order."""

    def __init__(self, path):
        super().__init__()
        self.tags = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def ids(self):
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


def scripts_of(document):
    """Return the text of all scripts that a document loads."""
    folder = document.parent.name
    return "\n".join(p.read_text() for p in SCRIPTS if p.parent.name in (folder, "shared"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_ids_are_unique_and_those_that_are_named_exist(path):
    document = Document(path)
    ids = document.ids()
    assert sorted(set(ids)) == sorted(ids)
    named = {
        part
        for _, attributes in document.tags
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls")
        for part in attributes.get(name, "").split()
    }
    named |= set(re.findall(r'byId\("([\w-]+)"\)', scripts_of(path)))
    assert len(named) > 10
    assert named - set(ids) == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_documents_hold_nothing_inline_and_what_they_load_is_served(path):
    document = Document(path)
    for tag, attributes in document.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        for name in ("src", "href"):
            target = attributes.get(name, "#")
            # Relative: the page also works behind a proxy with a prefix.
            assert target.startswith("#") or (PAGE / target.removeprefix("page/")).is_file(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_control_of_a_document_has_a_label(path):
    document = Document(path)
    labelled = {attributes.get("for") for tag, attributes in document.tags if tag == "label"}
    controls = [a for tag, a in document.tags if tag in ("input", "select", "textarea")]
    assert [a["id"] for a in controls if a["id"] not in labelled and "aria-label" not in a] == []
    assert ("html", {"lang": "en"}) in document.tags
    assert all(a.get("type") in ("button", "submit") for tag, a in document.tags if tag == "button")


def colours(text):
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, other):
    light, dark = sorted((luminance(first), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme):
    """WCAG AA: 4.5 for text, 3 for the edges of controls."""
    light, dark = (
        (PAGE / "shared" / "base.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    )
    palette = colours(light) | (colours(dark) if scheme == "dark" else {})
    papers = ("paper", "raised", "sunken", "accent-soft")
    pairs = [(ink, paper) for ink in ("ink", "muted", "accent") for paper in papers]
    pairs += [
        ("on-accent", "accent"),
        ("problem", "problem-soft"),
        ("problem", "paper"),
        ("notice", "paper"),
    ]
    kinds = ("word", "string", "number")
    pairs += [(f"code-{kind}", paper) for kind in kinds for paper in papers[:3]]
    low = {pair for pair in pairs if contrast(*(palette[name] for name in pair)) < 4.5}
    assert low == set()
    assert min(contrast(palette["edge"], palette[paper]) for paper in papers[:2]) >= 3


@pytest.fixture
def node(request):
    """Runs a script with node; returns its output."""
    command = shutil.which("node")
    if command is None and not request.config.getoption("all"):
        pytest.skip("no node; scripts/test --all installs it")
    assert command is not None

    def run(script, *options):
        arguments = [command, "--input-type=module", *options]
        done = subprocess.run(arguments, input=script, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_scripts_parse(node):
    checks = "import vm from 'node:vm'; for (const text of %s) new vm.SourceTextModule(text);"
    node(checks % json.dumps([path.read_text() for path in SCRIPTS]), "--experimental-vm-modules")


def module(path):
    """Return a script's text as a module that needs no others, for node to run."""
    return re.sub(r"^import .*$", "", path.read_text(), flags=re.M)


def test_events_are_found_however_the_stream_is_split(node):
    stream = ': hi\r\n\r\ndata: {"a":1}\n\ndata:two\rdata: lines\r\revent: x\ndata: ü\n\ndata: cut'
    script = (
        module(PAGE / "chat" / "events.js")
        + f"""
      const text = {json.dumps(stream)};
      const found = new Set();
      for (let i = 0; i <= text.length; i += 1) {{
        for (let j = i; j <= text.length; j += 1) {{
          const parser = new EventParser();
          const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
          found.add(JSON.stringify(parts.flatMap((part) => parser.feed(part))));
        }}
      }}
      console.log(JSON.stringify([...found]));"""
    )
    (events,) = json.loads(node(script))
    assert json.loads(events) == ['{"a":1}', "two\nlines", "ü"]


def test_markdown_is_found(node):
    text = "# A *b*\n\nOne `c` **d** [e](https://x.org/f_(g)) [h](javascript:i)\n\n"
    text += "- j\n  - k\n- l\n\n```py\nm\n```\n|n|o|\n|-|-|\n|p|q|"
    script = (
        module(PAGE / "chat" / "markdown.js")
        + f"""
      const blocks = parseBlocks({json.dumps(text)});
      console.log(JSON.stringify(blocks, (key, value) => key === "source" ? undefined : value));"""
    )
    heading, paragraph, points, code, table = json.loads(node(script))
    assert heading["parts"] == ["A ", {"type": "emphasis", "parts": ["b"]}]
    assert paragraph["parts"] == [
        "One ",
        {"type": "code", "text": "c"},
        " ",
        {"type": "strong", "parts": ["d"]},
        " ",
        {"type": "link", "url": "https://x.org/f_(g)", "parts": ["e"]},
        " [h](javascript:i)",
    ]
    inner = {"type": "list", "start": None, "items": [[{"type": "paragraph", "parts": ["k"]}]]}
    assert points["items"] == [
        [{"type": "paragraph", "parts": ["j"]}, inner],
        [{"type": "paragraph", "parts": ["l"]}],
    ]
    assert (code["text"], code["language"]) == ("m", "py")
    assert (table["head"], table["rows"]) == ([["n"], ["o"]], [[["p"], ["q"]]])


@pytest.mark.parametrize(
    "tail", ["x", *(pytest.param(tail, marks=pytest.mark.nightly) for tail in ("", "\\n"))]
)
def test_hostile_markdown_takes_no_long(node, tail):
    """A model may write anything; the page reads each text again as it grows."""
    script = (
        module(PAGE / "chat" / "markdown.js")
        + """
      const pieces = ["[", "*a ", "_a", "`", "> ", "- ", "[a](", "**", "~~", "|-", "# ", "\\\\", "http://",
        "![](", "1. ", "` `` ", "    ", "\\n- ", "\\n> ", "|\\n|-|\\n", "<", "\\n"];
      for (const piece of pieces) {
        const begun = process.cpuUsage();  // of this process alone, however busy the machine is
        parseBlocks(piece.repeat(20000) + TAIL);
        const used = process.cpuUsage(begun), took = (used.user + used.system) / 1000;
        if (took > 1500) throw new Error(`${JSON.stringify(piece)} took ${took} ms`);
      }""".replace("TAIL", f'"{tail}"')
    )
    node(script)


def test_parts_of_code_are_found(node):
    """All of the text is there, however hostile, and soon."""
    cases = {
        "js": ["let a = 1; // b", 'x = "a\\"b" + `c\n${d}`', "/* open", "'cut\nlet"],
        "python": ["# no", "'#' + 3.5e1 # yes"],
        "sql": ["SELECT 1 -- one"],
        "html": ["<!-- a - b --> c"],
        "": ["let a = 1"],
    }
    hostile = ['"', "'", "`", "/*", "/**", "\\", "<!--", "-", "1", "a", "\n"]
    script = (
        module(PAGE / "chat" / "highlight.js")
        + f"""
      const found = {{}};
      for (const [language, texts] of Object.entries({json.dumps(cases)})) {{
        found[language] = texts.map((text) => codeParts(text, language).filter(([kind]) => kind));
      }}
      for (const piece of {json.dumps(hostile)}) {{
        for (const language of ["js", "python", "sql", "html"]) {{
          const text = piece.repeat(Math.floor(19000 / piece.length));
          const begun = process.cpuUsage();
          const parts = codeParts(text, language);
          if (parts.map(([, part]) => part).join("") !== text) throw new Error(piece);
          if (process.cpuUsage(begun).user > 500e3) throw new Error(`${{piece}} took long`);
        }}
      }}
      console.log(JSON.stringify(found));"""
    )
    parts = json.loads(node(script))
    assert parts[""] == [[]]
    assert parts["js"][0] == [["word", "let"], ["number", "1"], ["comment", "// b"]]
    assert parts["js"][1] == [["string", '"a\\"b"'], ["string", "`c\n${d}`"]]
    assert parts["js"][2:] == [[["comment", "/* open"]], [["string", "'cut"], ["word", "let"]]]
    assert parts["python"][1] == [["string", "'#'"], ["number", "3.5e1"], ["comment", "# yes"]]
    assert parts["sql"] == [[["word", "SELECT"], ["number", "1"], ["comment", "-- one"]]]
    assert parts["html"] == [[["comment", "<!-- a - b -->"]]]


def test_an_answer_is_put_together(node):
    """Parts of calls, both names of reasoning, usage; a cut answer is not sent again."""

    def chunk(**delta):
        return {"choices": [{"index": 0, "delta": delta}]}

    def call(index, **part):
        return chunk(tool_calls=[{"index": index, **part}])

    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        chunk(reasoning="Hm", reasoning_content="Hm"),
        chunk(reasoning_content="."),
        chunk(content="Yes"),
        {"choices": [{"index": 1, "delta": {"content": "of another one"}}]},
        call(0, id="a", function={"name": "one", "arguments": '{"x"'}),
        call(1, id="b", function={"name": "two", "arguments": '{"y": '}),
        call(0, function={"arguments": ": 1}"}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "warning": "w"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    ]
    script = (
        module(PAGE / "chat" / "answer.js")
        + f"""
      const answer = new Answer();
      const wasEmpty = answer.isEmpty;
      for (const chunk of {json.dumps(chunks)}) answer.add(chunk);
      const ends = [answer.finishReason, answer.warning, answer.note()];
      console.log(JSON.stringify([wasEmpty, answer.message(), ...ends]));"""
    )
    was_empty, message, reason, warning, note = json.loads(node(script))
    assert was_empty
    assert message == {
        "role": "assistant",
        "content": "Yes",
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "one", "arguments": '{"x": 1}'}}
        ],
    }
    assert (reason, warning) == ("tool_calls", "w")
    assert note.startswith("9 tokens")
    assert note.endswith("prompt of 3 tokens")


def test_schemas_become_plain(node):
    """References, wherever their targets are, and alternatives that are null."""
    loop = {"$ref": "#/components/schemas/L"}
    root = {"components": {"schemas": {"A": {"type": "integer"}, "L": loop}}}
    schemas = [
        {"$ref": "#/components/schemas/A", "description": "d"},
        {"$ref": "#/$defs/B", "$defs": {"B": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
        {"type": ["number", "null"], "default": None},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/components/schemas/L"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://elsewhere.test/schema"},
        True,
    ]
    script = (
        module(PAGE / "chat" / "schema_form.js")
        + f"""
      const found = {json.dumps(schemas)}.map((schema) => plainSchema(schema, {json.dumps(root)}));
      console.log(JSON.stringify(found));"""
    )
    number, text, either, *unclear = json.loads(node(script))
    assert number == {"type": "integer", "description": "d"}
    assert text["type"] == "string"
    assert either == {"type": "number", "default": None}
    assert unclear == [None] * 5
