"""A user's module for the published package logits-processor-zoo: factories and ready objects."""

from __future__ import annotations

from logits_processor_zoo import transformers as zoo_transformers
from logits_processor_zoo import vllm as zoo_vllm
from transformers import PreTrainedTokenizerFast

from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.tokenizer.gguf import build_gguf_tokenizer
from hardpoint.host.registry.model_files import find_files

_path = find_files("smollm2").path
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=build_gguf_tokenizer(open_gguf(_path), _path),
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
)

_PER_REQUEST = {
    "cite": lambda: zoo_vllm.CiteFromPromptLogitsProcessor(TOKENIZER, 6.0, boost_eos=False),
    "length": lambda: zoo_vllm.GenLengthLogitsProcessor(TOKENIZER, 10.0),
    "choice": lambda: zoo_vllm.MultipleChoiceLogitsProcessor(TOKENIZER, ["1", "2"]),
    "trigger": lambda: zoo_vllm.TriggerPhraseLogitsProcessor(
        TOKENIZER, " as we all know,", trigger_token_phrase=" the", trigger_after=True
    ),
}


def per_request(params):
    """Make the callable that the request names."""
    return _PER_REQUEST[params.extra_args["which"]]()


def trigger_in_transformers_form(params):
    """A factory may make processors in transformers' form as well."""
    return zoo_transformers.TriggerPhraseLogitsProcessor(
        TOKENIZER, 1, " as we all know,", trigger_token_phrase=" the", trigger_after=True
    )


cite = zoo_transformers.CiteFromPromptLogitsProcessor(TOKENIZER, 6.0, boost_eos=False)
length = zoo_transformers.GenLengthLogitsProcessor(TOKENIZER, 10.0)
choice = zoo_transformers.MultipleChoiceLogitsProcessor(TOKENIZER, ["1", "2"])
