"""Builds from an empty folder each time, with the CPU kernels; the rest is in pyproject.toml.

setuptools reuses `build/`, and packs all that it finds there: also modules that an older version of
the source had.

The kernels are one library per instruction set, with a plain C interface: one wheel serves every
version of Python. Without a compiler that takes the source, there are none, and Hardpoint runs on
torch's operations.
"""

from __future__ import annotations

import atexit
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
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mprefer-vector-width=512"]
PATHS = {
    "plain": [],
    "avx2": AVX2,
    "avx512": [*AVX512, "-mprefer-vector-width=512"],
    "avx512_bf16": AVX512_BF16,
    "amx_bf16": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}
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
    """Compiles each library, side by side; what cannot be compiled is left out with a warning."""

    def finalize_options(self) -> None:
        """Remember whether the libraries go into the source's folder."""
        super().finalize_options()
        self.is_in_place = bool(self.inplace)  # setuptools builds elsewhere first, and copies

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without a version of Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extensions(self) -> None:
        """Compile all libraries."""
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


def libraries() -> list[Extension]:
    """Return the libraries of this processor's architecture."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [
        Extension(
            f"hardpoint.kernels.cpu_{name}",
            [str(SOURCE)],
            depends=HEADERS,
            extra_compile_args=[*FLAGS, *flags],
            optional=True,
        )
        for name, flags in PATHS.items()
        if is_x86 or name == "plain"
    ]


setup(
    ext_modules=libraries(),
    cmdclass={"build": CleanBuild, "build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
