"""Builds from an empty folder each time, with the CPU kernels; the rest is in pyproject.toml.

setuptools reuses `build/`, and packs all that it finds there: also modules that an older version of
the source had.

The kernels are one library per instruction set, with a plain C interface: one wheel serves every
version of Python. An installation from source compiles the best one for its processor and `plain`;
HARDPOINT_BUILD_KERNELS names others, `all` or `none`. Without a compiler that takes the source,
there are none, and Hardpoint runs on torch's operations.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

SOURCE = Path("src/hardpoint/kernels/src/kernels.cpp")
HEADERS = [str(header) for header in sorted(SOURCE.parent.glob("*.h"))]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mprefer-vector-width=512"]
PATHS = {
    "plain": [],
    "avx2": AVX2,
    "avx512": [*AVX512, "-mprefer-vector-width=512"],
    "avx512_bf16": AVX512_BF16,
    "amx_bf16": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
# The flags of /proc/cpuinfo that each needs beyond those of the one before it.
PROCESSOR_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16", "avx512vbmi"},
    "amx_bf16": {"amx_tile", "amx_bf16", "amx_int8"},
}
VARIABLE = "HARDPOINT_BUILD_KERNELS"
# Errors of mathematical functions are not reported, so that square roots are one instruction. What
# Python is built with comes first: its -fwrapv makes the matrix product 4 % slower, and no signed
# number overflows here. GCC warns of uninitialised values in its own header of vector instructions.
FLAGS = ["-std=c++17", "-O3", "-fno-wrapv", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno"]
FLAGS += ["-g0", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]


class CleanBuild(build):
    """Builds in a temporary folder, unless the caller names one (`--build-base`)."""

    def initialize_options(self) -> None:
        """Start with an empty folder."""
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="hardpoint-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class BuildKernels(build_ext):
    """Compiles each library, side by side; skips failing ones with a warning."""

    def finalize_options(self) -> None:
        """Remember whether the libraries go into the source's folder."""
        super().finalize_options()
        self.is_in_place = bool(self.inplace)  # setuptools builds elsewhere first, and copies

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without a version of Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extensions(self) -> None:
        """Compile all libraries."""
        names = ", ".join(ext.name.rpartition("cpu_")[2] for ext in self.extensions)
        tell(f"compiling the CPU kernels {names}: 40 s of processor time each")
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.build_extension, self.extensions))

    def build_extension(self, ext: Extension) -> None:
        """Compile one library, unless it is newer than its source."""
        file = Path(self.get_ext_fullpath(ext.name))
        present = SOURCE.parent.parent / file.name if self.is_in_place else file
        sources = [Path(source) for source in (*ext.sources, *ext.depends, __file__)]
        if present.exists() and present.stat().st_mtime > max(s.stat().st_mtime for s in sources):
            return
        try:
            objects = self.compiler.compile(
                ext.sources,
                output_dir=f"{self.build_temp}/{ext.name}",
                extra_postargs=ext.extra_compile_args,
            )
            # Not with -fopenmp: a second OpenMP runtime beside torch's would fight it for the
            # cores. kernels/cpu.py makes torch's known to the library.
            self.compiler.link_shared_object(
                objects, str(file), extra_postargs=["-lm"], target_lang="c++"
            )
        except Exception as error:
            self.warn(f"{ext.name} is left out, Hardpoint uses torch instead: {error}")


class AnyPythonWheel(bdist_wheel):
    """A wheel of one platform, for any version of Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags."""
        return ("py3", "none", super().get_tag()[2])


def tell(line: str) -> None:
    """Write a line to the user's terminal, if there is one: pip hides the output of a build."""
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\n    {line}\n")


def processor_flags() -> set[str]:
    """Return the instruction sets of this processor by the names of /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def native_paths(flags: set[str]) -> list[str]:
    """Return `plain` and the best of `PATHS` for a processor with these flags."""
    best = "plain"
    for name, needed in PROCESSOR_FLAGS.items():
        if not needed <= flags:
            break
        best = name
    return ["plain"] if best == "plain" else ["plain", best]


def chosen_paths() -> list[str]:
    """Return the instruction sets to compile for.

    Raises:
        SystemExit: the variable names an unknown one.
    """
    available = [*PATHS] if platform.machine().lower() in ("x86_64", "amd64") else ["plain"]
    value = os.environ.get(VARIABLE, "native").strip() or "native"
    if value in ("all", "none"):
        return available if value == "all" else []
    if value == "native":
        return [name for name in native_paths(processor_flags()) if name in available]
    names = [name.strip() for name in value.split(",")]
    if unknown := [name for name in names if name not in available]:
        raise SystemExit(
            f"{VARIABLE}: expected all, native, none or names of {', '.join(available)}, "
            f"separated by commas, got {unknown[0]!r}"
        )
    return [name for name in available if name == "plain" or name in names]


def libraries() -> list[Extension]:
    """Return the libraries to compile."""
    return [
        Extension(
            f"hardpoint.kernels.cpu_{name}",
            [str(SOURCE)],
            depends=HEADERS,
            extra_compile_args=[*FLAGS, *PATHS[name]],
            optional=True,
        )
        for name in chosen_paths()
    ]


setup(
    ext_modules=libraries(),
    cmdclass={"build": CleanBuild, "build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
