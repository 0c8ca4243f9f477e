"""Weight loaders: read a model's configuration and weights from its files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import fitting, returns
from hardpoint.plugins.config.model_files import ModelConfig, ModelFiles

from .cuts import Cut, needed_part
from .matrices import QuantizedWeight

if TYPE_CHECKING:
    import torch

__all__ = ["LoaderContext", "WeightFormat", "WeightLoader"]


@dataclass(frozen=True)
class WeightFormat:
    """How files store a weight.

    Attributes:
        name: name of a `quantizations` component, "q4_k" for example; else a dtype, "bfloat16",
            or the format's name of numbers that the loader itself dequantizes, "iq1_s".
        num_bytes: in the files.
        is_quantized: whether the name is a scheme's.
        stored: inputs of the scheme, without content: tensors on torch's device "meta". None
                if the loader does not know it.
    """

    name: str
    num_bytes: int
    is_quantized: bool = False
    stored: QuantizedWeight | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderContext(Context["WeightLoader"]):
    """Context of a weight loader."""

    files: ModelFiles


FORMATS = fitting("a WeightFormat per name", lambda value: isinstance(value, Mapping))


class WeightLoader(Component):
    """Reads one format: the model's configuration and its weights."""

    context: LoaderContext

    @classmethod
    @abstractmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the files have this format. Must be fast and read no weights."""

    def architecture(self) -> str | None:
        """Return the architecture's name; None, the default, leaves it to `config`.

        Called before `config`, so that an architecture that is not supported is reported before
        its fields are, which may have other names.

        Raises:
            ModelError: if the files do not state it.
        """
        return None

    def remark(self) -> str:
        """Return an addition to the error for an architecture that no plugin computes.

        It follows the architecture's name in the message; empty, the default, adds nothing.
        """
        return ""

    @abstractmethod
    def config(self) -> ModelConfig:
        """Return the model's configuration.

        Raises:
            ModelError: if the files are damaged, incomplete or of an unknown architecture.
        """

    @abstractmethod
    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield every weight once, as (name, CPU tensor).

        A matrix that the files store quantized is a `QuantizedWeight`, under the name of the
        matrix; the scheme that it names reads it.

        Args:
            shapes: shapes of the weights that the model needs, by Hugging Face name. A loader that
                reads files may also yield others; the framework checks names and shapes.
        """

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield every weight once; yield only the needed part of a weight in `cuts`.

        A `QuantizedWeight` has the shape of that part, or of the whole, which is cut then.

        By default they are read whole and cut. A loader may read less; it computes the range
        with `hardpoint.plugins.parallel.needed_part`. For a class that overrides `weights` alone,
        the default is called, whatever it inherits.

        Args:
            shapes: as for `weights`, of whole weights.
            cuts: by name.

        Raises:
            ModelError: a weight that is to be cut has another shape than in `shapes`.
        """
        for name, weight in self.weights(shapes):
            if isinstance(weight, QuantizedWeight):
                yield name, weight
                continue
            cut = needed_part(name, weight.shape, shapes, cuts)
            yield name, weight if cut is None else cut.of(weight)

    @returns(FORMATS)
    def formats(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightFormat]:  # noqa: ARG002
        """Return how the files store the weights in `shapes`, by name, without reading them.

        An empty mapping, the default: it is not known.

        Raises:
            ModelError: a weight is missing, or stored in a way that cannot be read.
        """
        return {}

    def content_hash(self, hash_file: Callable[[Path], str]) -> str | None:  # noqa: ARG002
        """Return a text that identifies the weights, the same wherever their files lie.

        It is part of the keys of KV blocks. None, the default: the loader has no such text, and
        a model that it loads cannot have a KV connector.

        Args:
            hash_file: returns the SHA-256 of a file's content, which it keeps for the next time.
        """
        return None

    def fingerprint(self) -> str | None:
        """Return a text that differs whenever `weights` would yield something else.

        For weights in files, their names, sizes and times of change. The loaded tensors of a model
        are then kept in the weight cache. None, the default: they are not.
        """
        return None
