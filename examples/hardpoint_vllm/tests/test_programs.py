"""Programs written for vLLM, with another import: their calls and results."""

import asyncio
import importlib

import pytest

from hardpoint.testing import scripted_config
from hardpoint.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from hardpoint.vllm.lora.request import LoRARequest
from hardpoint.vllm.outputs import EmbeddingRequestOutput, RequestOutput
from hardpoint.vllm.paths import PATHS, names_of
from hardpoint.vllm.pooling_params import PoolingParams
from hardpoint.vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    StructuredOutputsParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(scripted):
    with LLM(
        str(scripted),
        hardpoint_config=scripted_config(scripted),
        max_model_len=256,
        enforce_eager=True,
        trust_remote_code=True,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=1,
        disable_log_stats=False,
    ) as llm:
        yield llm


def test_prompts_in_all_forms_have_the_same_output(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("say abc")
    prompts = [
        "say abc",
        TextPrompt(prompt="say abc"),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt": "say abc", "cache_salt": "mine"},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    (tokens,) = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(tokens) == 4
    assert outputs[0].prompt == "say abc"
    assert outputs[0].outputs[0].finished()
    assert outputs[0].outputs[0].finish_reason == "length"
    assert llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY)[0].outputs[0].token_ids


def test_parameters_may_be_assigned_and_copied(llm):
    params = SamplingParams(temperature=0.0, stop="x", logprobs=True)
    params.max_tokens = 2
    copied = params.clone()
    copied.max_tokens = 3
    outputs = llm.generate(["a", "a"], [params, copied])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    assert len(outputs[0].outputs[0].logprobs) == 2
    assert SamplingParams.from_optional(top_p=None, temperature=0.5).top_p == 1.0
    assert SamplingParams(seed=-1).seed is None
    assert llm.get_default_sampling_params() is not llm.get_default_sampling_params()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected"),
        ({"n": 0}, "n: expected"),
        ({"best_of": 4}, "best_of: expected 1, the value of n, got 4"),
        ({"watermarking": True}, "watermarking: expected none, got True; examples/acme_watermark"),
    ],
)
def test_wrong_parameters_are_refused_where_they_are_written(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_one_form_of_an_answer_is_given():
    with pytest.raises(ValueError, match="expected one of json.*got regex, choice"):
        StructuredOutputsParams(regex="a", choice=["a"])
    form = GuidedDecodingParams(choice=["a", "b"])
    assert SamplingParams(guided_decoding=form).native().structured.choice == ["a", "b"]
    assert SamplingParams(structured_outputs={"regex": "a+"}).native().structured.regex == "a+"


def test_beam_search_returns_the_likeliest_outputs(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    (output,) = llm.beam_search([{"prompt": "say abc"}], params)
    best, second = output.sequences
    assert best.cum_logprob >= second.cum_logprob
    greedy = llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=3))
    likely = llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))
    assert best.tokens[:-3] == greedy[0].prompt_token_ids
    assert best.tokens[-3] in likely[0].outputs[0].logprobs[0]


def test_conversations_have_the_template_that_is_given(llm):
    messages = [{"role": "user", "content": "abc"}]
    template = "{% for m in messages %}say {{ m['content'] }}{% endfor %}"
    outputs = llm.chat(messages, GREEDY, chat_template=template)
    plain = llm.generate("say abc", GREEDY)
    assert outputs[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_vectors_have_the_attributes_of_vllm(llm):
    (output,) = llm.embed("say abc")
    assert isinstance(output, EmbeddingRequestOutput)
    assert output.outputs.hidden_size == len(output.outputs.embedding) > 0
    (tensor,) = llm.encode(["say abc"], PoolingParams(task="token_embed"))
    assert tensor.outputs.data.shape[0] == len(tensor.prompt_token_ids)


def test_an_engine_is_stepped(scripted):
    engine = LLMEngine.from_engine_args(EngineArgs(hardpoint_config=scripted_config(scripted)))
    engine.add_request("first", "say abc", GREEDY)
    engine.add_request("second", "abc", GREEDY, priority=1)
    ended = set()
    while engine.has_unfinished_requests():
        ended |= {output.request_id for output in engine.step() if output.finished}
    assert ended == {"first", "second"}
    assert engine.get_num_unfinished_requests() == 0
    engine.shutdown()


def test_each_engine_truncates_prompts(llm, scripted):
    params = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=3)
    tokenization = {"truncate_prompt_tokens": 3}
    outputs = [
        *llm.generate("say abc", params),
        *llm.generate("say abc", GREEDY, tokenization_kwargs=tokenization),
    ]
    engine = llm.llm_engine
    engine.add_request("first", "say abc", params)
    engine.add_request("second", "say abc", GREEDY, tokenization_kwargs=tokenization)
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    (pooled,) = llm.embed("say abc", pooling_params=PoolingParams(truncate_prompt_tokens=3))
    assert [len(output.prompt_token_ids) for output in [*outputs, pooled]] == [3] * 5
    with pytest.raises(ValueError, match="tokenization_kwargs.padding: expected truncate_prompt"):
        engine.add_request("third", "say abc", GREEDY, tokenization_kwargs={"padding": True})


def test_outputs_come_to_the_tasks_of_an_event_loop(scripted):
    args = AsyncEngineArgs(hardpoint_config=scripted_config(scripted))

    async def run():
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            return [output async for output in engine.generate("say abc", GREEDY, "0")]
        finally:
            engine.shutdown()

    outputs = asyncio.run(run())
    assert outputs[-1].finished
    assert len(outputs[-1].outputs[0].token_ids) == 4


def test_a_processor_of_vllm_reads_extra_args(scripted):
    with LLM(hardpoint_config=scripted_config(scripted), logits_processors=[Forced]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 67})
        assert llm.generate("say abc", params)[0].outputs[0].token_ids == [67, 67, 67]
        assert llm.generate("say abc", GREEDY)[0].outputs[0].token_ids != [67] * 4


class Forced:
    """A class of vLLM V2: one token alone may be produced."""

    def __init__(self, vllm_config, req_states):
        self.targets = [None] * req_states.max_num_reqs

    def add_request(self, req_idx, sampling_params):
        self.targets[req_idx] = (sampling_params.extra_args or {}).get("target_token")
        return self.targets[req_idx] is not None

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            logit = logits[row, self.targets[slot]].clone()
            logits[row] = -float("inf")
            logits[row, self.targets[slot]] = logit
        return logits


@pytest.mark.parametrize("module", PATHS)
def test_modules_have_the_paths_of_vllm(module):
    imported = importlib.import_module(f"hardpoint.vllm.{module}".rstrip("."))
    for name in names_of(module):
        assert getattr(imported, name) is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sampling_params", "RequestOutputKind"),
        ("engine.arg_utils", "AsyncEngineArgs"),
        ("v1.engine.async_llm", "AsyncLLM"),
        ("inputs", "TokensPrompt"),
        ("utils.argparse_utils", "FlexibleArgumentParser"),
        ("v1.sample.logits_processor", "AdapterLogitsProcessor"),
        ("config", "CompilationConfig"),
        ("transformers_utils.tokenizer", "get_tokenizer"),
    ],
)
def test_names_that_programs_import_are_there(module, name):
    assert getattr(importlib.import_module(f"hardpoint.vllm.{module}"), name) is not None


def test_the_error_of_another_module_has_what_there_is_instead():
    with pytest.raises(ModuleNotFoundError, match=r"of vllm.entrypoints.openai.api_server .*`hard"):
        importlib.import_module("hardpoint.vllm.entrypoints.openai.api_server")
    with pytest.raises(ImportError, match="Nothing"):
        from hardpoint.vllm.sampling_params import Nothing  # noqa: F401, PLC0415


def test_an_adapter_has_the_names_of_vllm():
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 1, "/adapters/sql")
    assert adapter == LoRARequest("sql", 2, "/other")
    with pytest.raises(ValueError, match="lora_int_id: expected 1 or more, got 0"):
        LoRARequest("sql", 0, "/adapters/sql")
