"""`hardpoint models`: list the supported models, describe a model, list the cached ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import Command, CommandContext, RequestError

from .hub.cached import list_models, remove_model
from .hub.sizes import size_text
from .tables import print_table

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import (
        ComponentInfo,
        ContextMemory,
        ModelReport,
        PluginCatalog,
        WeightGroup,
    )


_KINDS = {"models": "architecture", "loaders": "format", "quantizations": "quantisation"}
_WIDTH = 14
_DOES_NOT_FIT = 1
_OUTLINE = "outline"
_WEIGHTS = (
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
    *(".onnx", ".npz", ".h5", ".msgpack", ".tflite"),
)
"""Ends of the names of weights in any format, including unreadable ones."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Show, list and remove models."
    # `models MODEL`, the form before `models show MODEL`, works for one version.
    parser.set_defaults(default_command="show")
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    listed = actions.add_parser("list", help="list the models in the cache")
    listed.description = "List the models of the Hugging Face hub that are in the cache."
    listed.add_argument("--json", action="store_true", help="print JSON")
    _configure_show(actions.add_parser("show", help="show the architecture and memory of a model"))
    removed = actions.add_parser("rm", help="remove a model from the cache")
    removed.description = "Remove a model of the Hugging Face hub from the cache."
    removed.add_argument(
        "name", metavar="OWNER/NAME[:QUANT]", help="as `models list` shows it; all without QUANT"
    )


def _configure_show(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without MODEL, print the architectures, file formats and quantization schemes that can be "
        "run. With it, print the model's architecture and the memory it would need as "
        "configured (--set dtype=..., quantization.use=..., max_model_len=...). No weights are "
        f"read. The exit code is {_DOES_NOT_FIT} if the model does not fit into memory."
    )
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="a directory, a .gguf file, an alias or a hub id"
    )
    parser.add_argument(
        "--context",
        type=int,
        action="append",
        default=[],
        metavar="TOKENS",
        help="print the memory of requests of this length; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if options.action == "list":
        return list_models(options)
    if options.action == "rm":
        return remove_model(options, context)
    if getattr(options, "is_default_command", False) and not context.quiet:
        print(
            "hardpoint: `hardpoint models [MODEL]` is now `hardpoint models show [MODEL]`; the old "
            "form goes with the next version",
            file=sys.stderr,
        )
    return _show(options, context)


def _show(options: argparse.Namespace, context: CommandContext) -> int:
    if any(length < 1 for length in options.context):
        raise RequestError(f"--context: expected at least 1, got {min(options.context)}")
    name = options.name
    config, sources = context.load_config(model=name)
    if options.name is None and getattr(options, "model", None) is None:
        if options.context:
            raise RequestError("--context: expected a MODEL before it")
        _print_known(context.load_catalog(config, sources), as_json=options.json)
        return 0
    if config.load.use == "auto" and _lacks_weights(config.model):
        config, sources = context.load_config(f"load.use={_OUTLINE}", model=name)
    report = context.inspect_model(config, sources, options.context)
    if options.json:
        print(json.dumps(_as_json(report), indent=2))
    else:
        _print_report(report)
    return _DOES_NOT_FIT if report.problem else 0


def _lacks_weights(model: str) -> bool:
    folder = Path(model)
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError:
        return False
    return "config.json" in names and not any(name.endswith(_WEIGHTS) for name in names)


def _print_known(catalog: PluginCatalog, *, as_json: bool) -> None:
    components = [info for info in catalog.components() if info.kind in _KINDS]
    about = [_about(catalog, info) for info in components]
    if as_json:
        entries = [
            {
                "kind": info.kind,
                "name": info.name,
                "about": text,
                "distribution": info.distribution,
                "version": info.version,
                "on": info.enabled,
                "why": info.reason,
            }
            for info, text in zip(components, about, strict=True)
        ]
        print(json.dumps(entries, indent=2))
        return
    rows = [
        (
            _KINDS[info.kind],
            info.name,
            info.package,
            "on" if info.enabled else f"off: {info.reason}",
            text,
        )
        for info, text in zip(components, about, strict=True)
    ]
    headers = ("what", "name", "from", "state", "about")
    print_table(headers, rows, dim=[not info.enabled for info in components])


def _about(catalog: PluginCatalog, info: ComponentInfo) -> str:
    if not info.enabled:
        return ""
    details = catalog.details(f"{info.kind}/{info.name}")
    if info.kind != "quantizations":
        return details.summary
    uses = {"quantize": "made while weights are loaded", "read": "read from files"}
    use = ", ".join(text for method, text in uses.items() if method in details.methods)
    return f"{use}: {details.summary}" if use else details.summary


def _as_json(report: ModelReport) -> dict[str, Any]:
    return {**dataclasses.asdict(report), "path": str(report.path), "fits": not report.problem}


def _print_report(report: ModelReport) -> None:
    suffix = f", for each of {report.num_ranks} ranks" if report.num_ranks > 1 else ""
    print(f"{report.model}: {report.architecture} ({report.provider}), {_reading_text(report)}")
    _print_facts(
        {
            "files": [str(report.path)],
            "parameters": [_number_text(report.num_params)],
            "weights": [_weights_text(group) for group in report.weights],
            "vocabulary": [f"{report.vocab_size} tokens"],
            "layers": [_layers_text(report), *_heads_texts(report.heads)],
            "context": [_length_text(report)],
            "computed": [
                f"in {report.dtype} on {report.device}; operations: {report.operations}; "
                f"attention: {report.attention}{_codes_text(report)}",
                *_path_texts(report),
            ],
        }
    )
    print(f"\nmemory{suffix}")
    loading = f", and {size_text(report.loading_bytes)} while it is loaded"
    _print_facts(
        {
            "weights": [f"{size_text(report.weights_bytes)}{loading}"],
            "largest step": [size_text(report.step_bytes)],
            "KV cache": [
                *(_context_text(memory, report) for memory in report.contexts),
                f"{size_text(report.token_bytes)} for a token that all layers see",
            ],
            "available": [f"{size_text(report.available)} ({report.limit})"],
        }
    )
    if report.problem:
        print(f"\nIt does not fit: {report.problem}")
        return
    print(
        f"\nIt fits: with a KV cache of {size_text(report.cache_bytes)}, for requests of up to "
        f"{min(report.longest, report.max_model_len)} tokens."
    )


def _print_facts(facts: dict[str, Sequence[str]]) -> None:
    for name, lines in facts.items():
        for index, line in enumerate(lines):
            print(f"  {'' if index else name:<{_WIDTH}} {line}")


def _weights_text(group: WeightGroup) -> str:
    stored = group.stored or "weights"
    size = "" if group.stored_bytes is None else f", {size_text(group.stored_bytes)} in the files"
    held = "as they are" if group.held == group.stored else f"as {group.held}"
    return (
        f"{group.count} in {stored}{size}; held {held}, {size_text(group.held_bytes)}"
        if group.stored
        else f"{group.count}, held {held}, {size_text(group.held_bytes)}"
    )


def _layers_text(report: ModelReport) -> str:
    counts, states = Counter(report.windows), report.num_state_layers
    if set(counts) <= {None} and not states:
        return str(len(report.windows))
    parts = [
        f"{count} see {'all tokens' if window is None else f'the last {window} tokens'}"
        for window, count in counts.items()
    ]
    parts += [f"{states} keep a state"] if states else []
    return f"{len(report.windows) + states}: {', '.join(parts)}"


def _reading_text(report: ModelReport) -> str:
    if report.loader == _OUTLINE:
        return "described by its config.json and index: the folder has no weights"
    return f"read by {report.loader}"


def _path_texts(report: ModelReport) -> list[str]:
    if report.implementation in ("", report.architecture):
        return []
    return [f"by the plugin {report.implementation}: it has no plugin of its own, or models.use"]


def _heads_texts(heads: Sequence[tuple[int, int, int]]) -> list[str]:
    counts = Counter(heads)
    return [
        f"{'' if len(counts) == 1 else f'{count} with '}{of} heads, {kv} of keys and values, of "
        f"{size} elements"
        for (of, kv, size), count in counts.items()
    ]


def _codes_text(report: ModelReport) -> str:
    if report.cache_dtype == "auto":
        return ""
    return f", keys and values in {report.cache_dtype}"


def _length_text(report: ModelReport) -> str:
    text = f"{report.max_position_embeddings} tokens"
    if report.max_model_len != report.max_position_embeddings:
        text += f", limited to {report.max_model_len} by max_model_len"
    return text


def _context_text(memory: ContextMemory, report: ModelReport) -> str:
    text = f"{size_text(memory.one_request)} for a request of {memory.num_tokens} tokens"
    text += f", {size_text(memory.all_requests)} for {report.max_num_seqs} of them"
    if memory.num_tokens > report.max_model_len:
        return f"{text}; longer than max_model_len, {report.max_model_len}"
    return text if memory.fits or report.problem else f"{text}; one does not fit"


def _number_text(count: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count)


COMMAND = Command("models", "show, list and remove models", _configure, _run)
