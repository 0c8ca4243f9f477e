"""Objects of connectors as plain data, since messages between processes are msgpack, not pickles.

Objects are their class and their fields. A class is imported again only if its module belongs to
the connector's own package, or to vLLM's.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from typing import Any

_PLAIN = (str, bytes, int, float)
_OWN = ("vllm", "hardpoint_vllm")


class Encoding:
    """Encodes and decodes the objects of a connector."""

    def __init__(self, module: str) -> None:
        """`module`: module of the connector's class."""
        self._packages = {module.partition(".")[0], *_OWN}
        self._classes: dict[str, Any] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as plain data.

        Raises:
            TypeError: a part of it is of a type that cannot be sent.
        """
        if isinstance(value, enum.Enum):
            return {"enum": [self._name(type(value), path), value.name]}
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        for kind in (tuple, set, frozenset):
            if type(value) is kind:
                return {kind.__name__: self.encode(list(value), path)}
        if isinstance(value, Mapping):
            return {"map": [
                [self.encode(key, path), self.encode(item, f"{path}[{key!r}]")]
                for key, item in value.items()
            ]}  # fmt: skip
        if (array := _as_array(value)) is not None:
            return array
        fields = _fields(value)
        if fields is None:
            raise TypeError(
                f"{path}: expected plain data, arrays, tensors, or objects of them, got "
                f"{type(value).__name__}"
            )
        encoded = {name: self.encode(item, f"{path}.{name}") for name, item in fields.items()}
        return {"object": [self._name(type(value), path), encoded]}

    def decode(self, value: Any) -> Any:
        """Return the value of plain data.

        Raises:
            TypeError: it has a class of another package.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        ((kind, content),) = value.items()
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](self.decode(content))
        if kind == "map":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "enum":
            return self._class(content[0])[content[1]]
        if kind == "object":
            decoded = object.__new__(self._class(content[0]))
            for name, item in content[1].items():
                object.__setattr__(decoded, name, self.decode(item))
            return decoded
        return _from_array(kind, *content)

    def _name(self, cls: type, path: str) -> str:
        name = f"{cls.__module__}:{cls.__qualname__}"
        if self._classes.setdefault(name, cls) is not cls or "<" in name:
            raise TypeError(f"{path}: expected a class at the top level of a module, got {name}")
        self._check(name)
        return name

    def _class(self, name: str) -> Any:
        if name not in self._classes:
            self._check(name)
            module, _, qualname = name.partition(":")
            target: Any = importlib.import_module(module)
            for part in qualname.split("."):
                target = getattr(target, part)
            self._classes[name] = target
        return self._classes[name]

    def _check(self, name: str) -> None:
        if name.partition(":")[0].partition(".")[0] not in self._packages:
            raise TypeError(f"expected a class of {', '.join(sorted(self._packages))}, got {name}")


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of an object; None of one without fields in Python."""
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    if not hasattr(value, "__dict__") and not slots:
        return None
    fields = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    fields.pop("__dict__", None)
    return {**fields, **getattr(value, "__dict__", {})}


def _as_array(value: Any) -> dict[str, Any] | None:
    import numpy as np  # noqa: PLC0415 - plugins are listed without it
    import torch  # noqa: PLC0415

    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous()
        data = content.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(content.dtype).removeprefix("torch."), list(content.shape), data]}
    if isinstance(value, np.generic):
        return {"number": [value.dtype.str, [], value.tobytes()]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"array": [value.dtype.str, list(value.shape), value.tobytes()]}
    return None


def _from_array(kind: str, dtype: str, shape: list[int], data: bytes) -> Any:
    import numpy as np  # noqa: PLC0415 - plugins are listed without it
    import torch  # noqa: PLC0415

    if kind == "tensor":
        if not data:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).reshape(shape)
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array[()] if kind == "number" else array.copy()
