"""Validation of finished answers against their whole JSON schema, for the grammar backends.

A grammar leaves out constraints that its library cannot enforce if a request is `lenient`. The
frontend checks here, through the backend's `validate`, whether the answer keeps to them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from hardpoint.errors import shown

from .schemas.formats import FORMATS
from .schemas.values import canonical

_VALIDATION_SECONDS = 0.25
"""Of CPU time for one answer: other outputs wait for it, and a schema may be hostile."""

_MAX_PATTERN = 1000
_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def validation_error(schema: dict[str, Any] | bool, answer: str) -> str | None:
    """Return the first error of an answer that is to be JSON of a schema; None without one."""
    import jsonschema  # noqa: PLC0415 - takes time, and few requests need it
    import regex  # noqa: F401, PLC0415 - here, so that the time limit does not include it
    from referencing import Registry  # noqa: PLC0415

    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as cause:
        return f"the answer is not JSON: {cause}"
    # As grammars read it: in the draft that it names.
    base = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    keywords = _Keywords(time.thread_time() + _VALIDATION_SECONDS)
    replaced = {name: check for name, check in keywords.replaced.items() if name in base.VALIDATORS}
    checks = {**base.VALIDATORS, **replaced}
    counted = {name: keywords.timed(check) for name, check in checks.items()}
    try:
        # A registry without documents: it opens no files and no connections.
        validator = jsonschema.validators.extend(base, counted)(schema, registry=Registry())
        wrong = next(validator.iter_errors(value), None)
    except Exception as cause:  # of the schema: references to nothing, expressions, recursion
        described = f"{type(cause).__name__}: {cause}"
        return f"the answer cannot be validated: {' '.join(described.split())[:300]}"
    return None if wrong is None else f"{wrong.json_path}: {shown(wrong.message, 300)}"


class _Keywords:
    """Checks of keywords for which the library may need any time, with a limit of it."""

    def __init__(self, end: float) -> None:
        """`end` is in seconds of the thread's CPU time."""
        self._end = end
        self._sets: dict[int, set[str]] = {}  # of the values of an enum, by its id
        self.replaced: dict[str, Callable[..., Any]] = {
            "additionalProperties": self._additional_properties,
            "enum": self._enum,
            "format": self._format,
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "unevaluatedProperties": self._unevaluated_properties,
            "uniqueItems": self._unique_items,
        }

    def timed(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._left()
            return check(*arguments)

        return timed

    def _left(self) -> float:
        left = self._end - time.thread_time()
        if left <= 0:
            raise TimeoutError(f"it takes more than {_VALIDATION_SECONDS:g} s")
        return left

    def _matches(self, pattern: str, text: str) -> bool:
        import regex  # noqa: PLC0415 - as above

        size = len(pattern)
        for least, limit in _REPEATS.findall(pattern):  # which compiling multiplies
            size *= max(int(limit or least), 1)
        if size > _MAX_PATTERN:
            raise ValueError(f"too long, or with too many repetitions: {shown(pattern, 80)}")
        return regex.search(pattern, text, timeout=self._left()) is not None

    def _pattern(self, validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG002
        if isinstance(value, str) and not self._matches(pattern, value):
            yield _wrong(f"{value!r} does not match {pattern!r}")

    def _pattern_properties(
        self,
        validator: Any,
        patterns: Any,
        value: Any,
        schema: Any,  # noqa: ARG002
    ) -> Iterator[Any]:
        for pattern, inner in patterns.items() if isinstance(value, dict) else ():
            for name, item in value.items():
                if self._matches(pattern, name):
                    yield from validator.descend(item, inner, path=name, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, additional: Any, value: Any, schema: Any
    ) -> Iterator[Any]:
        patterns = schema.get("patternProperties", ())
        for name, item in value.items() if isinstance(value, dict) else ():
            known = schema.get("properties", ())
            if name in known or any(self._matches(pattern, name) for pattern in patterns):
                continue
            if additional is False:
                yield _wrong(f"the property {name!r} is not allowed")
            else:
                yield from validator.descend(item, additional, path=name)

    def _unevaluated_properties(
        self, validator: Any, unevaluated: Any, value: Any, schema: Any
    ) -> Iterator[Any]:
        from jsonschema import Draft202012Validator  # noqa: PLC0415

        if _has_key(schema, "patternProperties"):  # which the library matches without a limit
            raise ValueError("unevaluatedProperties together with patternProperties")
        check = Draft202012Validator.VALIDATORS["unevaluatedProperties"]
        yield from check(validator, unevaluated, value, schema) or ()

    def _enum(self, validator: Any, values: Any, value: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG002
        if id(values) not in self._sets:
            self._sets[id(values)] = set(map(canonical, values))
        if canonical(value) not in self._sets[id(values)]:
            yield _wrong(f"{value!r} is none of the values of the enum")

    def _format(self, validator: Any, name: Any, value: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG002
        """Check a format that grammars enforce; any other format is an annotation."""
        import regex  # noqa: PLC0415 - as above

        known = FORMATS.get(name) if isinstance(name, str) and isinstance(value, str) else None
        for expression in known.expressions if known else ():
            if not regex.fullmatch(expression, value, timeout=self._left()):
                yield _wrong(f"{value!r} is not a {name!r}")
                return

    def _unique_items(
        self,
        validator: Any,  # noqa: ARG002
        unique: Any,
        value: Any,
        schema: Any,  # noqa: ARG002
    ) -> Iterator[Any]:
        if unique and isinstance(value, list) and len(set(map(canonical, value))) < len(value):
            yield _wrong(f"{value!r} has equal items")


def _wrong(message: str) -> Any:
    from jsonschema import ValidationError  # noqa: PLC0415

    return ValidationError(message)


def _has_key(value: Any, key: str) -> bool:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if key in part:
                return True
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return False
