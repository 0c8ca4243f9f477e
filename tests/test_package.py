"""The package as it is installed: contents, versions, and no back door to the built-ins."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from support.once import once
from support.processes import ROOT
from support.source_tree import PACKAGE, top_level_folders

import hardpoint
from hardpoint.kernels.cpu import PATHS

COMPILER = ROOT / "scripts" / "cached-compiler"
CACHED = {
    **os.environ,
    "HARDPOINT_BUILD_KERNELS": "all",
    "CC": f"{COMPILER} cc",
    "CXX": f"{COMPILER} c++",
}
"""Environment in which the kernels are compiled once: scripts/test has done so."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    (built,) = once(tmp_path_factory, "hardpoint_wheel", build_wheel).glob("*.whl")
    return built


def copy_source(source: Path) -> None:
    """Copy the package and its build files, because nothing is written into the checkout."""
    source.mkdir()
    tops = {Path(folder).parts[0] for folder in top_level_folders()}
    for name in (*tops, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        place = ROOT / name
        if place.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(place, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(place, source)


def build_wheel(out: Path) -> None:
    """Build the wheel from a copy of the source."""
    source = out / "source"
    copy_source(source)
    # What a build of an older version left behind.
    for left in ("lib", f"bdist.{sysconfig.get_platform()}/wheel"):
        old = source / "build" / left / "hardpoint" / "core" / "deleted.py"
        old.parent.mkdir(parents=True)
        old.touch()
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, source],
        check=True,
        capture_output=True,
        env=CACHED,
    )


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with nothing but the wheel's contents, entry points included."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(folder: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Run Python with `folder` in front of everything that is installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_wheel_holds_every_source_file_and_no_other(wheel):
    expected = {"hardpoint/py.typed"} | {
        str(path.relative_to(PACKAGE.parent))
        for folder in (PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_symlink()))
        for path in folder.rglob("*.py")
    }
    pages = ("builtin_plugins/server/page", "builtin_plugins/server/api_docs")
    for data in (*pages, "builtin_plugins/scaffold/templates", "testing/scripted_model"):
        expected |= {
            str(path.relative_to(PACKAGE.parent))
            for path in (PACKAGE / data).rglob("*")
            if path.is_file()
        }
    paths = PATHS if platform.machine() == "x86_64" else ["plain"]
    expected |= {f"hardpoint/kernels/cpu_{path}.so" for path in paths}
    assert wheel.name.split("-")[2:4] == ["py3", "none"]  # for any version of Python
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = [name for name in archive.namelist() if ".dist-info/" in name]
    assert found == expected
    assert any(name.endswith("LICENSE") for name in info)


def test_every_public_name_is_there():
    for name in hardpoint.__all__:
        assert getattr(hardpoint, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hardpoint.nothing


def test_packages_are_attributes_without_an_import():
    code = "import hardpoint as h; print(h.host.__name__, h.typed.__name__, hasattr(h, 'registry'))"
    done = run(PACKAGE.parent, "-c", code, cwd=ROOT)
    assert done.stdout.split() == ["hardpoint.host", "hardpoint.typed", "False"], done.stderr


def test_every_entry_point_loads():
    import importlib_metadata

    own = importlib_metadata.distribution("hardpoint")
    points = [p for p in own.entry_points if p.group.startswith("hardpoint.")]
    assert len(points) > 20
    for point in points:
        assert point.load() is not None


@pytest.mark.nightly
def test_the_version_is_one(installed):
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for cwd in (installed, ROOT):  # the root's folders must not shadow the package
        done = run(installed, "-m", "hardpoint", "--version", cwd=cwd)
        assert done.stdout.split() == ["hardpoint", stated], done.stderr


def test_the_contract_imports_nothing_heavy(installed):
    code = "import hardpoint.plugins, sys; print({'torch', 'transformers'} & set(sys.modules))"
    assert run(installed, "-c", code).stdout.strip() == "set()"


@pytest.mark.nightly
def test_a_built_in_without_its_entry_point_is_gone_and_the_rest_works(installed, tmp_path):
    """No back door: built-ins come in through their entry points alone."""
    folder = tmp_path / "less"
    shutil.copytree(installed, folder)
    (points,) = folder.glob("hardpoint-*.dist-info/entry_points.txt")
    lines = points.read_text().splitlines()
    gone = ("min_p =", "priority =", "gguf =")
    kept = [line for line in lines if not line.startswith(gone)]
    assert len(kept) == len(lines) - 3
    points.write_text("\n".join(kept))
    script = """
from pathlib import Path
from hardpoint import LLM, SamplingParams, HardpointError
from hardpoint.testing import scripted_config, write_scripted_model

folder = write_scripted_model(Path("m"), {"say abc": " abc"})
with LLM(config=scripted_config(folder)) as llm:
    print(llm.generate("say abc", SamplingParams(temperature=0.0, top_p=0.5))[0].outputs[0].text)
    try:
        llm.generate("x", SamplingParams(min_p=0.1))
    except HardpointError as error:
        print(error)
for wrong in ({"scheduler": {"policy": "priority"}}, {"model": "smollm2", "load": {"use": "auto"}}):
    try:
        LLM(config=scripted_config(folder, wrong))
    except HardpointError as error:
        print(error)
"""
    done = run(folder, "-c", script, cwd=tmp_path)
    answer, min_p, priority, gguf = done.stdout.splitlines()
    assert answer == " abc"
    assert min_p.startswith("min_p: no enabled logits processor applies it")
    assert "no scheduling_policies component is called 'priority'" in priority
    assert "found: fair, fcfs, shortest_first" in priority
    assert "no loader recognises 'smollm2'" in gguf


def test_the_checkout_is_a_package_by_its_path_alone():
    code = "import inspect, hardpoint.plugins as p; print(inspect.getsourcefile(p.Scheduler))"
    done = run(PACKAGE.parent, "-c", code, cwd=ROOT)
    assert done.stdout.startswith(f"{PACKAGE}/plugins/"), done.stderr


def test_torch_is_not_imported_before_an_engine_process_starts():
    """An engine process imports torch while the program does, which takes seconds."""
    code = "import hardpoint.process.build, sys; print('torch' in sys.modules)"
    done = run(PACKAGE.parent, "-c", code, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


def test_a_completing_shell_shows_what_is_imported_on_use(installed):
    code = "import hardpoint, sys; print(*dir(hardpoint), 'torch' in sys.modules)"
    done = run(installed, "-c", code)
    assert set(hardpoint.__all__) < set(done.stdout.split())
    assert done.stdout.split()[-1] == "False"


@pytest.mark.nightly
def test_a_release_is_built_and_checked_where_there_is_no_compiler(tmp_path):
    """Run the steps of the release workflow up to the upload."""
    python = tmp_path / "tools" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "tools"], check=True)
    (workflow,) = (ROOT / ".github" / "workflows").glob("release.yml")
    (packages,) = re.findall(r"pip install (.+)$", workflow.read_text(), re.MULTILINE)
    subprocess.run([python, "-m", "pip", "install", "-q", *shlex.split(packages)], check=True)
    source, out = tmp_path / "source", tmp_path / "dist"
    copy_source(source)
    for name in ("scripts/build-wheels", "scripts/build_wheels.py"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [source / "scripts" / "build-wheels", out],
        env={**CACHED, "PYTHON": str(python), "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    built = sorted(path.name for path in out.iterdir())
    assert len(built) == 2
    assert re.fullmatch(r"hardpoint-[0-9.]+-py3-none-manylinux_2_\d+_\w+\.whl", built[0])
    assert "kernels: plain" in done.stdout


def test_a_release_has_the_version_of_its_tag():
    """The workflow compares the tag with the line of pyproject.toml that has the version."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["build"]["steps"]
    (check,) = [step["run"] for step in steps if "tag" in step.get("name", "")]
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for tag, code in ((f"v{stated}", 0), (f"v{stated}1", 1), ("v9", 1)):
        environment = {"GITHUB_REF_NAME": tag, "PATH": os.environ["PATH"]}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment).returncode == code
