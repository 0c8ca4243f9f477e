"""Small random models that read texts in pairs, and folders of cross-encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hardpoint.testing import write_scripted_model

from .encoders import FAMILIES, LIMIT, SIZES

SEPARATOR = {"Roberta": "<eos> <eos>", "XLMRoberta": "<eos> <eos>"}
"""What stands between the texts of a pair, where it is not one token."""

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")

PAIRS = [
    ("a", "b"),
    ("which one?", "this one"),
    ("a longer question", "x"),
    ("q", "an answer of some length"),
    ("x" * 17, "y" * (LIMIT - 17 - 4)),
]
TOO_LONG = ("a question " * 3, "an answer that goes on " * 4)


def write_tokenizer(folder: Path, family: str) -> None:
    """Write a tokenizer of bytes that puts special tokens around texts as a family does."""
    write_scripted_model(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    eos = next(token["id"] for token in content["added_tokens"] if token["content"] == "<eos>")
    if family not in DECODERS:
        second = "$B:1 <eos>:1" if family in ("Bert", "ModernBert") else "$B <eos>"
        single = ["<eos>", "$A", "<eos>"]
        pair = f"<eos> $A {SEPARATOR.get(family, '<eos>')} {second}".split()
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": list(map(_piece, single)),
            "pair": list(map(_piece, pair)),
            "special_tokens": {"<eos>": {"id": "<eos>", "ids": [eos], "tokens": ["<eos>"]}},
        }
    path.write_text(json.dumps(content))
    inputs = ["input_ids", "attention_mask"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "model_input_names": [*inputs, *(["token_type_ids"] if family == "Bert" else [])],
        "model_max_length": LIMIT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_classifier(folder: Path, family: str, classes: int = 1, **fields: Any) -> Any:
    """Write a random model with a head and its tokenizer; return the transformers model."""
    import transformers

    torch.manual_seed(7)
    sizes = {"pad_token_id": 256, "num_labels": classes}
    if family in DECODERS:
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": LIMIT}
        sizes |= {"head_dim": 16} if family != "Qwen2" else {}
        sizes |= {"sliding_window": None} if family == "Mistral" else {}
    else:
        sizes |= FAMILIES[family] | {"pad_token_id": 256}
        if family.endswith("Roberta"):  # whose positions begin after that of padding
            sizes |= {"pad_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes | fields)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    write_tokenizer(folder, family)
    model.save_pretrained(folder)
    return model


def write_cross_encoder(folder: Path, family: str, classes: int = 1, **fields: Any) -> Any:
    """Write a folder of a CrossEncoder, `model`; return the sentence-transformers model."""
    from sentence_transformers import CrossEncoder

    write_classifier(folder / "plain", family, classes)
    made = CrossEncoder(str(folder / "plain"), device="cpu", **fields)
    made.save_pretrained(str(folder / "model"), create_model_card=False)
    return made


def change(path: Path, **fields: Any) -> None:
    """Change fields of a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _piece(text: str) -> dict[str, Any]:
    name, _, kind = text.partition(":")
    entry = {"id": name.removeprefix("$"), "type_id": int(kind or 0)}
    return {"Sequence": entry} if name.startswith("$") else {"SpecialToken": entry | {"id": name}}
