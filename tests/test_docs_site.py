"""The pages and the navigation of the documentation site that scripts/docs builds."""

import importlib
import json
import tomllib

import pytest
from support.processes import ROOT


@pytest.fixture
def docs(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("docs")


@pytest.fixture
def tree(docs, monkeypatch, tmp_path):
    """A clone with two pages, a source file and a configuration."""
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    for name in ("docs/builtins", "examples/acme"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "docs/builtins/README.md").write_text("# Built-ins\n\n[Guide](../guide.md#end)\n")
    (tmp_path / "docs/guide.md").write_text("# Guide\n")
    (tmp_path / "examples/acme/plugin.py").write_text("")
    return tmp_path


CONFIG = {
    "docs_dir": "build/docs",
    "site_name": "Name",
    "site_description": "Description.",
    "nav": [
        {"Guide": "guide.md"},
        {
            "Reference": [
                {"Plugins": [{"Built-ins": "builtins/README.md"}]},
                {"Log": "changelog.md"},
            ]
        },
    ],
}


def test_the_navigation_has_every_page(docs):
    """The reference is generated, so its pages are those that scripts/reference names."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = {docs.page_name(page) for page in (ROOT / "docs").rglob("*.md")}
    generated = {page for _, page, _ in docs.entries(nav) if page.startswith("reference/")}
    named = (ROOT / "docs" / "README.md").read_text()
    assert all(f"docs/{page}" in named for page in generated)
    assert docs.navigation_problems(nav, {*pages, *generated, "changelog.md"}) == []


def test_the_style_sheets_of_the_site_exist():
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert [name for name in project["extra_css"] if not (ROOT / "docs" / name).exists()] == []


def test_a_page_outside_the_navigation_and_an_entry_without_page_are_problems(docs, tree):
    (tree / "docs/guide.md").rename(tree / "docs/other.md")
    (tree / "docs/builtins/README.md").write_text("# Built-ins\n")
    assert docs.prepare(CONFIG, "") == [
        "zensical.toml: nav: expected an entry for other.md",
        "zensical.toml: nav: no such page: guide.md",
    ]


@pytest.mark.parametrize(
    ("text", "url", "expected"),
    [
        ("[log](../CHANGELOG.md)", "", "[log](changelog.md)"),
        ("[all](builtins)", "", "[all](builtins/README.md)"),
        ("[web](https://example.com)", "", "[web](https://example.com)"),
        ("[part](#part)", "", "[part](#part)"),
        ("[acme](../examples/acme)", "", "acme"),
        ("[code](../examples/acme)", "", "code (`examples/acme`)"),
        ("[a](../examples/acme)", "https://x/main/", "[a](https://x/main/examples/acme)"),
        ("```\n[a](missing.md)\n```", "", "```\n[a](missing.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_to_source_files(docs, tree, text, url, expected):
    (tree / "docs/guide.md").write_text(text)
    assert docs.prepare(CONFIG, url) == []
    assert (tree / "build/docs/guide.md").read_text() == expected


def test_names_of_reference_pages_become_links(docs, tree):
    (tree / "docs/reference").mkdir()
    (tree / "docs/reference/kinds.md").write_text("# Kinds\n")
    (tree / "docs/guide.md").write_text("See `docs/reference/kinds.md#ops`.\n")
    (tree / "docs/builtins/README.md").write_text("`docs/reference/kinds.md`")
    nav = [*CONFIG["nav"], {"Kinds": "reference/kinds.md"}]
    assert docs.prepare({**CONFIG, "nav": nav}, "") == []
    page = (tree / "build/docs/guide.md").read_text()
    assert page == "See [`reference/kinds.md#ops`](reference/kinds.md#ops).\n"
    page = (tree / "build/docs/builtins/README.md").read_text()
    assert page == "[`reference/kinds.md`](../reference/kinds.md)"


def test_the_name_of_a_missing_reference_page_is_a_problem(docs, tree):
    (tree / "docs/guide.md").write_text("`docs/reference/kind.md`")
    assert docs.prepare(CONFIG, "") == ["docs/guide.md: no such page: docs/reference/kind.md"]


@pytest.mark.parametrize("link", ["[a](missing.md)", "[a](../examples/no)", "![a](missing.svg)"])
def test_a_link_to_a_missing_file_is_a_problem(docs, tree, link):
    (tree / "docs/guide.md").write_text(link)
    (problem,) = docs.prepare(CONFIG, "")
    assert problem.startswith("docs/guide.md: link to a missing file: ")


def test_removed_pages_leave_the_site(docs, tree):
    docs.prepare(CONFIG, "")
    (tree / "docs/guide.md").unlink()
    docs.prepare(CONFIG, "")
    assert not (tree / "build/docs/guide.md").exists()


def test_llms_txt_lists_the_pages_by_section_with_their_text(docs, tree):
    docs.prepare(CONFIG, "")
    docs.write_llms(CONFIG, tree / "site")
    assert (tree / "site/llms.txt").read_text().splitlines() == [
        "# Name",
        "",
        "> Description.",
        "",
        "- [Guide](guide.md)",
        "",
        "## Reference",
        "",
        "- [Built-ins](builtins/README.md)",
        "- [Log](changelog.md)",
    ]
    assert (tree / "site/guide.md").read_text() == "# Guide\n"


REDIRECTS = {"manual.md": "guide.md", "a/b.md": "guide.md#guide"}
REDIRECTING = {**CONFIG, "extra": {"redirects": REDIRECTS}}


def test_former_names_of_pages_lead_to_the_present_ones(docs, tree):
    assert docs.prepare(REDIRECTING, "") == []
    docs.write_redirects(REDIRECTING, tree / "site")
    for old, target, section in (("manual", "../guide/", ""), ("a/b", "../../guide/", "#guide")):
        text = (tree / "site" / old / "index.html").read_text()
        assert f'content="1; url={target}{section}"' in text
        assert f'location.replace("{target}" + (location.hash || "{section}"))' in text


def test_redirects_from_present_pages_and_to_missing_ones_are_problems(docs, tree):
    table = {"guide.md": "changelog.md", "old.md": "missing.md#use", "a.md": "guide.md#lost"}
    assert docs.prepare({**CONFIG, "extra": {"redirects": table}}, "") == [
        "zensical.toml: redirects: guide.md is a page",
        "zensical.toml: redirects: no such page: missing.md",
        "zensical.toml: redirects: no such section: guide.md#lost",
    ]


def test_sites_of_versions_lie_beside_each_other(docs, tmp_path):
    """The selector lists the newest first, by numbers; the root leads to the newest."""
    folder = tmp_path / "public"
    for version, text in (("0.9.1", "a"), ("0.10.0", "b"), ("0.9.1", "c")):
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "index.html").write_text(text)
        assert docs.publish(site, folder, version) == folder / version
    assert json.loads((folder / "versions.json").read_text()) == [
        {"version": "0.10.0", "title": "0.10.0", "aliases": ["latest"]},
        {"version": "0.9.1", "title": "0.9.1", "aliases": []},
    ]
    assert (folder / "0.9.1/index.html").read_text() == "c"
    assert 'href="0.10.0/"' in (folder / "index.html").read_text()
