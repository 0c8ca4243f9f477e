"""The weights of a model on their way from the loader: read, quantised, dequantised, cut."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeGuard

import torch

from hardpoint.plugins import ConfigError, EngineConfig, HardpointError, Model, ModelError
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.model import WeightFormat
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import (
    AffineCodes,
    DenseMatrix,
    Quantization,
    QuantizedMatrix,
    QuantizedWeight,
)
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.tensor_checks import shown

from .memory import is_out_of_memory

Weights = Iterator[tuple[str, torch.Tensor]]
Scheme = tuple[Quantization, Source]


class QuantizedWeights:
    """Gives a model its matrices of few bits, as the configuration says; passes other weights on.

    `pass_on` does it; `describe` says afterwards what was done.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        cuts: Mapping[str, Cut],
        scheme: Callable[[str], Scheme],
    ) -> None:
        """Find the scheme that the configuration names.

        Args:
            config: the engine's.
            model: that loads the weights.
            cuts: of its weights, by name.
            scheme: returns a scheme and its source by its name.

        Raises:
            ConfigError: the model cannot load what the configuration says.
        """
        self._config = config.quantization
        self._checkpoint = config.model
        self._model = model
        self._cuts = cuts
        self._shapes = model.weight_shapes()
        self._scheme = scheme
        skip = self._config.skip
        self._quantizable = {
            name
            for name in model.quantizable()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)
        }
        self._use: Scheme | None = None
        if self._config.use not in ("auto", "none"):
            self._use = scheme(self._config.use)
            if not self._quantizable:
                raise ConfigError(
                    f"quantization.use: {self._config.use!r} has no weights to quantise: "
                    f"{model.context.config.architecture} has no matrices that may have few bits, "
                    f"or quantization.skip names them all"
                )
        self._quantizes = self._use is not None and self._use[0].quantizes
        self._counts: Counter[str] = Counter()
        self._dequantized: Counter[str] = Counter()

    def check_formats(self, formats: object, source: Source) -> None:
        """Check what files store against the schemes that read it, before weights are read.

        Args:
            formats: what the loader's `formats` returned.
            source: of the loader.

        Raises:
            ModelError: a scheme cannot read what is stored.
            ConfigError: the checkpoint has no weights in the scheme that is required.
            PluginFaultError: the formats are none, or a scheme raised something else.
        """
        if not _are_formats(formats):
            raise _fault(source, "formats", formats, "a WeightFormat of each weight, by name")
        for name, found in formats.items():
            if found.stored is not None and name in self._shapes:
                self._check_stored(name, found.stored)
        schemes = {found.name for found in formats.values() if found.is_quantized}
        if formats and self._use is not None and self._config.use not in schemes:
            self._refuse_unused()

    def pass_on(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]]) -> Weights:
        """Give the model its matrices of few bits; yield the other weights.

        Raises:
            ModelError: a weight cannot be read, quantised or cut.
            PluginFaultError: a scheme raised something else, or gave what is no matrix.
        """
        for name, weight in weights:
            matrix = None
            if isinstance(weight, QuantizedWeight):
                if name not in self._shapes:
                    continue
                matrix = self._read(name, weight)
                if self._keeps(name, weight.scheme) and not isinstance(matrix, DenseMatrix):
                    self._load(name, matrix, weight.scheme)
                    continue
                self._dequantized[weight.scheme] += 1
                tensor = matrix.dequantize()
            else:
                tensor = weight
            if self._quantizes and name in self._quantizable:
                self._load(name, self._quantized(name, tensor), self._config.use)
            else:
                yield name, tensor

    def describe(self) -> str | None:
        """Return how many matrices have few bits, and which were dequantised; None if none."""
        code_bits = self._model.context.ops.code_bits
        parts = [f"{count} in {name}" for name, count in sorted(self._counts.items())]
        if parts and not code_bits:
            dtype = str(self._model.context.dtype).removeprefix("torch.")
            parts.append(f"dequantised to {dtype}, for the operations have no kernel for them")
        parts += [f"{count} in {name} dequantised" for name, count in self._dequantized.items()]
        return ", ".join(parts) or None

    def check_used(self) -> None:
        """Check that the checkpoint had the scheme that the configuration requires.

        Raises:
            ConfigError: it has no weights in it.
        """
        used = self._counts.keys() | self._dequantized.keys()
        if self._use is not None and self._config.use not in used:
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise an error if the required scheme only reads, and found nothing to read."""
        if not self._quantizes:
            raise ConfigError(
                f"quantization.use: {self._config.use!r} does not quantise weights, and "
                f"{self._checkpoint!r} has none that are stored in it"
            )

    def _check_stored(self, name: str, stored: QuantizedWeight) -> None:
        scheme, source = self._scheme(stored.scheme)
        try:
            scheme.check(stored)
        except BaseException as cause:
            raise self._error(name, (scheme, source), "check", cause) from cause

    def _keeps(self, name: str, scheme: str) -> bool:
        """Return whether a stored matrix stays as it is."""
        use = self._config.use
        stays = use == scheme or not (self._quantizes or use == "none")
        return stays and name in self._quantizable

    def _load(self, name: str, matrix: QuantizedMatrix, scheme: str) -> None:
        self._counts[scheme] += 1
        self._model.load_quantized(name, matrix)

    def _read(self, name: str, weight: QuantizedWeight) -> QuantizedMatrix:
        """Return what is stored, or the part of it that is needed."""
        scheme = self._scheme(weight.scheme)
        matrix = self._call(name, scheme, "read", lambda: scheme[0].read(weight))
        whole = tuple(self._shapes[name])
        cut = self._cuts.get(name)
        needed = whole if cut is None else cut.shape(whole)
        if matrix.shape != weight.shape:
            raise _fault(scheme[1], "read", matrix.shape, f"a matrix of shape {weight.shape}")
        if matrix.shape not in (whole, needed):
            raise ModelError(
                f"model: weight {name!r} of {self._checkpoint!r} has shape {matrix.shape}, "
                f"{self._model.context.config.architecture} needs {whole}"
            )
        if cut is None or matrix.shape == needed != whole:
            return matrix
        part = matrix.rows if cut.dim == 0 else matrix.columns
        return self._call(name, scheme, "read", lambda: part(cut.start, cut.stop))

    def _quantized(self, name: str, tensor: torch.Tensor) -> QuantizedMatrix:
        assert self._use is not None
        scheme, _ = self._use
        weight = tensor.float()
        if not bool(weight.isfinite().all()):
            raise ModelError(
                f"model: weight {name!r} of {self._checkpoint!r} has numbers that are not finite, "
                f"which {self._config.use!r} cannot quantise"
            )
        matrix = self._call(name, self._use, "quantize", lambda: scheme.quantize(weight))
        self._check_alignment(name, matrix)
        return matrix

    def _check_alignment(self, name: str, matrix: QuantizedMatrix) -> None:
        """Check that a part that was quantised is a part of the quantised whole.

        Raises:
            ConfigError: it was cut within a group of columns.
        """
        cut = self._cuts.get(name)
        if cut is None or cut.dim == 0 or not isinstance(matrix, AffineCodes):
            return
        unit, count = matrix.alignment, self._shapes[name][1]
        if cut.start % unit or (cut.stop % unit and cut.stop != count):
            raise ConfigError(
                f"quantization.use: {self._config.use!r} has groups of {unit} columns, which do "
                f"not divide columns {cut.start} to {cut.stop} of {count}, the part of {name!r} "
                f"that a rank has; expected a size of groups that divides {cut.stop - cut.start}"
            )

    def _call(
        self, name: str, scheme: Scheme, method: str, function: Callable[[], QuantizedMatrix]
    ) -> QuantizedMatrix:
        """Return the matrix that a scheme's method gives."""
        try:
            matrix = function()
        except BaseException as cause:
            raise self._error(name, scheme, method, cause) from cause
        if not isinstance(matrix, QuantizedMatrix):
            raise _fault(scheme[1], method, matrix, "a QuantizedMatrix")
        if isinstance(matrix, AffineCodes) and not matrix.is_finite():
            raise ModelError(
                f"model: weight {name!r} of {self._checkpoint!r}: {scheme[0].name}: a scale or "
                f"offset is not finite"
            )
        return matrix

    def _error(
        self, name: str, scheme: Scheme, method: str, cause: BaseException
    ) -> HardpointError:
        """Return the error of a scheme's method; raise what is not the scheme's."""
        raise_unless_fault(cause)
        if is_out_of_memory(cause) or isinstance(cause, HardpointError):
            raise cause
        if isinstance(cause, ValueError):
            return ModelError(
                f"model: weight {name!r} of {self._checkpoint!r}: {scheme[0].name}: {cause}"
            )
        return PluginFaultError(
            f"{scheme[1]}: its {method}() failed for {name!r}: {describe(cause)}"
        )


def _are_formats(found: object) -> TypeGuard[Mapping[str, WeightFormat]]:
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, WeightFormat) for name, value in found.items()
    )


def _fault(source: Source, method: str, got: object, expected: str) -> PluginFaultError:
    return PluginFaultError(f"{source}: its {method}() gave {shown(got)}, expected {expected}")
