"""JSON schemas in the keywords that llguidance enforces.

Unsupported keywords are written with supported ones that describe the same values. The rest is
rejected, with its path, or left out if the request is lenient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cases import Case, Cases
from .facts import Proofs
from .formats import FORMATS
from .names import named, unevaluated, without_escapes
from .patterns import quotable
from .views import SIZES, Made, Schema, View, Views

_IN_CASES = (
    "oneOf",
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "uniqueItems",
    "minProperties",
    "maxProperties",
)
_WITH_OTHERS = ("then", "else", "minContains", "maxContains")  # which one of the former reads
_CASES = frozenset(_IN_CASES)
_JOINING = _CASES | {"allOf", "anyOf", "$ref"}
_REFERENCES = frozenset({"$dynamicRef", "$recursiveRef"})
_NEXT = 1e-9
_NEXT_OF_LARGE = 1e-14  # of the limit: llguidance reads 15 digits
_MAX_DEPTH = 2_100
"""References from one schema to the next; with some thousands, llguidance overflows the stack."""

_MAX_SCHEMAS = 30_000
"""Written for one document."""

LENIENT = (
    "; with `lenient`, the grammar leaves it out, and the finished answer is validated against the "
    "whole schema"
)


_PATTERN = "expected expressions that compile, without look-around and back references"


class SchemaWriter:
    """Writes the schemas of one document."""

    def __init__(
        self,
        root: Schema,
        *,
        lenient: bool = False,
        error_of: Callable[[dict[str, Any]], str] | None = None,
        is_inline: bool = False,
    ) -> None:
        """Write nothing yet.

        Args:
            root: the outermost schema, to which references refer.
            lenient: leave out constraints that cannot be enforced.
            error_of: returns the error of a written schema, to try expressions with; None
                takes each.
            is_inline: write the target of a reference in its place, where it is not alone:
                llguidance cannot join these with a schema that refers to itself.
        """
        self._root, self._lenient, self._error_of = root, lenient, error_of
        self._is_inline = is_inline
        self._inside: set[int] = set()
        self._views = Views(root)
        self._proofs = Proofs(self._views)
        self._cases = Cases(self._proofs)
        self._names: dict[int, str] = {}
        self._pending: list[tuple[Schema, str]] = []
        self._written = 0

    def document(self, schema: Schema | None = None) -> dict[str, Any]:
        """Return a whole schema.

        Args:
            schema: a schema of the document; None is the outermost one.

        Raises:
            ValueError: it cannot be enforced; names path and keyword.
        """
        try:
            return self._document(self._root if schema is None else schema)
        except RecursionError:
            raise ValueError("its schemas nest too deeply") from None

    def _document(self, schema: Schema) -> dict[str, Any]:
        written = self._write(schema, "")
        result = {"allOf": [written]} if isinstance(written, bool) else written
        definitions: dict[str, Any] = {}
        while self._pending:
            target, path = self._pending.pop()
            definitions[self._names[id(target)]] = self._write(target, path)
        if definitions:
            result["$defs"] = definitions
        if _depth(result, definitions) > _MAX_DEPTH:
            raise ValueError("its schemas nest too deeply, through the references from one to next")
        return result

    def _write(
        self, schema: Schema, path: str, *, is_joined: bool = False, is_within: bool = False
    ) -> Any:
        """Return a schema as it is written.

        Args:
            path: where it is, for errors.
            is_joined: whether its values fit another schema in the same place.
            is_within: whether they may fit others, of a schema around it that is joined.
        """
        if isinstance(schema, bool):
            return schema
        view = self._views(schema)
        # A case repeats the expressions and values of schemas.
        self._written += 1 + len(view.get("pattern", "")) // 100 + len(view.get("enum", ())) // 10
        if self._written > _MAX_SCHEMAS:
            raise ValueError(f"{path}: its alternatives need more than {_MAX_SCHEMAS} schemas")
        base, parts, lists = self._split(schema, view, path)
        is_within |= is_joined or bool(view.keys() & _JOINING)
        result: dict[str, Any] = {}
        more: list[Any] = []
        # Where it stands: properties are written in the order of the schema.
        for name in view:
            if name == "allOf" and parts:
                result[name] = [self._write(part, place, is_joined=True) for part, place in parts]
            elif name == "$ref":
                self._add_reference(schema, result, more, is_alone=len(view) == 1 and not is_joined)
            elif name in ("anyOf", "oneOf") and "anyOf" in base:
                is_inner = is_joined or len(view) > 1
                result["anyOf"] = [
                    self._write(part, _joined(path, f"{name}[{index}]"), is_joined=is_inner)
                    for index, part in enumerate(base["anyOf"])
                ]
            elif name in base:
                self._add(name, base, result, path, is_within=is_within)
        if "patternProperties" in base and "patternProperties" not in result:
            result.pop("additionalProperties", None)  # of a lenient request
        more += (*self._texts(result, base), *self._named(result, view, path))
        more += self._combined(base, view, lists, path)
        if more and "allOf" in result:
            return {"allOf": [result, *more]}
        return {**result, "allOf": more} if more else result

    def _split(
        self, schema: Schema, view: View, path: str, outer: Sequence[Schema] = ()
    ) -> tuple[View, list[tuple[Schema, str]], list[list[Case]]]:
        cases = [name for name in _IN_CASES if name in view and not _is_simple(name, view)]
        if view.get("unevaluatedProperties", True) is not True:
            cases += ("anyOf", "oneOf")
        apart = {*cases, *_WITH_OTHERS, *_REFERENCES, "allOf", "unevaluatedProperties"}
        apart.add("propertyNames")
        base = Made((name, value) for name, value in view.items() if name not in apart)
        context: list[Schema] = [*outer, base, *view.get("allOf", ())]
        if "$ref" in view:
            try:
                context.append(self._views.target(schema))
            except ValueError as cause:
                raise ValueError(_joined(path, str(cause))) from None
        lists: list[list[Case]] = []
        for name in dict.fromkeys(name for name in cases if name in view):
            lists += self._cases_of(name, view, context, base, path)
        for name in _REFERENCES & view.keys():
            self._refuse(path, name, "expected $ref")
        parts: list[tuple[Schema, str]] = []
        for index, part in enumerate(view.get("allOf", ())):
            where = _joined(path, f"allOf[{index}]")
            inner = self._views(part) if isinstance(part, Mapping) else Made()
            if inner.keys() & {"$ref", "unevaluatedProperties"} or not inner.keys() & _CASES:
                parts.append((part, where))
                continue
            # Its cases are the cases of the whole, with more that exclude each other.
            rest, more, part_lists = self._split(part, inner, where, (*outer, base))
            parts += [(rest, where), *more]
            lists += part_lists
            if "propertyNames" in inner:
                parts.append((Made(propertyNames=inner["propertyNames"]), where))
        return Made(base), parts, lists  # another object: views of `base` lack a later `anyOf`

    def _cases_of(
        self, name: str, view: View, context: Sequence[Schema], base: View, path: str
    ) -> list[list[Case]]:
        """Return the cases of a keyword; disjoint branches become an `anyOf`."""
        try:
            case_lists = list(self._cases.of(name, view, context))
        except ValueError as cause:
            self._refuse(path, "unevaluatedProperties" if name == "anyOf" else name, str(cause))
            if name == "anyOf" or (name == "oneOf" and "anyOf" not in view):
                base["anyOf"] = view[name]
            return []
        if name == "oneOf" and not view.keys() & {"anyOf", "unevaluatedProperties"}:
            branches = view["oneOf"]
            if [case.schemas for case in case_lists[0]] == [(branch,) for branch in branches]:
                base["anyOf"] = branches
                return []
        return case_lists

    def _combined(self, base: View, view: View, lists: list[list[Case]], path: str) -> list[Any]:
        rest = view.get("unevaluatedProperties", True)
        if not lists and rest is True:
            return []
        try:
            cases = self._cases.product(lists, [base, *view.get("allOf", ())])
        except ValueError as cause:
            names = [name for name in _IN_CASES if name in view] or ["allOf"]
            self._refuse(path, names[0], str(cause))
            return []
        if rest is not True and "additionalProperties" not in view:
            try:
                cases = [
                    Case((*case.schemas, unevaluated(view, case.evaluated, rest, self._views)))
                    for case in cases
                ]
            except ValueError as cause:
                self._refuse(path, "unevaluatedProperties", str(cause))
        written = [
            {"allOf": [self._write(schema, path, is_joined=True) for schema in case.schemas]}
            for case in cases
        ]
        if len(written) == 1:
            return list(written[0]["allOf"])
        return [{"anyOf": written}] if written else [False]

    def _named(self, result: dict[str, Any], view: View, path: str) -> list[Any]:
        try:
            merged = named(result, view, self._proofs)
        except ValueError as cause:
            self._refuse(path, "propertyNames", str(cause))
            merged = []
        for written in (result, *merged) if "propertyNames" in view else ():
            for pattern in written.get("patternProperties", ()):
                if self._is_wrong({"pattern": pattern}):
                    self._refuse(path, "propertyNames", _PATTERN)
        if not self._is_inline:  # the second try, since patterns of schemas that join may overlap
            without_escapes(result)
        if "anyOf" in result and "patternProperties" in result:
            # Side by side, llguidance takes no name that a branch does not list.
            merged.append({"anyOf": result.pop("anyOf")})
        return merged

    def _add(
        self, name: str, view: View, result: dict[str, Any], path: str, *, is_within: bool
    ) -> None:
        value, where = view[name], _joined(path, name)
        match name:
            case "properties" | "patternProperties":
                if name == "properties" or not self._is_refused(name, value, path):
                    spelled = quotable if name == "patternProperties" else str
                    result[name] = {
                        spelled(inner): self._write(part, f"{where}.{inner}", is_within=is_within)
                        for inner, part in value.items()
                    }
            case "prefixItems":
                result[name] = [
                    self._write(part, f"{where}[{index}]", is_within=is_within)
                    for index, part in enumerate(value)
                ]
            case "additionalProperties" | "items":
                result[name] = self._write(value, where, is_within=is_within)
            case "exclusiveMaximum" | "exclusiveMinimum":
                result[name] = _excluded(name, view, is_within=is_within)
            case "format":
                pass  # see _texts
            case _ if not self._is_refused(name, value, path):
                result[name] = quotable(value) if name == "pattern" else value

    def _is_refused(self, name: str, value: Any, path: str) -> bool:
        """Return whether a keyword is left out.

        Raises:
            ValueError: it cannot be enforced, and the request is not lenient.
        """
        expected = ""
        if name in SIZES and not (isinstance(value, int) and value >= 0):
            expected = f"expected a whole number of 0 or more, got {value!r}"
        elif name == "unevaluatedItems" and value is not True:
            expected = "expected items"
        elif name == "pattern" and self._is_wrong({name: value}):
            expected = _PATTERN
        elif name == "patternProperties":
            expected = self._problem_of(value)
        elif name in ("minProperties", "maxProperties") and self._lenient and self._error_of:
            return True  # with which it has not compiled
        if expected:
            self._refuse(path, name, expected)
        return bool(expected)

    def _texts(self, result: dict[str, Any], base: View) -> list[Any]:
        if "format" not in base:
            return []
        every = [f"^(?:{expression})$" for expression in FORMATS[base["format"]].expressions]
        if "pattern" not in result:
            result["pattern"] = every.pop(0)
        return [{"pattern": pattern} for pattern in every]

    def _is_wrong(self, schema: dict[str, Any]) -> bool:
        return self._error_of is not None and bool(self._error_of(schema))

    def _problem_of(self, patterns: Mapping[str, Schema]) -> str:
        if any(self._is_wrong({"pattern": pattern}) for pattern in patterns):
            return _PATTERN
        if self._is_wrong({"patternProperties": dict.fromkeys(patterns, True)}):
            return "expected expressions without a name that matches two"
        return ""

    def _add_reference(
        self, schema: Schema, result: dict[str, Any], more: list[Any], *, is_alone: bool
    ) -> None:
        if is_alone or not self._is_inline or not self._enters(schema):
            result["$ref"] = self._reference(schema)
            return
        target = self._views.target(schema)
        more.append(self._write(target, _place(schema), is_joined=True))
        self._inside.discard(id(target))

    def _enters(self, schema: Schema) -> bool:
        """Return whether the target of a reference is not being written yet; mark it as such."""
        target = id(self._views.target(schema))
        is_new = target not in self._inside
        self._inside.add(target)
        return is_new

    def _reference(self, schema: Schema) -> str:
        target = self._views.target(schema)
        if target is self._root:
            return "#"
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._pending.append((target, _place(schema)))
        return f"#/$defs/{self._names[id(target)]}"

    def _refuse(self, path: str, keyword: str, expected: str) -> None:
        if not self._lenient:
            raise ValueError(f"{_joined(path, keyword)}: {expected}{LENIENT}")


def _depth(document: Mapping[str, Any], definitions: Mapping[str, Any]) -> int:
    """Return the longest way along references; each definition counts where it is first met."""
    deepest, seen = 0, set()
    pending: list[tuple[Any, int]] = [
        ({name: part for name, part in document.items() if name != "$defs"}, 0)
    ]
    while pending:
        part, level = pending.pop()
        deepest = max(deepest, level)
        if isinstance(part, list):
            pending += ((inner, level) for inner in part)
        elif isinstance(part, Mapping):
            pending += ((inner, level) for inner in part.values())
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in definitions and name not in seen:
                seen.add(name)
                pending.append((definitions[name], level + 1))
    return deepest


def _place(schema: Schema) -> str:
    assert isinstance(schema, Mapping)
    reference = str(schema["$ref"])
    return reference.rpartition("#")[2].strip("/").replace("/", ".") or reference


def _is_simple(name: str, view: View) -> bool:
    if name not in ("minProperties", "maxProperties"):
        return False
    count, listed, required = view[name], view.get("properties", {}), view.get("required", ())
    if not isinstance(count, int) or count < 0:
        return True
    is_open = "patternProperties" in view or view.get("additionalProperties") is not False
    if name == "minProperties" and count - len({*required}) > 1 and is_open:
        return False  # a property that is written twice would count as two
    return (count <= 1 and not required) or all(item in required for item in listed)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _excluded(name: str, view: View, *, is_within: bool) -> float:
    """Return a limit that numbers do not reach.

    Between a whole number and one that is less than 1 away, llguidance lets the whole number
    through, too. The neighboring number takes its place there.
    """
    limit: float = view[name]
    above = name == "exclusiveMinimum"
    others = ("maximum", "exclusiveMaximum") if above else ("minimum", "exclusiveMinimum")
    is_near = any(abs(view[other] - limit) < 1 for other in others if other in view)
    if not (is_within or is_near) or not float(limit).is_integer() or view.get("type") == "integer":
        return limit
    step = max(_NEXT, abs(limit) * _NEXT_OF_LARGE)
    return limit + (step if above else -step)
