"""Every Python example in the README and the guides runs, page by page, as a reader would do it."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from support.processes import ROOT, run
from support.selection import ALWAYS_RUN, changed_pages
from support.source_tree import (
    class_nodes,
    classes,
    defined_names,
    functions,
    modules,
    nodes,
    top_level_folders,
)

from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig, OutputParserContext, ParserRequest
from hardpoint.plugins.output_parser import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from hardpoint.plugins.text.output_parser import join_events
from hardpoint.testing.scripted_tokenizer import ByteTokenizer

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# file: (\S+)\n")
COPY = re.compile(r"^cp (examples/\S+) \.$", re.MULTILINE)
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference"
GENERATED_PAGES = re.findall(r"folder / \"(\S+\.md)\"", (ROOT / "scripts/reference.py").read_text())
PAGE_NAME = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg)\b")
TEMPLATE_PAGE = re.compile(r"^=== page\n(\S+\.md)$", re.MULTILINE)
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents),
]
LINKING_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


IN_EACH_RUN = {*ALWAYS_RUN, *changed_pages()}


def page_params() -> list:
    """Return the pages as parameters; most of them run with --all only."""
    return [
        pytest.param(
            page,
            id=label(page),
            marks=[] if label(page) in IN_EACH_RUN else pytest.mark.nightly,
        )
        for page in PAGES
    ]


@pytest.mark.parametrize("page", page_params())
def test_examples_run(page, tmp_path):
    """Blocks that begin with `# file: NAME` become files; the other Python ones run in order.

    Examples that a shell block copies are copied first.
    """
    script = []
    for language, text in blocks(page):
        if language == "bash":
            for example in COPY.findall(text):
                shutil.copy(ROOT / example, tmp_path)
        if found := FILE.match(text):
            (tmp_path / found[1]).write_text(text)
        elif language == "python":
            script.append(text)
    if not script:
        pytest.skip("no Python examples")
    (tmp_path / "example.py").write_text("\n".join(script))
    run(sys.executable, "example.py", cwd=tmp_path, examples=0.1)


@pytest.mark.nightly
def test_the_fastapi_application_answers(tmp_path, monkeypatch):
    """FastAPI is installed for --all only, so the page has its application as a file."""
    pytest.importorskip("fastapi")
    testclient = importlib.import_module("fastapi.testclient")
    page = DOCS / "python-api.md"
    files = {name[1]: text for _, text in blocks(page) if (name := FILE.match(text))}
    (tmp_path / "fastapi_application.py").write_text(files["fastapi_application.py"])
    monkeypatch.syspath_prepend(tmp_path)
    application = importlib.import_module("fastapi_application").app
    with testclient.TestClient(application) as client:
        answer = client.post("/generate", params={"prompt": "The capital of France is"})
        assert (answer.status_code, "Paris" in answer.json()["text"]) == (200, True)
        answer = client.post("/generate", params={"prompt": ""})
        assert answer.status_code == 400
        assert "prompt" in answer.json()["detail"]


@pytest.mark.parametrize("page", LINKING_PAGES, ids=label)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^):]*)?\)", page.read_text()):
        assert in_a_clone(page.parent / target), f"{label(page)} links to {target}"


def in_a_clone(path: Path) -> bool:
    """Return whether a file exists, or is a page that scripts/reference generates."""
    path = path.resolve()
    if path.parent == GENERATED:
        return path.name in GENERATED_PAGES
    return path.exists() and GENERATED not in (path, *path.parents)


def test_pages_named_in_the_source_exist():
    """Errors, docstrings, help and the templates of `plugins new` name pages of docs/."""
    named = [
        (file, page)
        for folder in (*top_level_folders(), "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".txt", ".toml", ".h", ".cpp") and not is_replaced(file)
        for page in PAGE_NAME.findall(TEMPLATE_PAGE.sub(r"docs/\1", file.read_text("utf-8")))
    ]
    assert len(named) > 15
    assert [(label(file), page) for file, page in named if not in_a_clone(ROOT / page)] == []


def is_replaced(file):
    """Return whether a template of `plugins new` has a later version, which is used instead."""
    *_, templates, version, group, name = ("", "", "", *file.parts)
    folder = file.parent.parent.parent
    is_template = templates == "templates" and version.isdigit()
    return is_template and any(
        int(other.name) > int(version) and (other / group / name).exists()
        for other in folder.iterdir()
        if other.name.isdigit()
    )


LINK = re.compile(r"\]\(([^)#:]*)(?:#([^):]+))?\)")


@pytest.mark.parametrize("page", LINKING_PAGES, ids=label)
def test_links_to_sections_lead_somewhere(page):
    for target, section in LINK.findall(BLOCK.sub("", page.read_text())):
        is_generated = (page.parent / target).resolve().parent == GENERATED
        if section and not is_generated and not target.startswith("http"):
            assert section in sections(page.parent / target if target else page), (target, section)


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or page.parent == GENERATED:
            continue
        reached.add(page)
        targets = [target for target, _ in LINK.findall(page.read_text()) if target]
        waiting += [(page.parent / target).resolve() for target in targets]
    assert sorted(map(label, {*PAGES} - reached)) == []


def test_the_index_has_a_page_for_every_kind_of_plugin():
    rows = re.findall(r"^\| (`.+?) \| \[", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == KINDS.keys()


def test_the_readmes_plugin_is_short():
    (plugin,) = [text for _, text in blocks(ROOT / "README.md") if "class NoEcho" in text]
    assert len(plugin.splitlines()) <= 30


PLUGINS = resolve_plugins(EngineConfig())
PARSERS = {
    entry.name: PLUGINS.target(entry)
    for kind in ("reasoning_parsers", "tool_parsers")
    for entry in PLUGINS.entries(kind)
}


def parts_of(cls, text: str) -> list[str]:
    """Return the parts that an output parser finds in an output, as pages show them."""
    tokenizer = ByteTokenizer(cls.required_tokens)
    parser = cls(OutputParserContext(name="it", options=cls.Options(), tokenizer=tokenizer))
    state = parser.open(ParserRequest())
    stream = tokenizer.decode_stream([])
    events = []
    for token in tokenizer.encode(text):
        is_marker = token in parser.token_ids
        events += state.feed_token(token, "") if is_marker else state.feed(stream.step(token) or "")
    lines = []
    for event in join_events([*events, *state.finish()]):
        match event:
            case ReasoningText(found):
                lines.append(f"reasoning: {found}")
            case ContentText(found):
                lines.append(f"content: {found}")
            case ToolCallBegin(name):
                lines.append(f"call: {name} ")
            case ToolCallArguments(found):
                lines[-1] += found
    return [line.replace("\n", "\\n") for line in lines]


RECORDED_OUTPUTS = json.loads((DOCS / "parser-outputs.json").read_text(encoding="utf-8"))


def test_every_built_in_parser_has_a_recorded_output_and_a_row_of_its_format():
    assert RECORDED_OUTPUTS.keys() == PARSERS.keys()
    guide = (DOCS / "reasoning-and-tools.md").read_text(encoding="utf-8")
    assert [name for name in PARSERS if f"`{name}`" not in guide] == []


@pytest.mark.parametrize("name", PARSERS)
def test_a_recorded_output_has_the_parts_that_the_reference_shows(name):
    recorded = RECORDED_OUTPUTS[name]
    assert parts_of(PARSERS[name], recorded["output"]) == recorded["parts"]
    assert recorded["source"]


def public_classes() -> set[str]:
    """Return the names that callers, authors and testers import."""
    packages = ("hardpoint", "hardpoint.plugins", "hardpoint.testing")
    return {name for package in packages for name in importlib.import_module(package).__all__}


def architectures() -> set[str]:
    """Return the architectures of the built-in models."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["entry-points"]["hardpoint.models"])


def test_each_term_of_the_glossary_lives_in_a_module_or_a_class():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`|]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 60
    assert len(rows) == text.count("\n| ") - 1  # all but the head
    assert [term for term, _, _ in rows] == sorted((term for term, _, _ in rows), key=str.lower)
    files = {str(path.relative_to(ROOT)) for path in modules().values()}
    places = files | public_classes() | classes().keys()
    assert [(term, place) for term, _, place in rows if place not in places] == []
    assert [term for term, meaning, _ in rows if meaning.count(". ") > 1] == []


PATH = re.compile(rf"(?<![\w/])(?:{'|'.join(top_level_folders())})/[\w/]*(?:\.py)?")
CLASS = re.compile(r"(?<![\w\"/.])([A-Z][a-z]\w*[A-Z]\w*)(?:\.(\w+))?")
CONSTANT = re.compile(r"\b[A-Z]{4,}[A-Z_]*\b")
ZMQ_SOCKETS = {"ROUTER", "DEALER", "PUSH", "PULL"}


def test_names_in_the_structures_exist():
    """Paths, classes with their members, states, threads and functions."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    text = page.partition("## Processes and threads\n")[2]
    named = set(CONSTANT.findall(text)) - ZMQ_SOCKETS
    block_states = {"EMPTY", "HELD", "CANDIDATE"}
    states = block_states | classes()["RequestStatus"] | classes()["EngineState"]
    assert named - states == set()
    assert {state.lower() for state in block_states} <= set(
        re.findall(r"\*(\w+)\*", ast.get_docstring(class_node("BlockPool")).lower())
    )
    threads = set(re.findall(r"\"([\w-]+)\"", text))
    assert threads - set(strings()) == set()
    called = set(re.findall(r"`(\w+)`", text)) - classes().keys()
    assert called - functions() - defined_names() == set()


def class_node(name: str) -> ast.ClassDef:
    (node,) = class_nodes()[name]
    return node


def strings() -> list[str]:
    """Return all string literals of the package."""
    return [
        node.value
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


HISTORY = DOCS / "contract-history.md"
"""A page that names removed classes and members."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=label)
def test_names_in_guides_exist(page):
    """Paths; classes in backticks, and everywhere on the pages that follow the code."""
    text = page.read_text(encoding="utf-8")
    paths = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert paths == []
    follows_code = page.name == "architecture.md"
    prose = text if follows_code else " ".join(re.findall(r"`[^`\n]+`", BLOCK.sub("", text)))
    names = public_classes() | vars(builtins).keys() | architectures()
    known = {name: set() for name in names} | classes()
    unknown = [
        f"{name}.{member}" if name in known else name
        for name, member in CLASS.findall(prose)
        if name not in EXAMPLES and (name not in known or (member and member not in known[name]))
        if f"class {name}" not in text
    ]
    assert unknown == []


READ = re.compile(r"^Read: (.*?)\n\n", re.MULTILINE | re.DOTALL)


def test_the_walk_of_the_engine_is_short_to_read():
    """All classes and methods that the page recommends have less than 3,000 lines together."""
    lists = READ.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))
    names = re.findall(r"`([\w.]+)`", " ".join(lists))
    assert len(lists) == 8
    assert len(names) == len(set(names))
    lengths = {name: length(*name.split(".")) for name in names}
    assert sum(lengths.values()) < 3000, lengths


def length(class_name: str, method: str | None = None) -> int:
    """Return the lines of a class, or of one of its methods."""
    node: ast.AST = class_node(class_name)
    if method is not None:
        (node,) = (n for n in ast.walk(node) if getattr(n, "name", None) == method)
    return node.end_lineno - node.lineno + 1


EXAMPLES = {"EngineCore_DP3", "MyProcessor"} | {
    "AdapterLogitsProcessor",
    "AutoTokenizer",
    "LogitsProcRequestState",
    "NGramPerReqLogitsProcessor",
    "NGramPerReqLogitsProcessorV2",
    "NoRepeatNGramLogitsProcessor",
    "RedTiltLogitsProcessor",
    "RequestLogitsProcessor",
    "VllmConfig",
}
"""A process, a reader's own class; and classes of others."""
