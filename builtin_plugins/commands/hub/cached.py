"""`hardpoint models list` and `models rm`: the models of the Hugging Face hub in the cache."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hardpoint.builtin_plugins.commands.tables import print_table
from hardpoint.plugins import CommandContext, RequestError
from hardpoint.toolkit.hub import HubName, check_hub_settings, quantization_of
from hardpoint.typed import suggest

from .pull import parse_name
from .sizes import size_text

if TYPE_CHECKING:
    from huggingface_hub.utils import HFCacheInfo

__all__ = ["list_models", "remove_model"]


class _CachedModel(NamedTuple):
    """A model in the cache.

    Attributes:
        files: its files, by their paths in the snapshots.
        blobs: their content.
    """

    name: HubName
    files: list[Path]
    blobs: list[Path]
    size: int


def list_models(options: argparse.Namespace) -> int:
    """Print the models in the cache."""
    models = list(_models(_scanned()))
    if options.json:
        entries = [
            {"name": str(model.name), "bytes": model.size, "files": [str(f) for f in model.files]}
            for model in models
        ]
        print(json.dumps(entries, indent=2))
        return 0
    if not models:
        print("No model is in the cache; hardpoint pull OWNER/NAME downloads one.")
        return 0
    rows = [
        (str(model.name), size_text(model.size), str(len(model.files)), str(_place(model)))
        for model in models
    ]
    print_table(("name", "size", "files", "path"), rows)
    return 0


def remove_model(options: argparse.Namespace, context: CommandContext) -> int:
    """Remove a model from the cache.

    Raises:
        RequestError: it is not there.
    """
    name = parse_name(options.name)
    cache = _scanned()
    models = [model for model in _models(cache) if model.name.repo == name.repo]
    if name.quantization is not None:
        wanted = name._replace(quantization=name.quantization.upper())
        chosen = [model for model in models if model.name == wanted]
    else:
        chosen = models
    if cache is None or not chosen:
        known = [str(model.name) for model in _models(cache)]
        raise RequestError(f"{name} is not in the cache{suggest(str(name), known)}")
    size = sum(model.size for model in chosen)
    if len(chosen) == len(models):
        # Two repositories may have revisions of the same hash.
        repos = {
            repo for repo in cache.repos if (repo.repo_type, repo.repo_id) == ("model", name.repo)
        }
        model_cache = dataclasses.replace(cache, repos=frozenset(repos))
        hashes = [revision.commit_hash for repo in repos for revision in repo.revisions]
        model_cache.delete_revisions(*hashes).execute()
    else:
        shared_blobs = {blob for model in models if model not in chosen for blob in model.blobs}
        for model in chosen:
            for path in (*model.files, *(blob for blob in model.blobs if blob not in shared_blobs)):
                path.unlink(missing_ok=True)
    if not context.quiet:
        print(f"Removed {name}, {size_text(size)}.")
    return 0


def _scanned() -> HFCacheInfo | None:
    """Return the content of the cache; None if there is no cache."""
    check_hub_settings()
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _models(cache: HFCacheInfo | None) -> Iterator[_CachedModel]:
    """Yield the models in the order of their names; each quantization of a repository is one."""
    if cache is None:
        return
    repos = [repo for repo in cache.repos if repo.repo_type == "model"]
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        by_name: dict[HubName, dict[Path, tuple[Path, int]]] = {}
        for revision in repo.revisions:
            for file in revision.files:
                is_gguf = file.file_name.endswith(".gguf")
                kind = quantization_of(file.file_name) if is_gguf else None
                files = by_name.setdefault(HubName(repo.repo_id, kind), {})
                files[file.file_path] = file.blob_path, file.size_on_disk
        for name in sorted(by_name, key=str):
            files = by_name[name]
            blobs = dict(files.values())
            yield _CachedModel(name, sorted(files), sorted(blobs), sum(blobs.values()))


def _place(model: _CachedModel) -> Path:
    """Return the GGUF file, or the folder of the files."""
    return model.files[0] if model.name.quantization else model.files[0].parent
