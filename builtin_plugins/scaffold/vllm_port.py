"""Port of a vLLM logits processor to the native form; TODOs mark the author's decisions."""

from __future__ import annotations

import ast
import keyword
import math
import re
import textwrap
from collections.abc import Mapping

from .names import PackageSpec
from .vllm_source import VLLMProcessor

_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


def package_name(processor: VLLMProcessor) -> str:
    """Return the name of the package of a port: `acme-top-a` of `AcmeTopA`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", processor.name)
    return name.replace("_", "-").strip("-").lower()


def ported_sections(processor: VLLMProcessor, spec: PackageSpec) -> Mapping[str, str]:
    """Return the sections of a package's template that have the port: source, tests, config."""
    keys = ", ".join(f"{key} = ..." for key in _fields(processor))
    config = (
        f'[plugins]\nenable = ["{spec.module}"] '
        f"# requests use it by plugin_args = {{ {spec.module} = {{ {keys} }} }}"
    )
    return {
        "source": _module(processor, spec),
        "tests": _test(processor, spec),
        "config": config,
    }


def _module(processor: VLLMProcessor, spec: PackageSpec) -> str:
    imports, rest = _rest_of(processor)
    if processor.form == "V0 callable":
        name = _call_name(processor, spec)
        rest = [re.sub(rf"\b{processor.name}\b", name, text) for text in rest]
    phase = "PENALTY" if processor.form == "V2 class" else "BIAS"
    if processor.is_argmax_invariant():
        phase = "TRUNCATE"
    parts = [
        f'"""A logits processor for Hardpoint, ported from the {processor.form} '
        f'{processor.name} of vLLM."""',
        "from __future__ import annotations",
        "\n".join(
            dict.fromkeys(
                [
                    *imports,
                    "import torch",
                    "",
                    "from hardpoint import plugins",
                    "from hardpoint.plugins import LogitsProcessor, Phase, PrepareContext, Rows",
                ]
            )
        ),
        *rest,
        "\n".join(
            [
                "",
                f"class {spec.class_name}(LogitsProcessor):",
                f'    """{_summary(processor)}"""',
                "",
                "    contract = 1",
                f"    phase = Phase.{phase}  # TODO: the place among other processors",
                f"    argmax_invariant = {processor.is_argmax_invariant()}",
                "",
                *_arguments(processor),
                "",
                *(
                    _call(processor, _call_name(processor, spec))
                    if processor.form == "V0 callable"
                    else _methods(processor)
                ),
            ]
        ),
    ]
    return "\n\n".join(parts)


def _call_name(processor: VLLMProcessor, spec: PackageSpec) -> str:
    """Return the name of the original in the new module, where the class may have its name."""
    return f"{processor.name}Call" if processor.name == spec.class_name else processor.name


def _rest_of(processor: VLLMProcessor) -> tuple[list[str], list[str]]:
    """Return the imports of the file and its other definitions; imports of vLLM are comments."""
    imports: list[str] = []
    rest: list[str] = []
    for node in processor.tree.body:
        text = processor.text(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = node.module if isinstance(node, ast.ImportFrom) else names[0]
            if module == "__future__":
                continue
            is_vllm = (module or "").partition(".")[0] == "vllm" or "vllm" in names
            imports += _comment(text, "# TODO: ") if is_vllm else [text]
        elif node is not processor.node:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            rest += [] if is_docstring else [text]
        elif processor.form == "V0 callable":
            rest.append(f"\n{text}")
    return imports, rest


def _summary(processor: VLLMProcessor) -> str:
    text = (ast.get_docstring(processor.node) or "TODO: describe the processor.").splitlines()[0]
    return text.replace("\\", "\\\\").replace('"', "'")


def _fields(processor: VLLMProcessor) -> dict[str, ast.expr | None]:
    """Return the keys of `extra_args` that can be fields, with their defaults."""
    return {key: default for key, default in processor.extra_args().items() if _is_field(key)}


def _is_field(key: str) -> bool:
    """Return whether a key can be a field, which hides a type of its name from other fields."""
    return key.isidentifier() and not keyword.iskeyword(key) and key not in _TYPES.values()


def _arguments(processor: VLLMProcessor) -> list[str]:
    lines = [
        "    class Arguments(plugins.Arguments):",
        '        """Arguments of a request, which were `extra_args`."""',
    ]
    keys = processor.extra_args()
    for key, default in sorted(_fields(processor).items(), key=lambda item: item[1] is not None):
        value = default.value if isinstance(default, ast.Constant) else None
        if type(value) in _TYPES and value != math.inf:  # which has no literal
            lines.append(f"        {key}: {_TYPES[type(value)]} = {value!r}  # TODO: limits")
        else:
            optional = " | None = None" if default is not None else ""
            lines.append(f"        {key}: float{optional}  # TODO: the type")
    lines += [
        f"        # TODO: a field with another name for the key {key!r}"
        for key in keys
        if not _is_field(key)
    ]
    return [lines[0], lines[1], *([""] if keys else []), *lines[2:]]


def _call(processor: VLLMProcessor, name: str) -> list[str]:
    is_class = isinstance(processor.node, ast.ClassDef)
    num_parameters = processor.num_parameters() - is_class
    call = f"{name}()" if is_class else name
    prompt = "list(request.prompt_token_ids), " if num_parameters == 3 else ""
    note = ["        # TODO: pass the arguments of its constructor"] if is_class else []
    return [
        "    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:",
        '        """Return the new logits, float32 [rows, vocab], of the requests that use it."""',
        "        # TODO: compute all rows at once, with rows.tensor(...); a loop is slow.",
        *note,
        "        changed = logits.clone()",
        "        for row, request in enumerate(rows.requests):",
        "            output_token_ids = list(request.output_token_ids)",
        f"            changed[row] = {call}({prompt}output_token_ids, logits[row].clone())",
        "        return changed",
    ]


def _methods(processor: VLLMProcessor) -> list[str]:
    names = ("validate_params", "__init__", "add_request", "update_state", "apply")
    originals = {name: processor.method(name) for name in names}
    lines = [
        "    @classmethod",
        "    def prepare(cls, arguments: Arguments, context: PrepareContext) -> Arguments:",
        '        """Check the arguments of a request; a ValueError rejects it."""',
        *_original(processor, originals["validate_params"], "raise ValueError for wrong arguments"),
        "        return arguments",
        "",
        "    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:",
        '        """Return the new logits, float32 [rows, vocab], of the requests that use it."""',
    ]
    notes = {
        "__init__": "there is no state of the batch: rows.tensor(name) is a column of arguments",
        "add_request": "rows belong to the requests that use it; no index is needed",
        "update_state": "rows belong to the requests that use it; no update is needed",
        "apply": "return new logits; row i of logits is row i of rows",
    }
    for name, note in notes.items():
        if (method := originals[name]) is not None:
            lines += _original(processor, method, note)
    if isinstance(processor.node, ast.FunctionDef):
        note = "the callable of each request; its ids are rows.requests[i].output_token_ids"
        lines += _original(processor, processor.node, note)
    others = [
        node
        for node in (processor.node.body if isinstance(processor.node, ast.ClassDef) else [])
        if isinstance(node, ast.FunctionDef) and node.name not in {*names, "is_argmax_invariant"}
    ]
    for node in others:
        lines += _original(processor, node, f"what used {node.name}")
    lines.append(f'        raise NotImplementedError("TODO: port {processor.name}.apply")')
    return lines


def _original(processor: VLLMProcessor, node: ast.stmt | None, note: str) -> list[str]:
    lines = [f"        # TODO: {note}."]
    if node is None:
        return lines
    text = textwrap.dedent(processor.text(node))
    return [*lines, *(f"        {line}" for line in _comment(text, "#     "))]


def _comment(text: str, prefix: str) -> list[str]:
    return [f"{prefix}{line}".rstrip() for line in text.splitlines()]


def _test(processor: VLLMProcessor, spec: PackageSpec) -> str:
    name = spec.class_name
    todo = ["    # TODO: values that requests give, such as token=st.integers(0, 130)"]
    return "\n".join(
        [
            '"""The plugin keeps every rule of its kind: the conformance kit checks it."""',
            "",
            f"from {spec.module} import {name}",
            "from hypothesis import strategies as st",
            "",
            "from hardpoint.testing import LogitsProcessorSuite",
            "",
            'pytest_plugins = ["hardpoint.testing"]',
            "",
            "",
            f"class Test{name}(LogitsProcessorSuite):",
            f"    processor = {name}",
            *(todo if _fields(processor) else []),
            f"    arguments = st.builds({name}.Arguments)",
        ]
    )
