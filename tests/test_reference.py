"""`scripts/reference` generates pages that describe every public name."""

import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.once import once
from support.processes import ROOT
from support.signatures import public_names, types_in_signatures

from hardpoint import plugins, testing
from hardpoint.builtin_plugins.server.assembly import core_routes
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component import Component
from hardpoint.plugins.sampling.phases import LogitsStage
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.plugins.step_part.part import GivenPrompt, PromptReader
from hardpoint.plugins.worker_half import SequenceModel, StepRows
from hardpoint.typed.describing import struct_fields, walk_structs

DOCS = ROOT / "docs"
PAGES = (
    *("kinds.md", "types.md", "hooks.md", "config.md", "server.md", "gallery.md"),
    *("conformance.md", "builtins.md", "parsers.md", "model-families.md"),
)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return runpy.run_path(str(ROOT / "scripts" / "reference.py"))


def run(script: dict[str, Any], *arguments: str) -> int:
    """Run the script; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["reference", *arguments])
        return script["main"]()


@pytest.fixture(scope="module")
def pages(script, tmp_path_factory) -> dict[str, str]:
    """The pages that the script writes, by name."""

    def write(folder: Path) -> None:
        assert run(script, "--folder", str(folder)) == 0

    folder = once(tmp_path_factory, "reference", write)
    return {name: (folder / name).read_text() for name in PAGES}


@pytest.mark.nightly
def test_check_writes_nothing(script, tmp_path):
    folder = tmp_path / "reference"
    assert run(script, "--check", "--folder", str(folder)) == 0
    assert not folder.exists()


def test_every_suite_is_described_with_its_tests_and_attributes(pages):
    page = pages["conformance.md"]
    suites = [name for name in testing.__all__ if name.endswith("Suite")]
    assert len(suites) > 25
    shared = ("ConformanceSuite", "ComponentSuite", "GeneralSuite", "TimedSuite")
    shared += ("LiveComponentSuite",)
    sections = {
        name: page.split(f"\n## {name}\n")[1].split("\n## ")[0] for name in (*shared, *suites)
    }
    for name in suites:
        suite = getattr(testing, name)
        used = [cls.__name__ for cls in suite.__mro__ if cls.__name__ in shared]
        for base in used:
            assert f"[`{base}`](#{base.lower()})" in sections[name]
        text = sections[name] + "".join(sections[base] for base in used)
        tests = [test for test in dir(suite) if test.startswith("test_")]
        assert [test for test in tests if f"| `{test}` | " not in text] == [], name
        attributes = {a for cls in suite.__mro__ for a in inspect.get_annotations(cls)}
        attributes -= {"kind", "options_from"}
        public = {a for a in attributes if not a.startswith("_")}
        assert [a for a in public if f"`{a}`" not in text] == [], name


def test_the_suite_of_schedulers_has_its_rules(pages):
    section = pages["conformance.md"].split("\n## SchedulerSuite\n")[1].split("\n## ")[0]
    assert "| rule | requirement | fix |" in section
    assert "\n| limits | " in section


UNDESCRIBED = """\
# Configuration

## [server]

### Model

```python
def forward(batch: ForwardBatch) -> None
```

```python
@property
def layers() -> int
```

The number of layers.

| key | type | default | changes | |
|---|---|---|---|---|
| `port` | int | `8000` | restart |  |
| `host` | string | `"::"` | restart | the address. |
## [images]
"""


def test_check_names_what_has_no_description(script):
    assert list(script["undescribed"](Path("config.md"), UNDESCRIBED)) == [
        "config.md: def forward(batch: ForwardBatch) -> None has no description",
        "config.md: def layers() -> int: port has no description",
        "config.md: [images] has no description",
    ]


def test_check_names_links_without_a_target(script):
    pages = {
        "kinds.md": "# Kinds\n## `ops`\n[a](#ops) [b](#opz) [c](types.md#model) [d](types.md#mode)",
        "types.md": "# Types\n### Model\n[a](../serving.md) [b](../swerving.md) [c](kinds.md)",
    }
    assert list(script["lost_links"](pages)) == [
        "kinds.md: no section 'opz' in kinds.md",
        "kinds.md: no section 'mode' in types.md",
        "types.md: the link to ../swerving.md has no target",
    ]


def test_headings_of_the_server_page_are_unique(pages):
    titles = [line for line in pages["server.md"].splitlines() if line.startswith("## ")]
    assert len(titles) == len(set(titles)), "links would lead to the first one"


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_kind_is_described(pages, kind):
    section = pages["kinds.md"].split(f"\n## {kind.name}\n")[1].split("\n## ")[0]
    assert kind.summary in section
    assert f"- entry-point group: `{kind.group}`" in section
    assert f"- contract version: {kind.contract}" in section
    assert kind.suite in section
    for form in kind.forms or ([kind.interface] if kind.interface else []):
        assert f"### {form.__name__}" in section
        for method in form.__abstractmethods__:
            assert f"def {method}(" in section


def test_every_public_name_is_described_with_its_stability(pages):
    page = pages["types.md"]
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]
    stability = {name: stable.strip() for _, stable, names in rows for name in links(names)}
    for name in plugins.__all__:
        assert stability[name] in ("stable", "provisional"), name
        assert f"\n### {name}\n" in page
    for kind in KINDS.values():
        for name in kind.interface_names:
            assert stability[name] == kind.stability.value, name


def test_the_order_of_fields_is_no_part_of_the_contract():
    """But for KV events, which programs in other languages read."""
    public = {name: getattr(plugins, name) for name in plugins.__all__}
    configs = {name: getattr(value, "__struct_config__", None) for name, value in public.items()}
    arrays = {name for name, config in configs.items() if config and config.array_like}
    assert arrays == {"AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEventBatch"}


def test_every_field_of_a_type_is_described(pages):
    """Data that an interface passes is described whole: structs, dataclasses and protocols."""
    page = pages["types.md"]
    for cls in (plugins.SchedulerOutput, plugins.LogitsRequest, plugins.Rows, plugins.Request):
        section = page.split(f"\n### {cls.__name__}\n")[1].split("\n### ")[0]
        for name in vars(cls).get("__annotations__", {}):
            assert f"| `{name}` |" in section or name.startswith("_"), f"{cls.__name__}.{name}"
    for passed in ("SchedulerLimits", "KVCacheManager", "Worker"):  # in contexts, not in __all__
        assert f"\n### {passed}\n" in page


STEP_PART_TYPES = [SequenceModel, StepRows, LogitsStage, GivenPrompt, PromptReader]


def test_every_type_in_a_public_signature_is_described(pages, script):
    used = types_in_signatures(public_names(script["MODULES"]))
    assert {*STEP_PART_TYPES} <= used.keys()
    text = pages["types.md"] + pages["kinds.md"]
    elsewhere = {Component, *walk_structs(EngineConfig)}  # "Every component", and tables
    missing = {
        cls.__qualname__: f"in {getattr(origin, '__qualname__', origin)}"
        for cls, origin in used.items()
        if cls not in elsewhere
        and not cls.__name__.startswith("_")
        and f"\n### {cls.__name__}\n" not in text
        and f"`self.context: {cls.__name__}`" not in text
    }
    assert missing == {}


@pytest.mark.parametrize("cls", STEP_PART_TYPES, ids=lambda cls: cls.__name__)
def test_a_guide_has_the_types_that_step_parts_get(cls):
    guides = [path.read_text() for path in DOCS.glob("*.md")]
    assert any(f"`{cls.__name__}`" in guide for guide in guides)


def links(cell: str) -> list[str]:
    return re.findall(r"\[`(\w+)`\]", cell)


def test_every_hook_is_described(pages):
    for name, hook in vars(HookSpecs).items():
        if not name.startswith("_"):
            section = pages["hooks.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
            assert f"def {name}(" in section
            assert "self" not in section
            assert hook.__doc__.strip().splitlines()[0] in section


def test_every_configuration_value_is_described(pages):
    def check(struct, path):
        heading = f"## [{path}]" if path else "## Top level"
        section = pages["config.md"].split(f"\n{heading}\n")[1].split("\n## ")[0]
        for field in struct_fields(struct):
            if field.table is not None:
                check(field.table, f"{path}.{field.name}".lstrip("."))
                continue
            (row,) = [
                line for line in section.splitlines() if line.startswith(f"| `{field.name}` ")
            ]
            assert field.type_text in row
            assert field.doc, f"{path}.{field.name} has no description"

    check(EngineConfig, "")


def test_every_field_of_a_request_to_the_server_is_described(pages):
    page = pages["server.md"]
    requests = [
        route.request_type
        for route in core_routes(Mock())
        if route.request_type and not route.admin
    ]
    assert len(requests) >= 2
    for struct in requests:
        section = page.split(f"\n## {struct.__name__}\n")[1].split("\n## ")[0]
        for field in struct_fields(struct):
            assert f"| `{field.name}` | {field.type_text} |" in section
        for treated in ("ignored", "refused"):
            names = getattr(struct, treated, {})
            assert not names or f"| known and {treated} | because |" in section
            assert [n for n, why in names.items() if f"| `{n}` | {why} |" not in section] == []


def test_the_gallery_has_all_plugins_of_the_repository(pages):
    rows = gallery_rows(pages)
    assert len(rows) > 150
    assert [row for row in rows if not row[1].strip() or not row[3].isdecimal()] == []
    names = {(name.strip("`"), where.split("]")[0].strip("[")) for name, _, where, *_ in rows}
    assert {("min_p", "built in"), ("watermark", "acme_watermark"), ("steer", "acme_taps")} <= names


def gallery_rows(pages) -> list[list[str]]:
    lines = [line for line in pages["gallery.md"].splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_gallery_names_costs_and_proofs(pages):
    rows = {row[0].strip("`"): row for row in gallery_rows(pages)}
    assert all(re.fullmatch(r"-|(< )?[125]0*", cost) for row in rows.values() for cost in row[4:6])
    assert "-" not in rows["min_p"][4:6]
    assert rows["min_p"][6].startswith("[test_builtins_conform](")
    assert rows["dry"][6].endswith("(../../examples/acme_sampling/tests/test_conformance.py)")
    assert [row for row in rows.values() if row[6] == "-"] == []
    measured = json.loads((ROOT / "docs" / "gallery-costs.json").read_text())
    assert f"on {measured['machine']}, in steps of" in " ".join(pages["gallery.md"].split())
    names = {name.partition("/")[2] for name in measured["microseconds"]}
    assert names <= rows.keys()


@pytest.mark.parametrize(
    ("value", "up", "text"),
    [
        (0.4, False, "< 1"),
        (6.6, False, "5"),
        (7.1, False, "10"),
        (149, False, "200"),
        (35, True, "50"),
    ],
)
def test_costs_are_rounded_to_what_can_be_told(value, up, text):
    assert runpy.run_path(str(ROOT / "scripts" / "gallery_costs.py"))["about"](value, up=up) == text


def test_built_in_processors_are_in_their_order_with_fields_and_phase(pages):
    section = pages["builtins.md"].partition("## logits_processors\n")[2].partition("\n## ")[0]
    described = re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    processors = resolve_plugins(EngineConfig()).logits_processors()
    assert [text.partition("\n")[0] for text in described] == [
        entry.name for entry, _ in processors
    ]
    for text, (_, cls) in zip(described, processors, strict=True):
        assert all(f"`{field}`" in text for field in cls.params_fields)
        assert f"| phase | `{cls.phase.name}`" in text
        assert f"| argmax-invariant | {'yes' if cls.argmax_invariant else 'no'}" in text


def test_every_option_of_a_built_in_plugin_is_described(pages):
    config = resolve_plugins(EngineConfig())
    missing = []
    for kind in KINDS:
        for entry in config.entries(kind):
            options = getattr(config.target(entry), "Options", None)
            page = pages["parsers.md" if kind.endswith("_parsers") else "builtins.md"]
            for field in struct_fields(options) if options else ():
                if f"**Options, `[plugin.{entry.name}]`**" not in page:
                    missing.append((kind, entry.name))
                elif f"| `{field.name}` |" not in page:
                    missing.append((kind, entry.name, field.name))
    assert missing == []


def test_every_parser_is_described_with_an_output(pages):
    config = resolve_plugins(EngineConfig())
    names = {
        entry.name
        for kind in ("reasoning_parsers", "tool_parsers")
        for entry in config.entries(kind)
    }
    sections = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", pages["parsers.md"], re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == names
    assert all("Output of the model:" in text and "Parts:" in text for text in sections.values())
