"""The conformance suite for adapter resolvers; the built-in one passes it too."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint.plugins import (
    AdapterResolver,
    AdapterResolverContext,
    ConfigError,
    LoRARequest,
    RequestError,
)
from hardpoint.plugins.component import Component

from .declared import declared_result
from .general.suite import InUse
from .suite import Rule, Violation, checks, short_repr
from .threads import in_thread
from .timing.timed_suite import TimedSuite

RESULT = Rule(
    "result: a resolver returns an absolute Path, a LoRARequest of the name, or None",
    "return `Path(...).resolve()`, or None for a name that is not known",
)
KNOWN = Rule(
    "known: a name that is offered is found, each time, with an adapter_config.json",
    "return the folder that has the adapter's files, whatever was asked before",
)
LATER = Rule(
    "later: an adapter that appears is found, also if its name was asked for before",
    "do not remember names that were not found",
)
INSIDE = Rule(
    "inside: for any name, the resolved path is inside of the offered folder",
    "look the name up in a list, or allow letters, digits and hyphens alone, resolve links, and "
    "compare with the resolved folder",
)
NAMES = Rule(
    "names: any text is a name; an unknown one gives None or a RequestError",
    "refuse the name before you use it as a part of a path",
)
TIME = Rule(
    "time: a resolver answers soon; a request waits for it",
    "do not download anything, nor wait for a server; do slow work in the constructor",
)
THREADS = Rule(
    "threads: concurrent calls return the same as single calls",
    "keep no state between calls, or guard it with a lock",
)
READS_ONLY = Rule(
    "reads only: resolving changes no files",
    "write nothing into the folders of adapters",
)

_CONFIG = "adapter_config.json"
_STRANGE = (
    "..",
    ".",
    "",
    "/",
    "~",
    "../outside",
    "./../outside",
    "x/../../outside",
    "..\\outside",
    "%2e%2e%2foutside",
    "a\0b",
    "absent",
    "absent\n",
    "-",
    "*",
    ".hidden",
    "é" * 3,
    "\udcff",
    "x" * 300,
    "x" * 100_000,
)
_THREADS = 8


class AdapterResolverSuite(TimedSuite):
    """Base class of a test class, which sets `resolver` and `known`, and overrides `provide`.

    Attributes:
        resolver: the class under test.
        known: names that it finds once `provide` has run.
        max_seconds: longest time of a call.
    """

    kind = "adapter_resolvers"
    options_from = "the result of the suite's `provide`"
    resolver: ClassVar[type[AdapterResolver]]
    known: ClassVar[Sequence[str]] = ()
    max_seconds: ClassVar[float] = 1.0
    _offered: Mapping[str, Any] = {}

    def provide(self, folder: Path) -> Mapping[str, Any]:
        """Create the adapters of `known` in a new folder; return the resolver's options.

        Override it. An adapter is a folder with a file adapter_config.json, which may be "{}".
        """
        raise NotImplementedError(f"{type(self).__name__} does not override provide()")

    def _component(self) -> type[Component]:
        return self.resolver

    def _check_contract(self) -> None:
        with self._provided():
            super()._check_contract()

    def _check_construction(self) -> None:
        with self._provided() as (_, resolver):
            resolver.close()

    @contextmanager
    def _provided(self) -> Iterator[tuple[Path, AdapterResolver]]:
        """Yield a folder with the adapters, and a resolver; next to the folder is another one."""
        with tempfile.TemporaryDirectory(prefix="adapters-") as place:
            folder, outside = Path(place).resolve() / "offered", Path(place).resolve() / "outside"
            folder.mkdir()
            outside.mkdir()
            (outside / _CONFIG).write_text("{}")
            self._offered = self.provide(folder)
            yield folder, self._build(AdapterResolverContext, model="scripted")

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        with self._provided() as (_, resolver):

            def use(number: int) -> None:
                for name in (*self.known, f"absent-{number}"):
                    self._resolved(resolver, name)

            yield InUse(resolver, use)

    def _checked_options(self, more: Mapping[str, Any] | None = None) -> Any:
        return super()._checked_options({**self._offered, **(more or {})})

    def _resolved(self, resolver: AdapterResolver, name: str) -> Path | None:
        began = time.monotonic()
        try:
            folder = self._timed(resolver.resolve, name)
        except RequestError:
            folder = None
        except Violation:
            raise
        except Exception as cause:
            problem = f"resolve({short_repr(name)}) raised {type(cause).__name__}: {cause}"
            raise NAMES.violation(problem) from cause
        seconds = time.monotonic() - began
        if seconds > self.max_seconds:
            raise TIME.violation(
                f"resolve({short_repr(name)}) took {seconds:.2g} s, `max_seconds` is "
                f"{self.max_seconds:g}"
            )
        checked = declared_result(RESULT, AdapterResolver, "resolve", folder, (name,))
        return Path(checked.path) if isinstance(checked, LoRARequest) else checked

    @checks(KNOWN)
    def test_known(self) -> None:
        """Each name of `known` is found, twice, and by a new instance, after unknown names too."""
        for _ in range(2):
            with self._provided() as (_, resolver):
                if not self.known:
                    raise KNOWN.violation(
                        "`known` has no name", "set `known`, and offer these adapters"
                    )
                for name in (*self.known, "absent", *self.known):
                    folder = self._resolved(resolver, name)
                    if name != "absent" and (folder is None or not (folder / _CONFIG).is_file()):
                        raise KNOWN.violation(
                            f"resolve({name!r}) found {folder and str(folder)!r}, expected a "
                            f"folder with {_CONFIG}"
                        )
                resolver.close()

    @checks(LATER)
    def test_later(self) -> None:
        """A resolver that finds new adapters after its start also finds an adapter that it was
        asked for before the adapter existed.
        """
        is_static = True
        for name in self.known:
            with self._provided() as (folder, resolver):
                home = self._resolved(resolver, name)
                resolver.close()
                if home is None or not home.is_relative_to(folder) or home == folder:
                    continue
                is_static &= not self._finds_later(name, home, folder.parent / "away")
        if is_static:
            pytest.skip("it finds only adapters that were there when it was built")

    def _finds_later(self, name: str, home: Path, away: Path) -> bool:
        """Return whether a resolver finds an adapter that appears; check that it still does if it
        was asked for the name before.
        """
        home.rename(away)
        try:
            early, other = (self._build(AdapterResolverContext, model="scripted") for _ in "ab")
        except (ConfigError, Violation):
            return False
        before = self._resolved(early, name)
        away.rename(home)
        expected, result = self._resolved(other, name), self._resolved(early, name)
        early.close()
        other.close()
        if before is not None or expected is None:
            return False
        if result != expected:
            raise LATER.violation(
                f"resolve({name!r}) found {result and str(result)!r} for an adapter that appeared "
                f"after it was asked for, expected {str(expected)!r}, as in an instance that "
                f"was not asked before"
            )
        return True

    @checks(INSIDE)
    def test_inside(self) -> None:
        """No name leads out of the folder: with dots, separators, or as an absolute path; nor does
        a link that lies next to an adapter.
        """
        with self._provided() as (folder, resolver):
            outside = folder.parent / "outside"
            homes = [f for name in self.known if (f := self._resolved(resolver, name)) is not None]
            for home in {home.parent for home in homes}:
                if home.is_relative_to(folder):
                    (home / "planted").symlink_to(outside)
            wrapped = [f"{name}/../../outside" for name in self.known]
            names = [*_STRANGE, str(outside), outside.as_uri(), "planted", *wrapped]
            for name in filter(None, names):
                location = self._resolved(resolver, name)
                if location is not None and not location.resolve().is_relative_to(folder):
                    raise INSIDE.violation(
                        f"resolve({short_repr(name)}) found {str(location)!r}, which is outside of "
                        f"what was offered"
                    )
            resolver.close()

    @checks(NAMES)
    def test_names(self) -> None:
        """Strange names: of dots, with separators, with zeros, not to be encoded, very long, known
        ones with something around them.
        """
        with self._provided() as (_, resolver):
            around = ("{}/", "/{}", "./{}", "{}/.", "{}\0", " {}", "{}\n", "{}/" + _CONFIG)
            changed = [form.format(name) for form in around for name in self.known]
            for name in filter(None, (*_STRANGE, *changed)):
                folder = self._resolved(resolver, name)
                if folder is not None and not (folder / _CONFIG).is_file():
                    raise NAMES.violation(
                        f"resolve({short_repr(name)}) found {str(folder)!r}, which is no adapter"
                    )
            resolver.close()

    @checks(THREADS)
    def test_threads(self) -> None:
        """Concurrent calls return the same as calls in sequence."""
        with self._provided() as (_, resolver):
            names = (*self.known, "absent", "..")
            alone = [self._resolved(resolver, name) for name in names]
            running = [
                in_thread(lambda: [self._resolved(resolver, name) for name in names * 20])
                for _ in range(_THREADS)
            ]
            for future in running:
                if (results := future.result(60)) != alone * 20:
                    raise THREADS.violation(
                        f"in {_THREADS} threads at once, it found {short_repr(results)}, alone "
                        f"{short_repr(alone)}"
                    )
            resolver.close()

    @checks(READS_ONLY)
    def test_reads_only(self) -> None:
        """Files are as before, whatever was asked."""
        with self._provided() as (folder, resolver):
            before = _files(folder)
            for name in filter(None, (*self.known, *_STRANGE)):
                self._resolved(resolver, name)
            resolver.close()
            if (after := _files(folder)) != before:
                changed = sorted(after.keys() ^ before.keys()) or "the contents of a file"
                raise READS_ONLY.violation(f"resolving changed {changed}")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }
