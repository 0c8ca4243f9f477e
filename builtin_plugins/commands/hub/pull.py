"""`hardpoint pull`: download a model of the Hugging Face hub, and check it."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.plugins import Command, CommandContext, HardpointError, RequestError
from hardpoint.toolkit.hub import HubName, check_hub_settings, fetch_files, hub_name, select_files

from .sizes import size_text

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Download a model of the Hugging Face hub into its cache, and check its files by their "
        "SHA-256. Files that are complete are not downloaded again, so that an interrupted pull "
        "resumes. HF_ENDPOINT, HF_TOKEN and HF_HOME mean the same as for huggingface_hub."
    )
    parser.add_argument(
        "name",
        metavar="OWNER/NAME[:QUANT]",
        help="a model of the hub; with QUANT, such as Q4_K_M, its GGUF file of that quantization",
    )


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    name = parse_name(options.name)
    check_hub_settings()
    with _progress_bars(is_shown=not context.quiet):
        info = _described(name)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = select_files(name, sizes)
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        _report(context, f"{name}: {count}, {size_text(sum(sizes[file] for file in files))}")
        try:
            path = fetch_files(name)
        except HardpointError:
            raise
        except Exception as cause:
            raise HardpointError(
                f"{name}: the download failed: {_first_line(cause)}; the same command goes on "
                "with the files that are missing"
            ) from cause
        folder = path if path.is_dir() else _folder_of(path, files)
        _verify(folder, [file for file in info.siblings or () if file.rfilename in files])
    _report(context, f"Checked {count}. Run it: hardpoint chat --model {name}")
    print(path)
    return 0


def parse_name(text: str) -> HubName:
    """Return a name of the command line.

    Raises:
        RequestError: it is malformed.
    """
    name = hub_name(text)
    if name is None:
        raise RequestError(f"expected OWNER/NAME or OWNER/NAME:QUANT, got {text!r}")
    return name


def _described(name: HubName) -> ModelInfo:
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import, one command needs it

    try:
        return HfApi().model_info(name.repo, files_metadata=True)
    except Exception as cause:
        raise HardpointError(
            f"{name}: the Hugging Face hub did not describe it: {_first_line(cause)}"
        ) from cause


def _verify(folder: Path, files: list[RepoSibling]) -> None:
    """Check files by the SHA-256 of the hub; remove a file that differs.

    Raises:
        HardpointError: one differs.
    """
    for file in files:
        path = folder / file.rfilename
        if file.lfs is None:
            continue
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != file.lfs.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise HardpointError(
                f"{file.rfilename}: expected the SHA-256 {file.lfs.sha256}, got "
                f"{digest}; the file is removed, and the same command downloads it "
                "again"
            )


def _folder_of(path: Path, files: list[str]) -> Path:
    """Return the snapshot folder that contains a path."""
    depth = next(file for file in files if path.as_posix().endswith(file)).count("/")
    return path.parents[depth]


class _progress_bars:  # noqa: N801 - a context manager
    """A context in which huggingface_hub shows progress bars, or none."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown

    def __enter__(self) -> None:
        from huggingface_hub import utils  # noqa: PLC0415 - as above

        self._before = utils.are_progress_bars_disabled()
        if not self._is_shown:
            utils.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        from huggingface_hub import utils  # noqa: PLC0415 - as above

        if not self._is_shown and not self._before:
            utils.enable_progress_bars()


def _report(context: CommandContext, text: str) -> None:
    if not context.quiet:
        print(text, file=sys.stderr)


def _first_line(cause: Exception) -> str:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else repr(cause)


COMMAND = Command("pull", "download a model of the Hugging Face hub", _configure, _run)
