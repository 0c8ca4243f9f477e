"""Logits processors in source files for vLLM, found without importing the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hardpoint.plugins import RequestError

VLLMInterface: TypeAlias = Literal["V0 callable", "factory", "V1 class", "V2 class"]

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class VLLMProcessor:
    """A logits processor of vLLM in a source file.

    Attributes:
        name: name of the class or function.
        form: form of vLLM's interface.
        node: its definition.
        source: text of the file, in lines that end with a newline character.
        tree: syntax tree of the file.
    """

    name: str
    form: VLLMInterface
    node: ast.ClassDef | ast.FunctionDef
    source: str
    tree: ast.Module

    def method(self, name: str) -> ast.FunctionDef | None:
        """Return a method of the class, None if it has none of this name."""
        body = self.node.body if isinstance(self.node, ast.ClassDef) else []
        return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == name), None)

    def num_parameters(self) -> int:
        """Return the number of parameters of the call."""
        call = self.method("__call__") if isinstance(self.node, ast.ClassDef) else self.node
        return len(_parameters(call)) if call is not None else 0

    def extra_args(self) -> dict[str, ast.expr | None]:
        """Return the keys of `extra_args` that the file reads, with their defaults."""
        keys: dict[str, ast.expr | None] = {}
        names = set(_names_of_extra_args(self.tree))
        for node in ast.walk(self.tree):
            match node:
                case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
                    default = None
                case ast.Call(
                    func=ast.Attribute(value=value, attr="get"),
                    args=[ast.Constant(value=str(key)), *rest],
                ):
                    default = rest[0] if rest else None
                case _:
                    continue
            if (isinstance(value, ast.Name) and value.id in names) or _mentions_extra_args(value):
                keys[key] = keys.get(key) or default
        return keys

    def is_argmax_invariant(self) -> bool:
        """Return whether `is_argmax_invariant` returns True as a constant."""
        method = self.method("is_argmax_invariant")
        returns = [n for n in ast.walk(method) if isinstance(n, ast.Return)] if method else []
        return bool(returns) and all(
            isinstance(n.value, ast.Constant) and n.value.value is True for n in returns
        )

    def text(self, node: ast.stmt) -> str:
        """Return the source lines of a statement, decorators included.

        Of a statement that shares a line with others, it is the statement alone.
        """
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = self.source.split("\n")[first - 1 : node.end_lineno]
        before = lines[0].encode()[: node.col_offset].strip()
        after = lines[-1].encode()[node.end_col_offset :].strip()
        if not decorators and (before or after.startswith(b";")):
            return ast.get_source_segment(self.source, node) or ""
        return "\n".join(lines)


def read_processor(reference: str) -> VLLMProcessor:
    """Return the logits processor of `FILE` or `FILE:NAME`.

    Raises:
        RequestError: the file cannot be read, or has none or several.
    """
    path, _, name = reference.partition(":")
    where = f"--from vllm: {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        source = re.sub("\r\n?", "\n", data.decode("utf-8-sig"))  # as the parser reads it
        tree = ast.parse(source)
    except OSError as cause:
        raise RequestError(f"{where}: cannot be read: {cause.strerror}") from cause
    except SyntaxError as cause:
        raise RequestError(f"{where}, line {cause.lineno}: {cause.msg}") from cause
    except (ValueError, RecursionError, MemoryError) as cause:
        raise RequestError(f"{where}: expected Python source in UTF-8: {cause}") from cause
    if len(data) > _MAX_BYTES:
        raise RequestError(f"{where}: expected at most {_MAX_BYTES} bytes, got more")
    processors = [
        VLLMProcessor(node.name, form, node, source, tree) for node, form in _definitions(tree)
    ]
    matches = [item for item in processors if name in ("", item.name)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(item.name for item in processors)
    if not matches:
        raise RequestError(
            f"{where}: expected a logits processor of vLLM{f' called {name!r}' if name else ''} (a "
            f"class with apply, or a function of output ids and logits), got {names or 'none'}"
        )
    raise RequestError(f"{where}: expected FILE:NAME, because the file has several: {names}")


def _names_of_extra_args(tree: ast.Module) -> Iterator[str]:
    """Yield the names of variables that hold `extra_args`: `args = params.extra_args or {}`."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                is_mapping = not any(
                    isinstance(part, ast.Subscript | ast.Call) for part in ast.walk(value)
                )
                if is_mapping and _mentions_extra_args(value):
                    yield name


def _mentions_extra_args(node: ast.expr) -> bool:
    """Return whether a name or a text in an expression has `extra_args` in it."""
    return any(
        "extra_args" in text
        for part in ast.walk(node)
        for text in (getattr(part, field, None) for field in ("id", "attr", "value"))
        if isinstance(text, str)
    )


def _definitions(
    tree: ast.Module,
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, VLLMInterface]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            form = _class_form(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            form = _function_form(node)
        else:
            continue
        if form is not None:
            yield node, form


def _class_form(node: ast.ClassDef) -> VLLMInterface | None:
    methods = {n.name: _parameters(n)[1:] for n in node.body if isinstance(n, ast.FunctionDef)}
    if "apply" in methods and "update_state" in methods:
        return "V1 class"
    if len(methods.get("apply", ())) == 2:
        return "V2 class"
    return "V0 callable" if _takes_ids(methods.get("__call__", [])) else None


def _function_form(node: ast.FunctionDef) -> VLLMInterface | None:
    names = _parameters(node)
    if _takes_ids(names):
        return "V0 callable"
    has_params = len(names) == 1 and any(
        isinstance(n, ast.Attribute) and n.attr == "extra_args" for n in ast.walk(node)
    )
    return "factory" if has_params else None


def _takes_ids(names: list[str]) -> bool:
    return len(names) in (2, 3) and names[-1] in ("logits", "scores", "logit")


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
