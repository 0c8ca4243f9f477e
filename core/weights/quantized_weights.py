"""The weights of a model on their way from the loader: read, quantized, dequantized, cut."""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from hardpoint.errors import PluginFaultError, PluginNotFoundError
from hardpoint.host.boundary.checked_schemes import CheckedMatrix, SchemeCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.guard import checked
from hardpoint.host.registry.blame import faults_as
from hardpoint.plugins import ConfigError, EngineConfig, Model, ModelError
from hardpoint.plugins.component import Source
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.model.quantization import COLUMNS
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import (
    AffineCodes,
    DenseMatrix,
    Quantization,
    QuantizedMatrix,
    QuantizedWeight,
)

Weights = Iterator[tuple[str, torch.Tensor]]
Scheme = tuple[Quantization, Source]

_FEWER_RANKS = (
    ", the part that a rank has; expected fewer ranks (parallel.tensor), or quantization.use = "
    "'none', which dequantizes"
)
_SHOWN = 4  # names in a message
_HEAD = "lm_head.weight"


class QuantizedWeights:
    """Gives a model its quantized matrices, as configured; passes other weights on.

    `pass_on` does it; `describe` reports the result afterwards. `close` closes the schemes.

    Attributes:
        whole_shapes: shapes of the weights of all stages, by name.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        cuts: Mapping[str, Cut],
        scheme: Callable[[str], Scheme],
        whole: Model | None = None,
    ) -> None:
        """Find the scheme that the configuration names.

        Args:
            scheme: builds a scheme by its name; returns it and its source.
            whole: all stages of the model, where `model` is one of several. It is not kept.

        Raises:
            ConfigError: the model does not support the configured scheme.
        """
        self._config = config.quantization
        self._checkpoint = config.model
        self._model = model
        self._cuts = cuts
        self._shapes = model.weight_shapes()
        self._build = scheme
        self._schemes: dict[str, Scheme] = {}
        whole = whole or model
        self.whole_shapes = self._shapes | whole.weight_shapes()
        self._tied_table = _tied_table(self.whole_shapes, model.context.config.vocab_size)
        self._check_skip(whole)
        self._quantizable = self._not_skipped(model)
        self._whole_quantizable = self._not_skipped(whole)
        self._use: Scheme | None = None
        if self._config.use not in ("auto", "none"):
            if not self._whole_quantizable:
                raise ConfigError(
                    f"quantization.use: {self._config.use!r} has no weights to quantize: "
                    f"{model.context.config.architecture} has no matrices that may have few bits, "
                    f"or quantization.skip names them all"
                )
            self._use = self.scheme(self._config.use)
        self._quantizes = self._use is not None and self._use[0].quantizes
        self._counts: Counter[str] = Counter()
        self._dequantized: Counter[str] = Counter()
        self._without_kernel: Counter[str] = Counter()
        self._has_own = False
        self._by_loader: Counter[str] = Counter()  # what came dequantized
        self._loader_formats: dict[str, str] = {}  # what loaders dequantize, by name

    def close(self) -> None:
        """Close the schemes; the matrices that they made stay."""
        schemes, self._schemes = self._schemes, {}
        close_all(component for component, _ in schemes.values())

    def pass_on(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]]) -> Weights:
        """Give the model its quantized matrices; yield the other weights.

        Raises:
            ModelError: a weight cannot be read, quantized or cut.
            PluginFaultError: a scheme raised something else, or did not return a matrix.
        """
        for name, weight in weights:
            if isinstance(weight, QuantizedWeight):
                if name not in self._shapes:
                    continue
                self._check_is_matrix(name, weight)
                stays = self.scheme_of(name, weight.scheme) == weight.scheme
                calls = self._calls(name, self._scheme_of_weight(name, weight.scheme))
                matrix = self._read(calls, weight, stays)
                if stays and not isinstance(matrix, DenseMatrix):
                    self._load(calls, matrix, weight.scheme)
                    continue
                self._dequantized[weight.scheme] += 1
                tensor = calls.numbers(matrix)
            else:
                tensor = weight
                if (found_format := self._loader_formats.get(name)) is not None:
                    self._by_loader[found_format] += 1
            if self.scheme_of(name, None) is not None:
                assert self._use is not None
                calls = self._calls(name, self._use)
                self._load(calls, self._quantized(calls, tensor), self._config.use)
            else:
                yield name, tensor

    def scheme_of(self, name: str, stored: str | None) -> str | None:
        """Return the scheme in which the model gets a weight; None if it gets numbers.

        Args:
            stored: the scheme in which the files store it; None if they store numbers.
        """
        return self._scheme_of(name, stored) if name in self._quantizable else None

    def _scheme_of(self, name: str, stored: str | None) -> str | None:
        use = self._config.use
        if name not in self._whole_quantizable:
            return None
        if stored is not None and (stored == use or not (self._quantizes or use == "none")):
            return stored
        return use if self._quantizes else None

    def stored_bytes(self, scheme: str, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of a matrix in a scheme; None if it takes as many as numbers do.

        Raises:
            PluginFaultError: the scheme raised something, or gave something else.
        """
        component, source = self.scheme(scheme)
        rows, columns = shape
        with faults_as(PluginFaultError, f"{source}: its stored_bytes()"):
            num_bytes = component.stored_bytes((rows, columns))
        return checked(num_bytes, Quantization, "stored_bytes()", source)

    def describe(self) -> str | None:
        """Return how many matrices have few bits, and which were dequantized; None if none."""
        dtype = str(self._model.context.dtype).removeprefix("torch.")
        parts = []
        for name, count in sorted(self._counts.items()):
            parts.append(f"{count} in {name}")
            if without := self._without_kernel[name]:
                parts.append(
                    f"{without} of them dequantized to {dtype}, because the operations have no "
                    f"kernel for them"
                )
        dequantized = self._dequantized + self._by_loader
        parts += [f"{count} in {name} dequantized" for name, count in sorted(dequantized.items())]
        if self._has_own and self._model.packed_weights() is None:
            parts.append("not kept in the weight cache, for they multiply themselves")
        return ", ".join(parts) or None

    def check_stored(self, formats: Mapping[str, WeightFormat]) -> None:
        """Check that schemes can read the stored weights, and that the required scheme occurs.

        Args:
            formats: formats of the weights of all stages, by name; empty if they are not known.

        Raises:
            ModelError: a scheme cannot read a stored weight.
            ConfigError: no weight is stored in the scheme that the configuration requires.
        """
        for name, weight_format in formats.items():
            if name not in self._shapes:
                continue
            if weight_format.is_quantized:
                self._scheme_of_weight(name, weight_format.name)
            if (stored := weight_format.stored) is not None:
                self._check_is_matrix(name, stored)
                calls = self._calls(name, self._scheme_of_weight(name, stored.scheme))
                calls.call("check", functools.partial(calls.component.check, stored))
            if not weight_format.is_quantized and not hasattr(torch, weight_format.name):
                self._loader_formats[name] = weight_format.name
        self._check_cuts(formats)
        named = [name for name, stored in formats.items() if stored.name == self._config.use]
        if formats and not self._quantizes:
            self.check_used(any(self._scheme_of(name, self._config.use) for name in named))

    def _check_cuts(self, formats: Mapping[str, WeightFormat]) -> None:
        """Check that each cut of this rank is at a group of columns, if schemes declare groups."""
        for name, cut in self._cuts.items():
            file_format = formats.get(name)
            of = file_format.name if file_format is not None and file_format.is_quantized else None
            if cut.dim == 0 or (use := self.scheme_of(name, of)) is None:
                continue
            rows, columns = self._shapes[name]
            calls = self._calls(name, self._scheme_of_weight(name, use))
            stored = file_format.stored if file_format is not None and use == of else None
            ask = functools.partial(calls.component.alignment, (rows, columns), stored)
            unit = calls.call("alignment", ask, returned=COLUMNS)
            if unit is None:
                continue
            if use != of:
                self._check_groups(name, unit)
            elif not _divides(unit, cut, (rows, columns)):
                first = next(p for p in cut.parts if not _divides(unit, p, (rows, columns)))
                raise ModelError(
                    f"model: weight {name!r} of {self._checkpoint!r}: {use}: columns "
                    f"{first.start} to {first.stop} of {columns} cannot be cut from blocks of "
                    f"{unit} columns{_FEWER_RANKS}"
                )

    def _check_is_matrix(self, name: str, weight: QuantizedWeight) -> None:
        whole = tuple(self._shapes[name])
        if len(whole) != 2:
            raise ModelError(
                f"model: weight {name!r} of {self._checkpoint!r} is stored in {weight.scheme!r}, "
                f"but it is no matrix that may have few bits: "
                f"{self._model.context.config.architecture} needs shape {whole}"
            )

    def _scheme_of_weight(self, name: str, scheme: str) -> Scheme:
        try:
            return self.scheme(scheme)
        except PluginNotFoundError as cause:
            raise ModelError(f"model: weight {name!r} of {self._checkpoint!r}: {cause}") from cause

    @property
    def is_used(self) -> bool:
        """Whether a weight of this rank had the scheme that the configuration names."""
        return self._config.use in self._counts.keys() | self._dequantized.keys()

    def check_used(self, is_used: bool) -> None:
        """Check that weights have the scheme that the configuration names, if it names one.

        Args:
            is_used: whether they have it in any rank.

        Raises:
            ConfigError: they have not.
        """
        if self._use is None or is_used:
            return
        if self._quantizes:
            raise ConfigError(
                f"quantization.use: {self._config.use!r} has quantized no weight of "
                f"{self._checkpoint!r}"
            )
        raise ConfigError(
            f"quantization.use: {self._config.use!r} does not quantize weights, and "
            f"{self._checkpoint!r} has none that are stored in it"
        )

    def _check_skip(self, whole: Model) -> None:
        for pattern in self._config.skip:
            if any(self._matches(name, pattern) for name in self.whole_shapes):
                continue
            names = list(whole.quantizable())
            some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise ConfigError(
                f"quantization.skip: {pattern!r} matches no weight of "
                f"{whole.context.config.architecture}; weights that can be quantized are "
                f"{some or 'none'}"
            )

    def _not_skipped(self, model: Model) -> set[str]:
        return {
            name
            for name in model.quantizable()
            if not any(self._matches(name, pattern) for pattern in self._config.skip)
        }

    def _matches(self, name: str, pattern: str) -> bool:
        names = (name, _HEAD) if name == self._tied_table else (name,)
        return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in names)

    def scheme(self, name: str) -> Scheme:
        """Return a scheme, which is built once: it checks how a checkpoint describes it.

        Raises:
            ModelError: the scheme cannot read such a checkpoint.
        """
        if name not in self._schemes:
            self._schemes[name] = self._build(name)
        return self._schemes[name]

    def _calls(self, name: str, scheme: Scheme) -> SchemeCalls:
        return SchemeCalls(name, self._checkpoint, *scheme)

    def _load(self, calls: SchemeCalls, matrix: QuantizedMatrix, scheme: str) -> None:
        self._counts[scheme] += 1
        if not isinstance(matrix, AffineCodes):
            self._check_estimate(matrix, scheme)
            self._has_own = True
            matrix = CheckedMatrix(matrix, calls)
        elif matrix.bits not in self._model.context.ops.code_bits:
            self._without_kernel[scheme] += 1
        self._model.load_quantized(calls.name, matrix)

    def _check_estimate(self, matrix: QuantizedMatrix, scheme: str) -> None:
        component, source = self.scheme(scheme)
        if component.own_linear or isinstance(matrix, DenseMatrix):
            return
        if self.stored_bytes(scheme, matrix.shape) is not None:
            raise PluginFaultError(
                f"{source}: its stored_bytes() is of codes, and its matrix is a "
                f"{type(matrix).__name__}; expected AffineCodes, own_linear = True, or None"
            )

    def _read(self, calls: SchemeCalls, weight: QuantizedWeight, stays: bool) -> QuantizedMatrix:
        """Return the stored matrix, or the part of it that is needed."""
        whole = tuple(self._shapes[calls.name])
        cut = self._cuts.get(calls.name)
        needed = whole if cut is None else cut.shape(whole)
        read = functools.partial(calls.component.read, weight)
        matrix = calls.matrix("read", read, tuple(weight.shape))
        if matrix.shape not in (whole, needed):
            raise ModelError(
                f"model: weight {calls.name!r} of {self._checkpoint!r} has shape {matrix.shape} "
                f"in {weight.scheme!r}, {self._model.context.config.architecture} needs {whole}"
            )
        calls.check_numbers("read", matrix)
        if cut is None or matrix.shape == needed != whole:
            return matrix
        if not stays and not _divides(calls.unit(matrix), cut, whole):
            return DenseMatrix(cut.of(calls.numbers(matrix)))
        return calls.matrix("read", lambda: _part(matrix, cut), needed)

    def _quantized(self, calls: SchemeCalls, tensor: torch.Tensor) -> QuantizedMatrix:
        weight = tensor.float()
        if not bool(weight.isfinite().all()):
            raise ModelError(
                f"model: weight {calls.name!r} of {self._checkpoint!r} has numbers that are not "
                f"finite, which {self._config.use!r} cannot quantize"
            )
        quantize = functools.partial(calls.component.quantize, weight)
        matrix = calls.matrix("quantize", quantize, tuple(weight.shape))
        calls.check_numbers("quantize", matrix)
        if calls.name in self._cuts:
            self._check_groups(calls.name, calls.unit(matrix))
        return matrix

    def _check_groups(self, name: str, unit: int) -> None:
        """Check that a part that was quantized is a part of the quantized whole."""
        cut, count = self._cuts[name], self._shapes[name][-1]
        if not _divides(unit, cut, self._shapes[name]):
            raise ConfigError(
                f"quantization.use: {self._config.use!r} has groups of {unit} columns, which do "
                f"not divide columns {cut.start} to {cut.stop} of {count}, the part of {name!r} "
                f"that a rank has; expected a size of groups that divides {cut.stop - cut.start}"
            )


def _tied_table(shapes: Mapping[str, Sequence[int]], vocab_size: int) -> str | None:
    tables = [name for name, shape in shapes.items() if tuple(shape[:1]) == (vocab_size,)]
    return tables[0] if len(tables) == 1 and _HEAD not in shapes else None


def _divides(unit: int, cut: Cut, shape: Sequence[int]) -> bool:
    if cut.dim == 0:
        return True
    return not any(p.start % unit or (p.stop % unit and p.stop != shape[1]) for p in cut.parts)


def _part(matrix: QuantizedMatrix, cut: Cut) -> QuantizedMatrix:
    part_of = matrix.rows if cut.dim == 0 else matrix.columns
    try:
        parts = [part_of(part.start, part.stop) for part in cut.parts]
    except ValueError as cause:
        raise ValueError(f"{cause}{_FEWER_RANKS}") from cause
    return parts[0] if not cut.more else parts[0].joined(parts, cut.dim)
