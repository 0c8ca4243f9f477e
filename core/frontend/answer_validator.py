"""Validates finished answers of `lenient` requests, by the grammar backends that left parts out.

Request states call it once per answer; what JSON schemas mean is the backends' to know.
"""

from __future__ import annotations

from hardpoint.plugins.config import GrammarConfig
from hardpoint.plugins.errors import shown
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet

_CANNOT = "the answer cannot be validated"


class AnswerValidator:
    """Asks the backend of a request, or the default one where that validates no answers."""

    def __init__(self, plugins: PluginSet, use: str) -> None:
        """`use` names the backend of requests that name none."""
        self._plugins, self._use = plugins, use

    def use_plugins(self, plugins: PluginSet) -> None:
        """Take the backends of another generation of the plugins."""
        self._plugins = plugins

    def error(self, structured: StructuredOutputs, answer: str) -> str | None:
        """Return what is wrong with an answer that is to be JSON of a schema; None if nothing is.

        What a backend does wrong is named in the text: the answer itself is there.
        """
        own = structured.backend or self._use
        for name in dict.fromkeys((own, GrammarConfig().use)):
            entry = self._plugins.find("grammars", name)
            if entry is None:
                continue
            try:
                found = self._plugins.target(entry).validate(structured, answer)
            except NotImplementedError:
                continue
            except BaseException as cause:
                raise_unless_fault(cause)
                return f"{_CANNOT}: {entry.source}: its validate failed: {describe(cause)}"
            if found is not None and not isinstance(found, str):
                return (
                    f"{_CANNOT}: {entry.source}: its validate returned {shown(found)}, expected "
                    f"text or None"
                )
            return found
        return f"{_CANNOT}: the grammar backend {own!r} has no `validate`"
