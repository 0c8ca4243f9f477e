"""Build or serve the documentation site.

scripts/docs build   writes the site to build/site; broken links, pages outside the navigation and
                     warnings of the generator are errors
scripts/docs serve   serves the site at http://localhost:8000 and updates it when a page changes

Both need `pip install -e '.[docs]'`, and the network is not used. `build` first generates the
reference (scripts/reference); --keep-reference reads the pages of docs/reference as they are.
--source-url is the address of the repository's files, such as https://example.com/blob/main:
links to source files lead there. Without it, their paths are printed instead of links.
--publish FOLDER also copies the site to FOLDER/VERSION, beside those of earlier versions. Readers
choose a version in the header; the address of FOLDER leads to the newest one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "zensical.toml"
REFERENCE = ROOT / "docs" / "reference"
LINK = re.compile(r"(!?)\[([^\]\n]*(?:\n[^\]\n]+)?)\]\(([^)\s]+)\)")
CODE = re.compile(r"^\s*(```|~~~).*?^\s*\1[^\n]*$", re.DOTALL | re.MULTILINE)
REFERENCE_NAME = re.compile(r"(?<!\[)`docs/(reference/[\w-]+\.md)(#[\w-]+)?`")
"""A page of the reference: a clone does not have it, so that pages name it without a link."""
EXTERNAL = re.compile(r"[a-z]+:|#")

REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{target}">
<script>location.replace("{target}" + (location.hash || "{section}"))</script>
<meta http-equiv="refresh" content="1; url={target}{section}">
<p>This page is now at <a href="{target}{section}">{target}{section}</a>.</p>
</html>
"""


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("build", "serve"))
    parser.add_argument("--source-url", default="", help="address of the repository's files")
    keep_help = "read docs/reference as it is"
    parser.add_argument("--keep-reference", action="store_true", help=keep_help)
    publish_help = "folder for the sites of all versions; the site of this version is replaced"
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help=publish_help)
    options = parser.parse_args()
    if not options.keep_reference:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py")], check=True)
    config = tomllib.loads((ROOT / CONFIG).read_text(encoding="utf-8"))["project"]
    problems = prepare(config, options.source_url)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    if options.command == "serve":
        return serve(config, options.source_url)
    site = ROOT / config["site_dir"]
    shutil.rmtree(site, ignore_errors=True)
    command = [*generator(), "build", "--strict", "--clean", "-f", CONFIG]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        write_redirects(config, site)
        write_llms(config, site)
        print(f"{len(list(site.rglob('index.html')))} pages in {site}")
        if options.publish is not None:
            print(f"published in {publish(site, options.publish, package_version())}")
    return code


def package_version() -> str:
    """Return the version of the package in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def publish(site: Path, folder: Path, version: str) -> Path:
    """Copy the site of a version into the folder of all versions; return its path there.

    `versions.json`, newest first, is the list that the version selector of the theme reads
    (the format of mike).
    """
    target = folder / version
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(site, target)
    names = [path.parent.name for path in folder.glob("*/index.html")]
    names.sort(key=lambda name: [int(part) for part in re.findall(r"[0-9]+", name)], reverse=True)
    newest = names[0]
    table = [
        {"version": name, "title": name, "aliases": ["latest"] if name == newest else []}
        for name in names
    ]
    (folder / "versions.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    redirect = REDIRECT.format(target=f"{newest}/", section="")
    (folder / "index.html").write_text(redirect, encoding="utf-8")
    return target


def generator() -> list[str]:
    """Return the command of the site generator."""
    return [sys.executable, "-m", "zensical"]


def prepare(config: dict[str, Any], source_url: str) -> list[str]:
    """Write the pages as the generator reads them; return their bad links and navigation.

    The site has docs/ at its root and CHANGELOG.md as changelog.md.
    """
    target = ROOT / config["docs_dir"]
    problems = []
    written = set()
    for source in [*sorted((ROOT / "docs").rglob("*")), ROOT / "CHANGELOG.md"]:
        if source.is_dir():
            continue
        path = target / page_name(source)
        written.add(path)
        content = source.read_bytes()
        if source.suffix == ".md":
            text, bad = with_site_links(source, content.decode(), source_url)
            text, missing = with_reference_links(source, text)
            problems += bad + missing
            content = text.encode()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in target.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()
    pages = {str(path.relative_to(target)) for path in written if path.suffix == ".md"}
    problems += navigation_problems(config["nav"], pages)
    return problems + redirect_problems(redirects(config), pages, target)


def navigation_problems(nav: list[Any], pages: set[str]) -> list[str]:
    """Return a message for each page outside the navigation, and each entry without a page."""
    listed = {page for _, page, _ in entries(nav)}
    return [
        *(f"{CONFIG}: nav: expected an entry for {page}" for page in sorted(pages - listed)),
        *(f"{CONFIG}: nav: no such page: {page}" for page in sorted(listed - pages)),
    ]


def redirects(config: dict[str, Any]) -> dict[str, str]:
    """Return the present page of each former name, or a section of it."""
    table: dict[str, str] = config.get("extra", {}).get("redirects", {})
    return table


def redirect_problems(table: dict[str, str], pages: set[str], folder: Path) -> list[str]:
    """Return a message for each redirect from a present page, or to a missing page or section."""
    targets = {new.partition("#")[0] for new in table.values()}
    return [
        *(f"{CONFIG}: redirects: {old} is a page" for old in sorted(table.keys() & pages)),
        *(f"{CONFIG}: redirects: no such page: {new}" for new in sorted(targets - pages)),
        *(
            f"{CONFIG}: redirects: no such section: {new}"
            for new in sorted({*table.values()})
            if (parts := new.split("#"))[0] in pages
            and not {*parts[1:]} <= sections((folder / parts[0]).read_text(encoding="utf-8"))
        ),
    ]


def sections(text: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_redirects(config: dict[str, Any], site: Path) -> None:
    """Write a page at each former name that leads to the present one.

    The section is the one of the link, or else that of the redirect.
    """
    for old, new in redirects(config).items():
        folder = site / old.removesuffix(".md")
        folder.mkdir(parents=True, exist_ok=True)
        page, mark, section = new.partition("#")
        target = os.path.relpath(page.removesuffix(".md"), old.removesuffix(".md")) + "/"
        text = REDIRECT.format(target=target, section=mark + section)
        (folder / "index.html").write_text(text, encoding="utf-8")


def page_name(source: Path) -> str:
    """Return the path of a file in the site, relative to its root."""
    docs = ROOT / "docs"
    return "changelog.md" if docs not in source.parents else str(source.relative_to(docs))


def with_site_links(source: Path, text: str, source_url: str) -> tuple[str, list[str]]:
    """Return a page with links to pages of the site or to source files, and its bad links."""
    problems = []

    def replaced(match: re.Match[str]) -> str:
        image, label, link = match.groups()
        if EXTERNAL.match(link):
            return match[0]
        path, _, anchor = link.partition("#")
        target = (source.parent / path).resolve()
        if not target.exists():
            problems.append(f"{source.relative_to(ROOT)}: link to a missing file: {link}")
            return match[0]
        if image:
            return match[0]
        if target.is_dir() and ROOT / "docs" in target.parents:
            target /= "README.md"
        if ROOT / "docs" in target.parents or target == ROOT / "CHANGELOG.md":
            here = os.path.dirname(page_name(source)) or "."
            relative = os.path.relpath(page_name(target), here)
            return f"[{label}]({relative}{'#' + anchor if anchor else ''})"
        name = str(target.relative_to(ROOT))
        if source_url:
            return f"[{label}]({source_url.rstrip('/')}/{name}{'#' + anchor if anchor else ''})"
        return label if label.strip("`") in name else f"{label} (`{name}`)"

    return outside_code(text, lambda prose: LINK.sub(replaced, prose)), problems


def with_reference_links(source: Path, text: str) -> tuple[str, list[str]]:
    """Return a page with links to the pages of the reference that it names, and missing ones."""
    problems = []

    def replaced(match: re.Match[str]) -> str:
        page, anchor = match[1], match[2] or ""
        if not (ROOT / "docs" / page).exists():
            problems.append(f"{source.relative_to(ROOT)}: no such page: docs/{page}")
            return match[0]
        relative = os.path.relpath(page, os.path.dirname(page_name(source)) or ".")
        return f"[`{page}{anchor}`]({relative}{anchor})"

    return outside_code(text, lambda prose: REFERENCE_NAME.sub(replaced, prose)), problems


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a page with changed text around its blocks of code."""
    parts = []
    end = 0
    for match in CODE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def entries(nav: list[Any], section: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield title, page and first section of each entry of the navigation."""
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, str):
                yield title, value, section
            else:
                yield from entries(value, section or title)


def write_llms(config: dict[str, Any], site: Path) -> None:
    """Write llms.txt, the list of the pages for language models, and the pages as Markdown."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    sections: list[str] = []
    for title, page, section in entries(config["nav"]):
        if section and section not in sections:
            sections.append(section)
            lines += ["", f"## {section}", ""]
        elif not sections:
            lines.append("")
        lines.append(f"- [{title}]({page})")
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / config["docs_dir"] / page, site / page)
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def serve(config: dict[str, Any], source_url: str) -> int:
    """Serve the site until it is interrupted; prepare changed pages each second."""
    server = subprocess.Popen([*generator(), "serve", "-f", CONFIG], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(1)
            for problem in prepare(config, source_url):
                print(problem, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
