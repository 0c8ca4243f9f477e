"""A tiny random model of an architecture: which way it runs, and whether as transformers computes.

A folder with its config.json alone shows what is refused before weights are read. With weights,
logits in float32 are compared with those of transformers: alone, and in chunks beside another
prompt. Then an engine generates the tokens of `generate`, of two requests in one batch, in chunks,
and again with prefix hits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.configuration.loading import config_from
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.model_report import report_model
from hardpoint.plugins import HardpointError, Model
from hardpoint.plugins.component.base import no_progress
from support.builtins.model_harness import Runner, load_model, open_loader

from .configs import LENGTH, VOCABULARY, tiny_config

ENDS = ("ForCausalLM", "LMHeadModel")
NATIVE, THROUGH = "native", "through transformers"
REFUSED = "refused"
REFUSED_LATE = "refused when weights are read"
DIFFERS = "differs"
NOT_COMPARED = "not compared"

_GENERATOR = torch.Generator().manual_seed(1)
_FIRST: list[int] = torch.randint(5, VOCABULARY, (60,), generator=_GENERATOR).tolist()
_SECOND: list[int] = torch.randint(5, VOCABULARY, (40,), generator=_GENERATOR).tolist()
_NUM_NEW = 6
_PADDED = re.compile("Camembert|Data2Vec|Roberta|XLMRoberta|Xmod")
"""Models whose positions begin after that of padding, but those of `generate` at 0."""
_LARGEST = 1e-4
_BLOCK = 4
_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "weight_cache": {"path": "off"},
    "scheduler": {"max_num_batched_tokens": 20},
    "kv_cache": {"block_size": _BLOCK, "num_blocks": 200},
    "tokenizer": {"use": "none"},
}


@dataclass(frozen=True)
class Family:
    """Result of an architecture.

    Attributes:
        name: name of the architecture.
        model_type: its name in config.json.
        path: native, through transformers, refused, or what else there is above.
        why: error in one line; empty if it runs.
        other: what `models.use = "transformers"` does with one that runs natively.
    """

    name: str
    model_type: str
    path: str
    why: str = ""
    other: str = ""


def architectures() -> list[str]:
    """Return the architectures of transformers that generate text without other inputs."""
    names = (name for name in dir(transformers) if name.endswith(ENDS))
    return sorted(name for name in names if not name.startswith("Auto"))


def survey(name: str, folder: Path) -> Family:
    """Return the result of an architecture; `folder` is empty."""
    kind = getattr(transformers, name)
    try:
        config = tiny_config(kind.config_class, name)
    except Exception as error:
        return Family(name, kind.config_class.model_type, NOT_COMPARED, _line(error))
    config.save_pretrained(folder / "alone")
    try:
        plugin = _plugin(folder / "alone", "auto", "outline")
    except HardpointError as error:
        return Family(name, config.model_type, REFUSED, _line(error))
    try:
        reference = _Reference(save_random(kind, config, folder / "whole"))
    except Exception as error:
        return Family(name, config.model_type, NOT_COMPARED, _line(error))
    if plugin == "transformers":
        path, why = _compared(folder / "whole", "auto", THROUGH, reference)
        return Family(name, config.model_type, path, why)
    path, why = _compared(folder / "whole", "auto", NATIVE, reference)
    other, other_why = _compared(folder / "whole", "transformers", "equal", reference)
    return Family(name, config.model_type, path, why, other_why or other)


def tokens_on(device: str, name: str, use: str, folder: Path) -> str:
    """Return how the tokens of an architecture on a device differ; empty if they do not.

    Args:
        device: value of `device`.
        name: name of the architecture.
        use: value of `models.use`.
        folder: empty.
    """
    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class, name)
    reference = _Reference(save_random(kind, config, folder))
    settings = _SETTINGS | {"models": {"use": use}, "device": device}
    try:
        return _token_difference(folder, settings, reference)
    except HardpointError as error:
        return _line(error)


def _plugin(folder: Path, use: str, loader: str = "auto") -> str:
    """Return the name of the plugin that computes a folder's model, after its checks.

    Raises:
        HardpointError: there is none, or it refuses the model.
    """
    settings = _SETTINGS | {"load": {"use": loader}, "models": {"use": use}}
    config, sources = config_from({"model": str(folder), **settings})
    report_model(config, sources, [])
    spec = prepare_worker(config, resolve_plugins(config, sources), sources, no_progress)
    return spec.model_config.model_plugin


def save_random(kind: Any, config: Any, folder: Path) -> Any:
    """Save a random model of transformers; return it."""
    torch.manual_seed(5)
    model = kind(config).float()
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


class _Reference:
    """Logits and greedy tokens of transformers."""

    def __init__(self, model: Any) -> None:
        with torch.inference_mode():
            self.logits = [self._logits(model, prompt) for prompt in (_FIRST, _SECOND)]
            self.tokens = [self._generated(model, prompt) for prompt in (_FIRST, _SECOND)]

    def _logits(self, model: Any, prompt: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
        if logits.shape != (len(prompt), VOCABULARY) or not torch.isfinite(logits).all():
            raise ValueError(f"transformers gives logits {list(logits.shape)}, or no numbers")
        return logits

    def _generated(self, model: Any, prompt: list[int]) -> list[int]:
        if _PADDED.match(type(model).__name__):
            tokens = list(prompt)
            for _ in range(_NUM_NEW):
                tokens.append(int(self._logits(model, tokens)[-1].argmax()))
            return tokens[len(prompt) :]
        options = {"max_new_tokens": _NUM_NEW, "min_new_tokens": _NUM_NEW, "do_sample": False}
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        tokens = model.generate(
            ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **options
        )
        return list(tokens[0, len(prompt) :].tolist())


def _compared(folder: Path, use: str, equal: str, reference: _Reference) -> tuple[str, str]:
    """Return `equal`, or another outcome of a model with weights, and the reason."""
    try:
        plugin = _plugin(folder, use)
    except HardpointError as error:
        return REFUSED, _line(error)
    try:
        why = _difference(folder, use, plugin, reference)
    except HardpointError as error:
        return REFUSED_LATE, _line(error)
    return (DIFFERS, why) if why else (equal, "")


def _difference(folder: Path, use: str, plugin: str, reference: _Reference) -> str:
    """Return how a model's logits and tokens differ from the reference; empty if they do not."""
    settings = _SETTINGS | {"models": {"use": use}}
    config, sources = config_from({"model": str(folder), **settings})
    plugins = resolve_plugins(config, sources)
    kind = plugins.target(plugins.get("models", plugin))
    with torch.inference_mode():
        for label, difference in _logit_differences(kind, folder, reference).items():
            if not difference < _LARGEST:
                return f"logits {label} differ by {difference:.2g}"
    return _token_difference(folder, settings, reference)


def _token_difference(folder: Path, settings: dict[str, Any], reference: _Reference) -> str:
    """Return how the tokens of an engine differ from the reference; empty if they do not."""
    params = SamplingParams(max_tokens=_NUM_NEW, temperature=0, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in (_FIRST, _SECOND)]
    with LLM(str(folder), config=settings, progress=False) as llm:
        for when in ("in a batch and chunks", "with prefix hits"):
            outputs = llm.generate(prompts, params)
            if [list(output.outputs[0].token_ids) for output in outputs] != reference.tokens:
                return f"tokens {when} are others"
        if not all(output.num_cached_tokens for output in outputs):
            return "no prefix is found in the cache"
    return ""


def _logit_differences(kind: type[Model], folder: Path, reference: _Reference) -> dict[str, float]:
    """Return the largest difference of logits, alone, in chunks, and beside another prompt."""
    loader = open_loader(SafetensorsLoader, folder)
    model = load_model(kind, loader, dtype=torch.float32, max_model_len=LENGTH)
    first, second = reference.logits
    alone = Runner(model, dtype=torch.float32, block_size=_BLOCK).logits([("a", _FIRST)])
    runner = Runner(model, dtype=torch.float32, block_size=_BLOCK)
    parts = [runner.logits([("a", _FIRST[:23])])]
    mixed = runner.logits([("a", _FIRST[23:50]), ("b", _SECOND)])
    parts += [mixed[:27], runner.logits([("a", _FIRST[50:])])]
    return {
        "alone": _largest(alone, first),
        "in chunks": _largest(torch.cat(parts), first),
        "of another prompt in the batch": _largest(mixed[27:], second),
    }


def _largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, for logits above 1 as a part of the largest one."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def _line(error: Exception) -> str:
    """Return an error in one line, without parts that differ between runs."""
    text = str(error) if isinstance(error, HardpointError) else f"{type(error).__name__}: {error}"
    text = re.sub(r"/\S+/(?=alone|whole)|0x[0-9a-f]+", "", " ".join(text.split()))
    text = re.sub(r"by up to \S+ \(\S+ of their length\)", "by too much", text)
    return text.removeprefix("model: ").removeprefix("alone/").removeprefix("whole/")[:400]
