"""The conformance suite for weight loaders; the built-in ones pass it too."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.errors import PluginError
from hardpoint.plugins import (
    LoaderContext,
    ModelConfig,
    ModelError,
    ModelFiles,
    Quantization,
    WeightLoader,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing.engine_access import load_quantization
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.suite import Rule, Violation, checks, short_repr
from hardpoint.testing.timing.timed_suite import TimedSuite
from hardpoint.toolkit.cut_weights import cut_weights

from .checkpoints.changes import (
    CHANGED,
    SECOND,
    TAGS,
    Reader,
    check_changed_bits,
    check_second,
    check_tags,
)
from .checkpoints.config_fields import FIELDS
from .checkpoints.content_hash import CONTENT_HASH, check_content_hash

RECOGNISES = Rule(
    "recognises: it claims its own format and no other, and raises nothing",
    "look for the files or the suffix that only this format has; return False for a path that does "
    "not exist or is of another kind",
)
CONFIG = Rule(
    "config: a complete ModelConfig, always the same",
    "read every field from the model's files; raise ModelError for a missing or wrong one",
)
WEIGHTS = Rule(
    "weights: each weight once, whole, as a dense CPU tensor under its Hugging Face name",
    "yield (name, tensor) for each name of shapes that the files have, in the shape of the files, "
    "in a tensor of its own",
)
CUTS = Rule(
    "cuts: cut_weights gives the parts of the weights that `weights` gives, and the others whole",
    "take `cut.of(weight)`, or the ranges `cut.parts`, of the weight under its Hugging Face "
    "name; `hardpoint.plugins.parallel.needed_part` returns the cut of a weight, and rejects one "
    "that has another shape than the model needs",
)
FORMATS = Rule(
    "formats: how the files store weights, by name, as weights yields them",
    "return a WeightFormat for each name of shapes that the files have, or nothing",
)
FINGERPRINT = Rule(
    "fingerprint: a text that differs whenever the weights may",
    "return names, sizes and times of change of the weights' files, or None",
)
READS_ONLY = Rule(
    "reads only: a loader changes no file, and nothing that it is given",
    "leave a model's folder as it is, since others load from it too; copy shapes and cuts that you "
    "change",
)
DAMAGE = Rule(
    "damage: a damaged or incomplete checkpoint is a ModelError",
    "raise ModelError with the file's name and the mistake in it, from config() or weights()",
)


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint that a suite has written.

    Attributes:
        path: as the configuration's `model` names it.
        tensors: its contents, by Hugging Face name.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its weights."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def files(self) -> dict[Path, bytes]:
        """Return the content of its files."""
        paths = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return {path: path.read_bytes() for path in paths if path.is_file()}


class WeightLoaderSuite(TimedSuite):
    """Base class of a test class, which sets `loader` and overrides `write`.

    Attributes:
        loader: the class under test.
        recognised: False for a loader that is chosen by its name only.
        tolerance: maximum difference of weights, above 0 for quantized formats; None compares no
            values.
    """

    kind = "loaders"
    num_uses = 200
    max_bytes_per_use = 1024
    loader: ClassVar[type[WeightLoader]]
    recognised: ClassVar[bool] = True
    tolerance: ClassVar[float | None] = 0.0

    def write(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        """Write a small checkpoint; the same one every time.

        Args:
            folder: an empty one.

        Returns:
            The path to load, and the tensors that the checkpoint contains, by Hugging Face name.
        """
        raise Violation(
            f"{type(self).__name__} does not override write(), so {folder} stays empty",
            "write a small checkpoint into the folder; return its path and its tensors by name",
        )

    def _component(self) -> type[Component]:
        return self.loader

    def _check_construction(self) -> None:
        with self._checkpoint() as checkpoint:
            self._make(checkpoint).close()

    @checks(RECOGNISES)
    def test_recognises(self) -> None:
        """It claims the checkpoint and no other file or folder, raises nothing for any path, and
        returns the same when asked again.
        """
        with self._checkpoint() as checkpoint, tempfile.TemporaryDirectory() as name:
            cases = {"the checkpoint": (checkpoint.path, self.recognised)}
            cases |= {label: (path, False) for label, path in _other_files(Path(name)).items()}
            for label, (path, expected) in cases.items():
                for _ in range(2):
                    is_claimed = self._recognises(label, path)
                    if is_claimed is not expected:
                        raise RECOGNISES.violation(
                            f"recognises returned {short_repr(is_claimed)} for {label}, expected "
                            f"{expected}"
                        )

    @checks(CONFIG)
    def test_config(self) -> None:
        """Each field of the `ModelConfig` has a right value, and the next call gives the same."""
        with self._checkpoint() as checkpoint:
            loader = self._make(checkpoint)
            config = loader.config()
            if not isinstance(config, ModelConfig):
                raise CONFIG.violation(f"config returned {short_repr(config)}, no ModelConfig")
            for field, expected, is_right in FIELDS:
                value = getattr(config, field)
                if not is_right(config, value):
                    raise CONFIG.violation(
                        f"config().{field} is {short_repr(value)}, expected {expected}"
                    )
            if (name := loader.architecture()) not in (None, config.architecture):
                raise CONFIG.violation(
                    f"architecture() returned {short_repr(name)}, config().architecture is "
                    f"{short_repr(config.architecture)}"
                )
            list(loader.weights(checkpoint.shapes))
            for label, again in (("later", loader), ("of a new instance", self._make(checkpoint))):
                if (other := again.config()) != config:
                    raise CONFIG.violation(
                        f"config() was {short_repr(config)}, {label} {short_repr(other)}"
                    )

    @checks(WEIGHTS)
    def test_weights(self) -> None:
        """Each weight comes once, with its shape and values, in a tensor of its own."""
        with self._checkpoint() as checkpoint:
            weights = self._read(checkpoint)
            if missing := sorted(checkpoint.tensors.keys() - weights):
                raise WEIGHTS.violation(
                    f"weights yielded {len(weights)} weights, but not {', '.join(missing[:5])}"
                )
            self._check_values(checkpoint, weights)

    def test_cuts(self) -> None:
        """`cut_weights` gives the same parts of weights that `weights` gives whole, in any
        dimension, also empty ones, and several parts of one weight; a weight of another shape than
        the model's is a `ModelError`.
        """
        self._run_checks(CUTS.text, self._check_cuts, self._check_cut_shapes)

    @checks(WEIGHTS)
    def test_parts(self) -> None:
        """Fewer names, and names that the files lack, raise nothing."""
        with self._checkpoint() as checkpoint:
            name = sorted(checkpoint.tensors)[-1]
            requested = {name: checkpoint.shapes[name], "absent.weight": (2, 3)}
            weights = self._read(checkpoint, requested)
            if name not in weights:
                raise WEIGHTS.violation(
                    f"weights, asked for {name!r} and for a name that the files lack, did not "
                    f"yield {name!r}",
                    "leave out missing weights: the engine names them",
                )
            self._check_values(checkpoint, weights)

    @checks(FORMATS)
    def test_formats(self) -> None:
        """Each format that `formats` returns is that in which `weights` yields the weight."""
        with self._checkpoint() as checkpoint:
            loader = self._make(checkpoint)
            absent = {**checkpoint.shapes, "absent.weight": (2, 3)}
            with suppress(ModelError):  # a loader may refuse files that lack a weight
                self._check_formats(checkpoint, loader.formats(absent), None)
            formats = loader.formats(checkpoint.shapes)
            weights = dict(loader.weights(checkpoint.shapes)) if formats else {}
            self._check_formats(checkpoint, formats, weights)

    def _check_formats(
        self, checkpoint: Checkpoint, formats: Any, weights: Mapping[str, Any] | None
    ) -> None:
        """Check the result of `formats`.

        Args:
            weights: by name; None compares none.
        """
        if not isinstance(formats, Mapping):
            raise FORMATS.violation(f"formats returned {short_repr(formats)}")
        for name, stored in formats.items():
            if name not in checkpoint.shapes or not isinstance(stored, WeightFormat):
                raise FORMATS.violation(f"formats has {short_repr(stored)} for {name!r}")
            if type(stored.num_bytes) is not int or stored.num_bytes < 0:
                raise FORMATS.violation(f"formats has {stored.num_bytes} bytes for {name!r}")
            if weights is None:
                continue
            weight = weights.get(name)
            is_quantized = isinstance(weight, QuantizedWeight)
            scheme = getattr(weight, "scheme", stored.name)
            if stored.is_quantized is not is_quantized or stored.name != scheme:
                how = f"in {scheme!r}" if is_quantized else "as a tensor"
                raise FORMATS.violation(
                    f"formats has {short_repr(stored)} for {name!r}, which comes {how}"
                )

    @checks("repeated: each call of weights gives the same")
    def test_repeated(self) -> None:
        """A second call, and a second instance, give the same weights."""
        with self._checkpoint() as checkpoint:
            loader = self._make(checkpoint)
            first = self._read(checkpoint, loader=loader)
            for label, again in (("a second call", loader), ("a new instance", None)):
                other = self._read(checkpoint, loader=again)
                differing = [
                    name
                    for name in first.keys() | other.keys()
                    if name not in first
                    or name not in other
                    or not torch.equal(first[name], other[name])
                ]
                if differing:
                    raise Violation(
                        f"{label} of weights gave {sorted(differing)[0]!r} otherwise, and "
                        f"{len(differing) - 1} more",
                        "open the files in each call; an engine that wakes up loads again",
                    )

    @checks(FINGERPRINT)
    def test_fingerprint(self) -> None:
        """`fingerprint`, if there is one, is the same of another instance, and another one after
        the files were written again.
        """
        with self._checkpoint() as checkpoint:
            first = self._make(checkpoint).fingerprint()
            if first is None:
                return
            if not isinstance(first, str):
                raise FINGERPRINT.violation(f"fingerprint returned {short_repr(first)}")
            if (again := self._make(checkpoint).fingerprint()) != first:
                raise FINGERPRINT.violation(f"it was {first!r}, of a new instance {again!r}")
            for path, content in checkpoint.files().items():
                path.write_bytes(content)
                status = path.stat()
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
            if self._make(checkpoint).fingerprint() == first:
                raise FINGERPRINT.violation(f"all files were written again, it is still {first!r}")

    @checks(CONTENT_HASH)
    def test_content_hash(self) -> None:
        """Copies of the files have the same hash; other weights have another."""
        with self._checkpoint() as checkpoint:
            reader = self._reader(checkpoint)
            check_content_hash(checkpoint.path, reader.make, reader.read)

    def test_changed_bits(self) -> None:
        """A flipped bit in the weights or in config.json is detected, or appears in the loaded
        weights; a later load has the present contents of the files.
        """
        self._check_changes(CHANGED, check_changed_bits)

    def test_second_checkpoint(self) -> None:
        """A second checkpoint in the process, at another path, has its own weights, also while a
        loader of the first is open.
        """
        self._check_changes(SECOND, check_second)

    def test_tags(self) -> None:
        """Another tag at the beginning of the file of weights is noticed."""
        self._check_changes(TAGS, check_tags)

    def test_damage(self) -> None:
        """Each file that is empty, cut in half or missing is a `ModelError`, or nothing that is
        yielded is wrong.
        """
        if self.tolerance is None:
            pytest.skip("tolerance is None: wrong weights would not be noticed")
        self._run_checks(DAMAGE.text, self._check_damage)

    @checks(READS_ONLY)
    def test_reads_only(self) -> None:
        """The files stay as they are, and the shapes that it is given."""
        with self._checkpoint() as checkpoint:
            before = checkpoint.files()
            loader = self._make(checkpoint)
            loader.config()
            self._read(checkpoint, loader=loader)
            loader.close()
            after = checkpoint.files()
            differing = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
            if differing:
                names = ", ".join(sorted(path.name for path in differing))
                raise READS_ONLY.violation(f"after loading, these files had changed: {names}")

    @contextmanager
    def _checkpoint(self) -> Iterator[Checkpoint]:
        with tempfile.TemporaryDirectory() as name:
            path, tensors = self.write(Path(name))
            yield Checkpoint(path, tensors)

    def _make(self, checkpoint: Checkpoint) -> WeightLoader:
        files = ModelFiles(checkpoint.path.name, checkpoint.path)
        loader: WeightLoader = self._build(LoaderContext, files=files)
        return loader

    def _recognises(self, label: str, path: Path) -> Any:
        try:
            return self.loader.recognises(ModelFiles(path.name, path))
        except Exception as cause:
            raise RECOGNISES.violation(
                f"recognises raised {type(cause).__name__} for {label}: {cause}"
            ) from cause

    def _check_cuts(self) -> None:
        with self._checkpoint() as checkpoint:
            whole = self._read(checkpoint)
            for cuts in _cuts(checkpoint.shapes):
                parts = self._read(checkpoint, cuts=cuts)
                if missing := sorted(whole.keys() - parts):
                    raise CUTS.violation(f"cut_weights did not yield {', '.join(missing[:5])}")
                for name, weight in whole.items():
                    cut = cuts.get(name)
                    self._check_part(
                        name, cut, parts[name], weight if cut is None else cut.of(weight)
                    )

    def _check_part(
        self, name: str, cut: Cut | None, part: torch.Tensor, expected: torch.Tensor
    ) -> None:
        request = f"{name!r}, with {cut or 'all'} requested,"
        if part.shape != expected.shape:
            raise CUTS.violation(
                f"cut_weights yielded {request} as {list(part.shape)}, expected "
                f"{list(expected.shape)}"
            )
        if not torch.equal(part, expected):
            raise CUTS.violation(
                f"cut_weights yielded {request} with other values than the same part of the whole"
            )

    def _check_cut_shapes(self) -> None:
        if self.tolerance is None:  # it may make whatever is asked for
            return
        with self._checkpoint() as checkpoint:
            for name, shape in checkpoint.shapes.items():
                shapes = {name: (shape[0] + 1, *shape[1:])}
                try:
                    self._read(checkpoint, shapes, cuts={name: Cut(0, 0, 1)})
                except ModelError:
                    continue
                raise CUTS.violation(
                    f"a part of {name!r} of shape {list(shapes[name])} was asked for; the "
                    f"checkpoint has {list(shape)}, and cut_weights raised nothing"
                )

    def _check_changes(self, rule: Rule, check: Callable[[Path, Reader], None]) -> None:
        if self.tolerance is None:
            pytest.skip("tolerance is None: other weights would not be noticed")
        with self._checkpoint() as checkpoint:
            self._run_checks(rule.text, lambda: check(checkpoint.path, self._reader(checkpoint)))

    def _reader(self, checkpoint: Checkpoint) -> Reader:
        return Reader(
            lambda path: self._make(Checkpoint(path, {})),
            lambda loader: self._read(checkpoint, loader=loader),
        )

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        with self._checkpoint() as checkpoint:
            loader = self._make(checkpoint)

            def weights(loader: WeightLoader) -> None:
                list(loader.weights(checkpoint.shapes))

            def use(number: int) -> None:
                again = loader if number % 2 else self._make(checkpoint)
                self._timed(again.config)
                self._timed(weights, again)
                if again is not loader:
                    again.close()

            yield InUse(loader, use)

    def _check_damage(self) -> None:
        with self._checkpoint() as checkpoint:
            expected = self._make(checkpoint).config()
            for path, content in checkpoint.files().items():
                damages: dict[str, bytes | None] = {
                    "empty": b"",
                    "cut in half": content[: len(content) // 2],
                }
                if path != checkpoint.path:
                    damages["missing"] = None
                for damage, left in damages.items():
                    path.unlink() if left is None else path.write_bytes(left)
                    self._check_damaged(checkpoint, expected, f"{path.name} {damage}")
                    path.write_bytes(content)

    def _check_damaged(self, checkpoint: Checkpoint, expected: ModelConfig, damage: str) -> None:
        self._recognises(f"the checkpoint with {damage}", checkpoint.path)
        try:
            loader = self._make(checkpoint)
            config, weights = loader.config(), self._read(checkpoint, loader=loader)
        except ModelError:
            return
        except Violation as violation:
            raise DAMAGE.violation(f"with {damage}, {violation.observed}") from violation
        except Exception as cause:
            raise DAMAGE.violation(
                f"with {damage}, it raised {type(cause).__name__}: {cause}"
            ) from cause
        if config != expected and not damage.endswith("missing"):  # which files may be, if optional
            raise DAMAGE.violation(f"with {damage}, config returned {short_repr(config)}")
        try:
            self._check_values(checkpoint, weights)
        except Violation as violation:
            raise DAMAGE.violation(f"with {damage}, {violation.observed}") from violation

    def _read(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        loader: WeightLoader | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the weights that a loader yields; raise a Violation if they are not weights."""
        loader = loader or self._make(checkpoint)
        shapes = checkpoint.shapes if shapes is None else shapes
        weights = loader.weights(shapes) if cuts is None else cut_weights(loader, shapes, cuts)
        if not isinstance(weights, Iterable):
            raise WEIGHTS.violation(f"weights returned {short_repr(weights)}, no iterator")
        call = "weights()" if cuts is None else "cut_weights()"
        with self._unchanged(READS_ONLY, call, shapes=shapes, cuts=cuts):
            return self._collected(loader, weights, shapes, cuts)

    def _collected(
        self,
        loader: WeightLoader,
        weights: Iterable[Any],
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, Cut] | None,
    ) -> dict[str, torch.Tensor]:
        """Return weights by name; quantized ones are dequantized."""
        by_name: dict[str, torch.Tensor] = {}
        for item in weights:
            if not _is_weight(item):
                raise WEIGHTS.violation(f"weights yielded {_summary(item)}")
            name, weight = item
            if name in by_name:
                raise WEIGHTS.violation(f"weights yielded {name!r} twice")
            if isinstance(weight, QuantizedWeight):
                cut = None if cuts is None else cuts.get(name)
                weight = self._dequantized(loader, name, weight, cut, shapes.get(name))
            by_name[name] = weight
        return by_name

    def _dequantized(
        self,
        loader: WeightLoader,
        name: str,
        weight: QuantizedWeight,
        cut: Cut | None,
        shape: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """Return the numbers of a quantized weight, or the part of them that was asked for.

        Raises:
            ModelError: its scheme refuses it, or it has another shape than was asked for.
        """
        config = loader.config().hf.get("quantization_config") or {}
        try:
            scheme = self.scheme(weight.scheme, config)
        except PluginError as cause:
            raise WEIGHTS.violation(
                f"weights yielded {name!r} in {weight.scheme!r}, which is no scheme: {cause}",
                "name an installed component of the kind quantizations, or override scheme()",
            ) from cause
        try:
            numbers = scheme.read(weight).dequantize()
        except ValueError as cause:
            raise ModelError(f"{name}: {weight.scheme}: {cause}") from cause
        if cut is None or (shape is not None and tuple(weight.shape) == cut.shape(shape) != shape):
            return numbers
        if tuple(weight.shape) != shape:
            raise ModelError(f"{name}: shape {weight.shape}, asked for {shape}")
        part: torch.Tensor = cut.of(numbers)
        return part

    def scheme(self, name: str, config: Mapping[str, Any]) -> Quantization:
        """Return the scheme that reads quantized weights; by default the installed one.

        Args:
            name: the scheme of a `QuantizedWeight`.
            config: the checkpoint's `quantization_config`.
        """
        return load_quantization(name, torch.float32, config)

    def _check_values(self, checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            expected = checkpoint.tensors.get(name)
            if expected is None:
                continue
            if tensor.shape != expected.shape:
                raise WEIGHTS.violation(
                    f"weights yielded {name!r} as {list(tensor.shape)}, the checkpoint has "
                    f"{list(expected.shape)}"
                )
            if self.tolerance is None or not tensor.numel():
                continue
            difference = (tensor.double() - expected.double()).abs().nan_to_num(torch.inf).max()
            if float(difference) > self.tolerance:
                raise WEIGHTS.violation(
                    f"weights yielded {name!r} with values that differ from the checkpoint's by up "
                    f"to {float(difference):.3g}, tolerance is {self.tolerance:.3g}"
                )


def _cuts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, Cut]]:
    """Yield cuts of some weights in each dimension: halves, thirds, random, empty, of two parts."""
    source = random.Random(0)
    for ranks in (2, 3):
        for rank in range(ranks):
            for dim in (0, 1):
                yield {
                    name: Cut(dim, shape[dim] * rank // ranks, shape[dim] * (rank + 1) // ranks)
                    for name, shape in shapes.items()
                    if dim < len(shape)
                }
    for _ in range(8):
        cuts = {}
        for name, shape in shapes.items():
            if shape and source.random() < 0.8:
                dim = source.randrange(len(shape))
                start, stop = sorted(source.randint(0, shape[dim]) for _ in "ab")
                cuts[name] = Cut(dim, start, stop)
        yield cuts
    yield {name: Cut(0, shape[0], shape[0]) for name, shape in shapes.items() if shape}
    for dim in (0, 1):  # several parts, as of q, k and v that are stacked
        sizes = {name: shape[dim] for name, shape in shapes.items() if dim < len(shape)}
        yield {n: Cut(dim, 0, size // 3, ((size // 2, size),)) for n, size in sizes.items()}


def _other_files(folder: Path) -> dict[str, Path]:
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").write_text("# Notes\n")
    (folder / "notes.txt").write_text("Nothing but notes.\n")
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "nothing").write_bytes(b"")
    return {
        "a path that does not exist": folder / "absent",
        "an empty folder": folder / "empty",
        "a folder with a README alone": folder / "notes",
        "a text file": folder / "notes.txt",
        "a binary file of another format": folder / "noise.bin",
        "an empty file": folder / "nothing",
    }


def _is_weight(item: Any) -> bool:
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
        return False
    weight = item[1]
    if isinstance(weight, QuantizedWeight):
        return all(map(_is_dense, weight.tensors.values()))
    return _is_dense(weight) and weight.is_floating_point()


def _is_dense(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _summary(item: Any) -> str:
    if isinstance(item, tuple):
        return f"({', '.join(map(_summary, item))})"
    if isinstance(item, torch.Tensor):
        return f"a {item.dtype} tensor {list(item.shape)} on {item.device} ({item.layout})"
    return short_repr(item)
