"""The flags of `vllm serve` as a configuration: `hardpoint serve --from-vllm "FLAGS"`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, NoReturn

from hardpoint.errors import ConfigError
from hardpoint.typed import toml_text

from .arguments import ARGUMENTS
from .engine_args import FlexibleArgumentParser, add_options, expanded
from .special import SPECIAL, translate


@dataclass(frozen=True)
class ServeFlags:
    """A configuration made of the flags of `vllm serve`.

    Attributes:
        toml: text of the hardpoint.toml.
        settings: the same as `key=value`.
        notes: flags without effect, and why.
        api_key: the server's key, which is in no file.
    """

    toml: str
    settings: tuple[str, ...]
    notes: tuple[str, ...]
    api_key: str | None


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--from-vllm: {message}")


def read_flags(flags: str) -> ServeFlags:
    """Return the configuration of the flags of `vllm serve`.

    Raises:
        ConfigError: a flag is unknown, or has no counterpart.
    """
    arguments = shlex.split(flags)
    if arguments[:2] == ["vllm", "serve"] or arguments[:1] == ["serve"]:
        arguments = arguments[arguments.index("serve") + 1 :]
    parser = _Parser(prog="vllm serve", add_help=False, allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    names = [name for name in {**ARGUMENTS, **SPECIAL} if name != "model"]
    parser.add_argument("--model", default=None)
    parser.add_argument("--lora-modules", nargs="*", default=None)
    add_options(parser, names)
    options, unknown = parser.parse_known_args(expanded(arguments))
    if unknown:
        raise ConfigError(
            f"--from-vllm: {unknown[0]}: there is no such flag of `vllm serve` 0.33 here; the "
            f"configuration is docs/configuration.md"
        )
    values = {name: value for name, value in vars(options).items() if value is not None}
    if (model := values.pop("model_tag", None)) is not None:
        values["model"] = model
    values.setdefault("host", "0.0.0.0")
    translated = translate(values, server=True)
    settings = tuple(f"{key}={toml_text(value)}" for key, value in translated.values.items())
    return ServeFlags(
        _toml(translated.values),
        settings,
        tuple(translated.notes),
        translated.api_keys[0] if translated.api_keys else None,
    )


def _toml(values: dict[str, Any]) -> str:
    tables: dict[str, list[str]] = {"": []}
    for key, value in values.items():
        path, _, name = key.rpartition(".")
        tables.setdefault(path, []).append(f"{name} = {toml_text(value)}")
    parts = [
        "\n".join([*([f"[{path}]"] if path else []), *lines])
        for path, lines in tables.items()
        if lines
    ]
    return "\n\n".join(parts) + "\n"
