"""vLLM's names over Hardpoint: a program written for vLLM changes its imports alone.

`from vllm import LLM, SamplingParams` becomes `from hardpoint.vllm import LLM, SamplingParams`;
modules have vLLM's paths, such as `hardpoint.vllm.sampling_params`. The README of the package has
the tables of what is the same, what is translated and what is refused.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .paths import PACKAGE, PathFinder, has_module, missing, names_of

if TYPE_CHECKING:
    from .async_engine import AsyncLLM as AsyncLLM
    from .async_engine import AsyncLLMEngine as AsyncLLMEngine
    from .configs import ModelRegistry as ModelRegistry
    from .engine_args import AsyncEngineArgs as AsyncEngineArgs
    from .engine_args import EngineArgs as EngineArgs
    from .engines import LLMEngine as LLMEngine
    from .inputs import PromptType as PromptType
    from .inputs import TextPrompt as TextPrompt
    from .inputs import TokensPrompt as TokensPrompt
    from .llm import LLM as LLM
    from .outputs import ClassificationOutput as ClassificationOutput
    from .outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .outputs import CompletionOutput as CompletionOutput
    from .outputs import EmbeddingOutput as EmbeddingOutput
    from .outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .outputs import PoolingOutput as PoolingOutput
    from .outputs import PoolingRequestOutput as PoolingRequestOutput
    from .outputs import RequestOutput as RequestOutput
    from .outputs import ScoringOutput as ScoringOutput
    from .outputs import ScoringRequestOutput as ScoringRequestOutput
    from .params import BeamSearchParams as BeamSearchParams
    from .params import LoRARequest as LoRARequest
    from .params import PoolingParams as PoolingParams
    from .params import RequestOutputKind as RequestOutputKind
    from .params import SamplingParams as SamplingParams
    from .params import StructuredOutputsParams as StructuredOutputsParams

if not any(isinstance(finder, PathFinder) for finder in sys.meta_path):
    sys.meta_path.append(PathFinder())

__version__ = "0.33.0"
"""The version of vLLM whose interface this is."""
__version_tuple__ = (0, 33, 0)

__all__ = [*names_of(""), "__version__", "__version_tuple__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if (module := names_of("").get(name)) is not None:
        return getattr(import_module(f"{PACKAGE}.{module}"), name)
    if has_module(name):
        return import_module(f"{PACKAGE}.{name}")
    raise AttributeError(missing(name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
