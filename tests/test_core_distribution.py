"""The distribution hardpoint-core: its files, those left out, and errors about missing parts."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import importlib_metadata
import pytest
from packaging.requirements import Requirement
from support.once import once
from support.processes import ROOT
from support.source_tree import nodes, tree, without_collections

NINE = {
    "cloudpickle",
    "huggingface_hub",
    "importlib_metadata",
    "msgspec",
    "numpy",
    "pluggy",
    "psutil",
    "pyzmq",
    "torch",
}
LEFT_OUT = {
    "hooks": {"batch_routes", "commands", "response_stores", "server", "typed_answers"},
    "grammars": {"llguidance", "xgrammar"},
    "loaders": {"gguf", "safetensors"},
    "models": {"transformers", "transformers_classifier", "transformers_encoder"},
    "quantizations": {"iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"},
    "stat_sinks": {"prometheus"},
    "tokenizers": {"transformers"},
}
WHOLE = (
    "boundary",
    "core",
    "features",
    "journal",
    "live",
    "plugins",
    "registry",
    "replicas",
    "simulation",
    "system",
    "testing",
    "toolkit",
    "typed",
)
# What core, contract, registry and kit import in functions that components call which are left out.
ON_USE = {
    ("hardpoint.toolkit.hf_config", "transformers"),  # without it, nothing may be left out
    ("hardpoint.toolkit.layers.rotary", "transformers"),  # reports what to install
    ("hardpoint.core.weights.updated_weights", "safetensors"),
    ("hardpoint.toolkit.images.decode_program", "PIL"),
    ("hardpoint.builtin_plugins.step_parts.adapters.files", "safetensors"),
    ("hardpoint.builtin_plugins.step_parts.pooling.worker", "safetensors"),
    ("hardpoint.host.registry.hooks", "starlette"),
    ("hardpoint.testing.running.extension_checks", "starlette"),
}


@pytest.fixture(scope="module")
def script():
    loader = importlib.machinery.SourceFileLoader("build_core", str(ROOT / "scripts/build_core.py"))
    spec = importlib.util.spec_from_loader("build_core", loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_core"] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script):
    with without_collections():
        return script.contents(script.read_project())


def imports_of(path: Path, package: str, *, nested: bool) -> set[str]:
    """Return the imports of a file at its top level, or in functions, outside of `if` and `try`."""
    found = tree(path).body
    if nested:
        functions = (node for node in nodes(path) if isinstance(node, ast.FunctionDef))
        found = [node for function in functions for node in ast.walk(function)]
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: 1 - node.level or None], base]))
            names.add(base)
    return names


def package_of(name: str, path: Path) -> str:
    return name if path.stem == "__init__" else name.rpartition(".")[0]


def test_the_modules_that_come_along_import_nothing_else(script, found):
    allowed = {*script.CORE, *script.OPTIONAL, *sys.stdlib_module_names}
    wrong = []
    for name, path in found.modules.items():
        for imported in imports_of(path, package_of(name, path), nested=False):
            top = imported.partition(".")[0]
            is_there = imported in found.modules if top == "hardpoint" else top in allowed
            if not is_there:
                wrong.append((name, imported))
    assert wrong == []


def test_core_contract_registry_and_kit_come_along_whole(found):
    absent = {name for name in found.reasons if name.partition(".")[2].partition(".")[0] in WHOLE}
    assert absent == {"hardpoint.testing.reporting.sink_suite"}


def test_what_they_import_on_use_is_known(script, found):
    allowed = {"hardpoint", *script.CORE, *script.OPTIONAL, *sys.stdlib_module_names}
    used = set()
    for name, path in found.modules.items():
        if name.partition(".")[2].partition(".")[0] in WHOLE:
            imported = imports_of(path, package_of(name, path), nested=True)
            used |= {
                (name, top) for one in imported if (top := one.partition(".")[0]) not in allowed
            }
    assert used == ON_USE


def test_an_entry_point_is_there_with_its_module_or_left_out(script, found):
    project = script.read_project()["project"]["entry-points"]
    for group, points in project.items():
        there, absent = found.points.get(group, {}), found.left_out.get(group, {})
        assert {**there, **absent} == points
        assert all(value.partition(":")[0] in found.modules for value in there.values())
        assert all(value.partition(":")[0] not in found.modules for value in absent.values())
    absent = {group.partition(".")[2]: set(points) for group, points in found.left_out.items()}
    assert absent == LEFT_OUT


def test_its_requirements_are_nine(script, found, tmp_path):
    script.render(script.read_project(), found, tmp_path)
    rendered = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert rendered["project"]["name"] == "hardpoint-core"
    needed = rendered["project"]["dependencies"]
    assert {Requirement(one).name for one in needed} == NINE
    assert set(needed) < set(script.read_project()["project"]["dependencies"])
    written = {
        ".".join(path.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
        for path in tmp_path.rglob("*.py")
    }
    assert written == set(found.modules)
    assert set(rendered["tool"]["setuptools"]["packages"]) == {
        package_of(name, path) for name, path in found.modules.items()
    }


def test_a_module_that_needs_more_takes_along_what_needs_it(script, tmp_path):
    """Also through a package, in a function of a built-in, and by a name of a package's module."""
    files = {
        "api/__init__.py": "",
        "core/__init__.py": "",
        "core/late.py": "def f():\n    import rich\n",
        "core/typed.py": "if TYPE_CHECKING:\n    import rich\nelse:\n    import msgspec\n",
        "core/guarded.py": "try:\n    import rich\nexcept ImportError:\n    rich = None\n",
        "core/wrong.py": "from hardpoint.core import needs\n",
        "core/needs.py": "class A:\n    import rich\n",
        "builtin/__init__.py": "",
        "builtin/a.py": "from .b import f\nfrom .named import g\n",
        "builtin/b.py": "def f():\n    from .c import g\n",
        "builtin/c.py": "def g():\n    import rich\n",
        "builtin/d.py": "NAME = 'hardpoint.builtin.named:run'\n",
        "builtin/named.py": "import triton\n",
        "builtin/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    points = {"a": "hardpoint.builtin.a:A", "d": "hardpoint.builtin.d:D"}
    tools = {
        "packages": ["hardpoint", "hardpoint.core", "hardpoint.builtin"],
        "package-dir": {
            "hardpoint": "api",
            "hardpoint.core": "core",
            "hardpoint.builtin": "builtin",
        },
    }
    project = {
        "project": {"entry-points": {"hardpoint.ops": points}},
        "tool": {"setuptools": tools},
    }
    found = script.contents(project, tmp_path)
    assert {name.removeprefix("hardpoint.") for name in found.modules} == {
        "hardpoint",
        "core",
        "core.late",
        "core.typed",
        "core.guarded",
        "builtin",
        "builtin.d",
        "builtin.named",
    }
    assert {name.removeprefix("hardpoint."): why for name, why in found.reasons.items()} == {
        "core.needs": "rich",
        "core.wrong": "hardpoint.core.needs",
        "builtin.c": "rich",
        "builtin.b": "hardpoint.builtin.c",
        "builtin.a": "hardpoint.builtin.b",
    }
    assert found.left_out == {"hardpoint.ops": {"a": points["a"]}}


PROGRAM = """
import subprocess, sys
from pathlib import Path

import hardpoint
from hardpoint import LLM, HardpointError, SamplingParams
from hardpoint.host.registry.discovery import discover
from hardpoint.testing import scripted_config, write_scripted_model

if __name__ == "__main__":
    assert all(found.builtin for found in discover()), discover()
    for name in ("transformers", "tokenizers", "starlette", "rich", "jsonschema", "safetensors"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(name)
    folder = write_scripted_model(Path("m"), {"say é<x>": " né, 日本"}, special_tokens=["<x>"])
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    drawn = SamplingParams(seed=3, max_tokens=9, top_p=0.9)
    print("version", hardpoint.__version__)
    disk = {"kv_connector": {"stores": ["disk"]}, "plugin": {"disk": {"path": "blocks"}}}
    for _ in range(2):  # the second engine finds the blocks of the first
        with LLM(config=scripted_config(folder, disk)) as llm:
            (output,) = llm.generate("say é<x>" * 9, greedy)
            print("cached", output.num_cached_tokens)
    for in_process in (True, False):
        config = scripted_config(folder, {"engine": {"in_process": in_process}})
        with LLM(config=config) as llm:
            outputs = llm.generate(["say é<x>", "other"], [greedy, drawn])
            print("tokens", [output.outputs[0].token_ids for output in outputs])
            print("text", outputs[0].outputs[0].text)
            for params in (
                SamplingParams(structured={"choice": ["yes"]}),
                SamplingParams(structured={"choice": ["yes"], "backend": "xgrammar"}),
            ):
                try:
                    llm.generate("x", params)
                except HardpointError as error:
                    print("error", error)
    Path("w").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("w", name).write_text("{}")
    for wrong in (
        {"tokenizer": {"use": "transformers"}},
        {"load": {"use": "gguf"}},
        {"load": {"use": "auto"}, "model": "w"},
        {"stats": {"sinks": ["prometheus"]}},
        {"kv_connector": {"use": "hardpoint.builtin_plugins.server:Nothing"}},
        {"plugins": {"enable": ["server"]}},
    ):
        try:
            LLM(config=scripted_config(folder, wrong))
        except HardpointError as error:
            print("error", error)
    command = [sys.executable, "-m", "hardpoint", "serve"]
    done = subprocess.run(command, capture_output=True, text=True)
    print("error", done.returncode, done.stderr.strip())
    try:
        from hardpoint.testing import StatSinkSuite
    except HardpointError as error:
        print("error", error)
"""


def with_dependencies(names: set[str]) -> list[importlib_metadata.Distribution]:
    """Return installed distributions, with what they depend on without extras."""
    found, pending = {}, set(names)
    while pending:
        dist = importlib_metadata.distribution(pending.pop())
        if dist.name in found:
            continue
        found[dist.name] = dist
        for line in dist.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.add(requirement.name)
    return list(found.values())


def make_environment(wheel: Path, folder: Path) -> Path:
    """Make an environment of the wheel, the nine and their dependencies; return its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for dist in with_dependencies(NINE):
        for name in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            if not (place := packages / name).exists():
                place.symlink_to(Path(dist.locate_file(name)).resolve())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder / "bin" / "python"


def build_wheel(out: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts/build_core.py", out], check=True)


@pytest.mark.nightly
def test_the_wheel_alone_runs_the_scripted_model(tmp_path_factory, tmp_path):
    (wheel,) = once(tmp_path_factory, "core_wheel", build_wheel).glob("*.whl")
    assert re.fullmatch(r"hardpoint_core-[\w.]+-py3-none-any\.whl", wheel.name)
    python = make_environment(wheel, tmp_path / "alone")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [python, program],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ")[::2] for line in done.stdout.splitlines()]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert lines[0] == ("version", version)
    of = {kind: [text for found, text in lines if found == kind] for kind, _ in lines}
    assert of["cached"] == ["0", "48"]
    assert of["text"] == [" né, 日本"] * 2
    assert of["tokens"][0] == of["tokens"][1]
    expected = [
        *["grammars/llguidance", "grammars/llguidance"] * 2,
        "tokenizers/transformers",
        "loaders/gguf",
        "loader gguf or safetensors",
        "stat_sinks/prometheus",
        "hardpoint.builtin_plugins.server",
        "hooks/server",
        "command line",
        "hardpoint.testing.StatSinkSuite",
    ]
    assert len(of["error"]) == len(expected)
    for what, error in zip(expected, of["error"], strict=True):
        advice = (
            f"hardpoint-core has no {what}; to have it, pip uninstall hardpoint-core and "
            f"pip install hardpoint"
        )
        assert advice in error
