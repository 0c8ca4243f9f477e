"""`hardpoint plugins new`: a package that works at once, and its updates."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from hardpoint.plugins import CommandContext, RequestError

from .names import PackageSpec, check_kind, check_name
from .project import FileUpdate, check_new_folder, make, plan_update, read_spec, update
from .templates import Templates
from .vllm_port import package_name, ported_sections
from .vllm_source import VLLMProcessor, read_processor

_CONFLICTS = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds = Templates().kinds()
    parser.usage = (
        "%(prog)s [options] KIND NAME\n       %(prog)s --from vllm FILE [NAME] [options]\n"
        "       %(prog)s --update [options]"
    )
    parser.description = (
        "Make a package with a plugin that works at once: its class, a test of the conformance "
        "kit, pyproject.toml, README and a workflow for CI. With --update, bring a package that "
        "was made so to the newest templates: changes of yours stay, and where both have changed "
        f"the same lines, both stand between markers, and the exit code is {_CONFLICTS}."
    )
    parser.add_argument(
        "kind", nargs="?", metavar="KIND", help=f"kind of the plugin: {', '.join(kinds)}"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the package, such as acme-top-a"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="the package's folder; by default NAME, or the current one for --update",
    )
    parser.add_argument(
        "--from",
        choices=("vllm",),
        dest="engine",
        help="port the logits processor of FILE, or FILE:CLASS, to the native form; TODOs mark "
        "the author's decisions",
    )
    parser.add_argument(
        "--update", action="store_true", help="update the package in FOLDER to the newest templates"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the files that would be written"
    )


def run(options: argparse.Namespace, context: CommandContext) -> int:
    """Make or update a package; return the exit code."""
    templates = Templates()
    if options.update:
        if options.engine is not None:
            raise RequestError("--from: expected no --update, got both")
        if options.kind is not None:
            raise RequestError(
                f"--update: expected no KIND and NAME, which the package states, got "
                f"{options.kind!r}"
            )
        return _update(options.into or Path(), templates, is_dry=options.dry_run)
    processor = _original(options) if options.engine is not None else None
    if options.name is None:
        raise RequestError("expected KIND and NAME, or --update")
    check_kind(options.kind, templates.kinds())
    spec = PackageSpec(version=templates.newest, kind=options.kind, name=options.name)
    config, sources = context.load_config()
    check_name(spec, context.load_catalog(config, sources).components())
    folder = options.into or Path(options.name)
    check_new_folder(folder)
    sections = ported_sections(processor, spec) if processor is not None else None
    files = templates.render(spec, sections)
    if not options.dry_run:
        make(folder, files)
    for path in sorted(files):
        print(folder / path)
    if not options.dry_run:
        _print_next(folder, spec)
    return 0


def _original(options: argparse.Namespace) -> VLLMProcessor:
    """Return the logits processor to port; set kind and name of its package."""
    if options.kind is None:
        raise RequestError("--from vllm: expected FILE, got none")
    processor = read_processor(options.kind)
    options.kind = "logits_processors"
    options.name = options.name or package_name(processor)
    return processor


def _print_next(folder: Path, spec: PackageSpec) -> None:
    print(f"\nThe class is {spec.class_name}, in src/{spec.module}/__init__.py. Next:\n")
    if folder != Path():
        print(f"  cd {shlex.quote(str(folder))}")
    print('  pip install -e ".[test]"')
    print("  pytest")
    print(f"  hardpoint plugins show {spec.kind}/{spec.module}")


def _update(folder: Path, templates: Templates, *, is_dry: bool) -> int:
    spec = read_spec(folder, templates)
    changes = plan_update(folder, spec, templates)
    if spec.version == templates.newest:
        print(f"{folder} has the newest templates, version {spec.version}.")
        return 0
    if not is_dry:
        update(folder, changes)
    _print_changes(folder, changes)
    conflicts = sum(change.conflicts for change in changes.values())
    print(f"\nTemplates: version {spec.version} to {templates.newest}; {conflicts} conflicts.")
    return _CONFLICTS if conflicts else 0


def _print_changes(folder: Path, changes: Mapping[str, FileUpdate]) -> None:
    for path, change in changes.items():
        if change.what != "unchanged":
            print(f"{folder / path}: {change.what}")
