"""Tokenizers from the files of a model's folder; its code is never run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from hardpoint.builtin_plugins.loaders.files import (
    read_bytes,
    read_json,
    read_text,
    refusing_damage,
    regular_file,
)
from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import short

from .sentencepiece import build_sentencepiece, read_model
from .tiktoken import TIKTOKEN_CLASSES, build_tiktoken, is_tiktoken

__all__ = ["DEFAULT_TEMPLATE", "TokenizerFiles", "read_folder"]

DEFAULT_TEMPLATE = "default"
"""Name of the chat template that has no other name."""

_MAX_GROWTH = 256
_LARGEST_GAP = 4096  # ids without a token before an added one
_VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Files besides tokenizer.json from which there are tokenizers."""

_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")

_SENTENCEPIECE_CLASSES: Mapping[str, tuple[bool, bool]] = {
    "": (True, False),
    "BaichuanTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "InternLM2Tokenizer": (True, False),
    "InternLMTokenizer": (True, False),
    "LlamaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}
"""Classes with ids of SentencePiece: whether they add bos and eos by default."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
        chat_templates: sources by name.
        special: the special tokens for chat templates by name, such as `bos_token`.
        has_types: whether the model reads token types.
    """

    tokenizer: FastTokenizer
    chat_templates: Mapping[str, str]
    special: Mapping[str, str] = field(default_factory=dict)
    has_types: bool = True


def read_folder(path: Path) -> TokenizerFiles:
    """Read a folder with a tokenizer.

    Raises:
        ModelError: a file is missing, damaged or of an unknown kind.
    """
    if not path.is_dir():
        raise ModelError(f"tokenizer: {path} is neither a file nor a directory")
    config_path = path / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    where = f"{path.name}/{config_path.name}"
    special = _special_tokens(path, config, where)
    inputs = config.get("model_input_names")
    has_types = not isinstance(inputs, list) or "token_type_ids" in inputs
    templates = dict(_templates(path, config, where))
    return TokenizerFiles(_fast_tokenizer(path, config, special), templates, special, has_types)


def _special_tokens(path: Path, config: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the special tokens for chat templates that the files name.

    Older folders have them in special_tokens_map.json, which counts first there; it is read where
    transformers reads it.
    """
    stated = {f"{where}: {name}": config.get(name) for name in _TEMPLATE_VARIABLES}
    file = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and file.exists():
        content = read_json(file)
        stated |= {f"{path.name}/{file.name}: {n}": content.get(n) for n in _TEMPLATE_VARIABLES}
    return {
        place.rpartition(" ")[2]: _content(token, place)
        for place, token in stated.items()
        if token is not None
    }


def _templates(path: Path, config: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yield names and sources of chat templates; the last one of a name counts."""
    templates = config.get("chat_template")
    if isinstance(templates, str):
        yield DEFAULT_TEMPLATE, templates
    elif templates is not None and not isinstance(templates, list):
        raise ModelError(
            f"{where}: chat_template: expected a text or a list, got {short(templates)}"
        )
    for index, item in enumerate(templates if isinstance(templates, list) else ()):
        fields = item if isinstance(item, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not (isinstance(name, str) and isinstance(template, str)):
            raise ModelError(
                f"{where}: chat_template[{index}]: expected a name and a template, got "
                f"{short(item)}"
            )
        yield name, template
    if (file := path / "chat_template.jinja").exists():
        yield DEFAULT_TEMPLATE, read_text(file)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        yield file.stem, read_text(file)


def _fast_tokenizer(
    path: Path, config: Mapping[str, Any], special: dict[str, str]
) -> FastTokenizer:
    """Return the tokenizer of a folder; its own special tokens are added to `special`."""
    file = path / "tokenizer.json"
    if file.exists():
        with refusing_damage(f"{path.name}/{file.name} is not readable: it"):
            read = FastTokenizer.from_str(read_text(file))
            _check_growth(read, f"{path.name}/{file.name}")
        return read
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    for file in sorted({*path.glob("*.tiktoken"), *path.glob("*.model")}):
        where = f"{path.name}/{file.name}"
        data = read_bytes(file)
        if is_tiktoken(data):
            return _from_tiktoken(path, config, kind, data, where)
        if kind in _SENTENCEPIECE_CLASSES:
            model = read_model(data, where)
            with refusing_damage(where):
                read = build_sentencepiece(
                    model, prefix_everywhere=config.get("legacy") is not False, where=where
                )
                _check_growth(read, where)
            _add_tokens(read, path, config, ())
            for side, index in (("bos", model.bos), ("eos", model.eos)):
                if 0 <= index < len(model.pieces):
                    special.setdefault(f"{side}_token", model.pieces[index][0])
            _add_around(read, config, special, _SENTENCEPIECE_CLASSES[kind])
            return read
    if "auto_map" in config:
        raise ModelError(
            f"{path.name}/tokenizer_config.json: auto_map: expected no code (a model's folder "
            f"never runs any) but a tokenizer.json, got {short(config['auto_map'])}"
        )
    if not any(file for pattern in _VOCABULARIES for file in path.glob(pattern)):
        raise ModelError(
            f"{path.name}: it has no tokenizer.json, nor another file of a tokenizer "
            f"({', '.join(_VOCABULARIES)}); add the model's tokenizer.json, or set tokenizer.path "
            f"to a directory that has it"
        )
    return _through_transformers(path)


def _from_tiktoken(
    path: Path, config: Mapping[str, Any], kind: str, data: bytes, where: str
) -> FastTokenizer:
    """Return the tokenizer of a file of tiktoken.

    Raises:
        ModelError: the class is not known, or a file is damaged.
    """
    if kind not in TIKTOKEN_CLASSES:
        raise ModelError(
            f"{path.name}/tokenizer_config.json: tokenizer_class: how {where} splits texts is in "
            f"code, which is never run; known are {', '.join(TIKTOKEN_CLASSES)}, got {kind!r}; add "
            f"the model's tokenizer.json"
        )
    known = TIKTOKEN_CLASSES[kind]
    with refusing_damage(where):
        read = build_tiktoken(data, known, where)
    count = read.get_vocab_size()
    reserved = (f"<|reserved_token_{count + index}|>" for index in range(known.reserved))
    _add_tokens(read, path, config, (*known.special, *reserved))
    return read


def _add_tokens(
    tokenizer: FastTokenizer, path: Path, config: Mapping[str, Any], others: tuple[str, ...]
) -> None:
    """Add the tokens that the folder names, and the tokens of its class.

    Raises:
        ModelError: a token cannot have its id.
    """
    end = tokenizer.get_vocab_size()
    added = {end + index: AddedToken(text, special=True) for index, text in enumerate(others)}
    added |= _added_tokens(path, config)
    tokens = []  # with one for each id between that has none
    for index in sorted(added):
        token = added[index]
        if index - end > _LARGEST_GAP:
            raise ModelError(
                f"{path.name}: the added token {token.content!r}: expected an id of at most "
                f"{end + _LARGEST_GAP}, got {index}"
            )
        if tokenizer.token_to_id(token.content) is None:
            names = (f"<|reserved_token_{gap}|>" for gap in range(end, index))
            tokens += [AddedToken(name, special=True) for name in names]
            end = max(end, index) + 1
        tokens.append(token)
    tokenizer.add_tokens(tokens)
    for index, token in added.items():
        if (known := tokenizer.token_to_id(token.content)) != index:
            raise ModelError(
                f"{path.name}: the added token {token.content!r}: expected the id {known}, which "
                f"the vocabulary or another one gives it, got {index}"
            )


def _added_tokens(path: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json and tokenizer_config.json by id.

    Raises:
        ModelError: one is malformed.
    """
    where = f"{path.name}/tokenizer_config.json: added_tokens_decoder"
    file = path / "added_tokens.json"
    stated: list[tuple[str, Any, Any]] = [
        (f"{path.name}/{file.name}", index, {"content": text, "special": False})
        for text, index in (read_json(file) if file.exists() else {}).items()
    ]
    stated += [(where, index, it) for index, it in (config.get(where.split()[-1]) or {}).items()]
    added = {}
    for source, index, token in stated:
        if not str(index).isdecimal():
            raise ModelError(f"{source}: expected an id of a token, got {short(index)}")
        flags = token if isinstance(token, Mapping) else {}
        added[int(index)] = AddedToken(
            _content(token, f"{source}.{index}"),
            special=flags.get("special", True) is True,
            normalized=flags.get("normalized") is True,
            lstrip=flags.get("lstrip") is True,
            rstrip=flags.get("rstrip") is True,
            single_word=flags.get("single_word") is True,
        )
    return added


def _add_around(
    tokenizer: FastTokenizer,
    config: Mapping[str, Any],
    special: Mapping[str, str],
    defaults: tuple[bool, bool],
) -> None:
    """Set the tokens that are added around texts.

    Args:
        special: texts of the tokens by name.
        defaults: whether there is one at the beginning and at the end.
    """
    added = {}
    for side, default in zip(("bos", "eos"), defaults, strict=True):
        token_id = tokenizer.token_to_id(special.get(f"{side}_token", ""))
        if config.get(f"add_{side}_token", default) and token_id is not None:
            added[side] = token_id
    if not added:
        return
    before, after = (["bos"] if "bos" in added else []), (["eos"] if "eos" in added else [])
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{side}:1" for side in before), "$B:1", *after],
        special_tokens=[
            {"id": side, "ids": [index], "tokens": [str(tokenizer.id_to_token(index))]}
            for side, index in added.items()
        ],
    )


def _through_transformers(path: Path) -> FastTokenizer:
    for entry in path.iterdir():
        if not entry.is_dir():
            regular_file(entry, f"{path.name}/{entry.name}")
    # Imported on use: importing transformers takes seconds, and most directories do not need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as cause:  # damaged files can make it raise anything
        raise ModelError(
            f"{path.name}: it has no tokenizer.json, and transformers cannot read its "
            f"tokenizer: {str(cause)[:400]}"
        ) from cause
    if not tokenizer.is_fast:
        raise ModelError(
            f"{path.name}: it has no tokenizer.json, and {type(tokenizer).__name__} has no fast "
            f"form that could give one"
        )
    fast: FastTokenizer = tokenizer.backend_tokenizer
    return fast


def _check_growth(tokenizer: FastTokenizer, where: str) -> None:
    """Refuse replacements that would make a short text as long as memory.

    Raises:
        ModelError: one after the other, they lengthen a text more than `_MAX_GROWTH` times.
    """
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > _MAX_GROWTH:
            raise ModelError(
                f"{where}: {name}: expected replacements that lengthen a text at most "
                f"{_MAX_GROWTH} times, got {growth:g} times"
            )


def _growth(part: Mapping[str, Any]) -> float:
    parts = [*part.get("normalizers", ()), *part.get("decoders", ())]
    growth = math.prod(map(_growth, parts))
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String")
        matched = len(pattern) if pattern else 1  # the length of an expression's match is unknown
        growth *= max(1.0, len(part["content"]) / matched)
    return growth


def _content(token: Any, where: str) -> str:
    """Return the text of a token, which is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise ModelError(f"{where}: expected a string, got {short(token)}")
    return content
