"""Everything about one component: what it is, what it can be told, and by whom it was told."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.plugins import Arguments, Options
from hardpoint.plugins.component import Component
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.describing import FieldDoc, first_paragraph, struct_fields
from hardpoint.plugins.errors import PluginNotFoundError
from hardpoint.plugins.hooks import PROJECT
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.typed import json_schema
from hardpoint.registry.adapt import adapter_of, load_component
from hardpoint.registry.plugin_set import PluginSet

from .listing import Listed


@dataclass(frozen=True)
class Details:
    """A component and its class.

    Attributes:
        target: the imported class, or hooks object.
        values: its options as they are set; empty when it is off.
        config_sources: of those values.
    """

    listed: Listed
    target: Any
    values: Mapping[str, Any]
    config_sources: ConfigSources

    @classmethod
    def load(cls, listed: Listed, plugins: PluginSet, config_sources: ConfigSources) -> Details:
        """Import a component, on or not, and nothing else.

        Raises:
            PluginError: it cannot be imported, or does not keep its kind's contract.
        """
        if listed.kind not in KINDS:
            raise PluginNotFoundError(
                f"{listed.kind}/{listed.name} ({listed.package}): {listed.why}; "
                f"kinds here: {', '.join(KINDS)}"
            )
        if not listed.on:
            target = load_component(KINDS[listed.kind], listed.source)
            return cls(listed, target, {}, config_sources)
        entry = plugins.get(listed.kind, listed.name)
        target = plugins.target(entry)
        values = plugins.options(entry) if _is_component(target) else None
        return cls(listed, target, msgspec.to_builtins(values) or {}, config_sources)

    def as_json(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            "kind": self.listed.kind,
            "name": self.listed.name,
            "class": self.listed.source.value,
            "distribution": self.listed.source.distribution,
            "version": self.listed.source.version,
            "on": self.listed.on,
            "why": self.listed.why,
            "summary": first_paragraph(self.target),
            "interface": self._interface(),
            "adapter": adapter_of(self.target),
            "contract": self.target.contract,
            "phase": self._phase(),
            "place": self.listed.place,
            "options": dict(self.values),
            "options_schema": _schema(self.target, "Options"),
            "arguments_schema": _schema(self.target, "Arguments"),
        }

    def as_text(self) -> str:
        """Return it for people."""
        facts = {
            "interface": f"{self._interface()}, contract {self.target.contract}",
            "adapter": adapter_of(self.target),
            "class": self.listed.source.value,
            "from": self.listed.package,
            "state": f"{'on' if self.listed.on else 'off'}: {self.listed.why}",
            "phase": self._phase(),
            "order": self.listed.place and f"{self.listed.place} of its kind",
            "hooks": ", ".join(self._hooks()),
            "params": ", ".join(getattr(self.target, "params_fields", ())),
        }
        lines = [f"{self.listed.kind}/{self.listed.name}"]
        if summary := first_paragraph(self.target):
            lines += [f"  {summary}"]
        lines += ["", *(f"  {name:<10} {fact}" for name, fact in facts.items() if fact)]
        if (options := _declared(self.target, "Options")) is not None:
            lines += ["", f"options, under [plugin.{self.listed.name}]"]
            lines += _field_lines(options, self._set_options())
        if (arguments := _declared(self.target, "Arguments")) is not None:
            lines += ["", f'arguments of a request, under plugin_args["{self.listed.name}"]']
            lines += _field_lines(arguments, {})
        return "\n".join(lines)

    def _interface(self) -> str:
        kind = KINDS[self.listed.kind]
        forms = kind.forms or ((kind.interface,) if kind.interface else ())
        return next((form.__name__ for form in forms if issubclass(self.target, form)), kind.name)

    def _phase(self) -> str | None:
        phase = getattr(self.target, "phase", None)
        return phase.name if phase is not None else None

    def _hooks(self) -> list[str]:
        if KINDS[self.listed.kind].interface is not None:
            return []
        marker = f"{PROJECT}_impl"
        members = ((name, getattr(self.target, name)) for name in dir(self.target))
        return [name for name, member in members if hasattr(member, marker)]

    def _set_options(self) -> dict[str, str]:
        """Return, by option that is set, its value and origin."""
        described = {}
        for option, value in self.values.items():
            for path in (
                f"plugin.{self.listed.name}",
                f"plugin.{self.listed.kind}/{self.listed.name}",
            ):
                if origin := self.config_sources.by_path.get(f"{path}.{option}"):
                    described[option] = f"{_words(value)} from {origin}"
        return described


def _is_component(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Component)


def _declared(target: Any, attribute: str) -> type[Options] | type[Arguments] | None:
    """Return a component's `Options` or `Arguments`; hooks have none, whatever they import."""
    return getattr(target, attribute, None) if _is_component(target) else None


def _schema(target: Any, attribute: str) -> dict[str, Any] | None:
    declared = _declared(target, attribute)
    return json_schema(declared) if declared is not None else None


def _field_lines(struct: type[msgspec.Struct], given: Mapping[str, str]) -> list[str]:
    fields = struct_fields(struct)
    if not fields:
        return ["  none"]
    width = max(len(field.name) for field in fields)
    lines = []
    for field in fields:
        lines.append(f"  {field.name:<{width}}  {field.words}; {_standing(field, given)}")
        if field.doc:
            lines.append(f"  {'':<{width}}  {field.doc}")
    return lines


def _standing(field: FieldDoc, given: Mapping[str, str]) -> str:
    if field.name in given:
        return given[field.name]
    return "required" if field.required else f"default {_words(field.default)}"


def _words(value: Any) -> str:
    return "none" if value is None else json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
