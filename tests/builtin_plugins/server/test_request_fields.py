"""Fields of requests in each dialect: their value in the engine, or the error."""

import msgspec
import pytest
from support.delta_engine import DeltaEngine
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import WEATHER, user

from hardpoint.plugins import RequestOutputKind
from hardpoint.plugins.server import Authenticator, Client

HI = user("hi")
BODIES = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 100}),
    "generate": ("/inference/v1/generate", {"token_ids": [1]}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": HI}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
    "embeddings": ("/v1/embeddings", {}),
}
GENERATING = ("chat", "completions", "responses", "messages", "generate")
OPENAI = ("chat", "completions", "responses")
CONVERSING = ("chat", "responses")
OUTSIDE = ("stream", "priority", "timeout", "tags", "cache_salt", "request_id", "stream_options")
OUTSIDE += ("token_ids", "model")
"""Fields of `generate` that are beside its sampling parameters."""

OBJECT = {"type": "object"}
FUNCTION = WEATHER["function"]
FLAT = {"type": "function", **FUNCTION}
THEIRS = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FLAT_NAMED = {"type": "function", "name": "get_weather"}
UNKNOWN = {"type": "function", "function": {"name": "x"}}
PLAIN = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": OBJECT}}
FREE = {"name": "answer", "parameters": OBJECT, "description": "d"}


def call(**fields):
    return [{"type": "function_call", "name": "w", "arguments": "{}", "call_id": "c", **fields}]


def message_of(role, *content):
    return {"messages": [{"role": role, "content": list(content)}]}


def allowed(*tools, **fields):
    return {"tool_choice": {"type": "allowed_tools", "tools": list(tools), **fields}}


# What reaches the engine: (dialects, fields, names of parameters or options with their values).

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 4,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "thinking_token_budget": 9,
    "plugin_args": {"x": {"a": 1}},
    "priority": 3,
    "timeout": 9.0,
    "tags": {"team": "a"},
    "cache_salt": "s",
}
IGNORED = {
    "chat completions responses": {
        "user": "u",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "session_id": "s",
        "metadata": {"a": "1"},
        "use_beam_search": False,
    },
    "chat": {
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "store": True,
        "functions": [],
        "modalities": ["text"],
    },
    "responses": {
        "access_programs": ["x"],
        "background_options": {"completion_window": "2h"},
        "image": {"context_compression": "auto"},
        "truncation": "auto",
        "store": True,
    },
    "messages": {
        "user_profile_id": "u",
        "workspace_id": "w",
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
    },
}
REACHES = [
    *((GENERATING, {name: value}, {name: value}) for name, value in SAMPLING.items()),
    *((names, {name: value}, {}) for names, f in IGNORED.items() for name, value in f.items()),
    (GENERATING, {"logit_bias": {"7": 1}}, {"logit_bias": {7: 1.0}}),
    (GENERATING, {"vllm_xargs": {"x": {"a": 1}}}, {"plugin_args": {"x": {"a": 1}}}),
    (GENERATING, {"structured_outputs": {"json": OBJECT}}, {"json": OBJECT, "lenient": False}),
    (GENERATING, {"stream": True}, {"output_kind": RequestOutputKind.DELTA}),
    (GENERATING, {"request_id": "r"}, {"request_id": "r"}),
    ("chat completions", {"n": 2, "stop": "x"}, {"n": 2, "stop": "x"}),
    ("chat completions generate", {"max_tokens": 3}, {"max_tokens": 3}),
    ("chat completions generate", {"prompt_logprobs": 1}, {"prompt_logprobs": 1}),
    (
        "chat completions generate",
        {"logprob_token_ids": [5, 6]},
        {"logprob_token_ids": [5, 6], "logprobs": None},
    ),
    ("chat completions generate", {"response_format": SCHEMA}, {"json": OBJECT, "lenient": True}),
    ("chat completions", {"guided_json": OBJECT}, {"json": OBJECT}),
    ("chat completions", {"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": 5}),
    ("generate", {"token_ids": [5, 6]}, {"prompt": [5, 6], "detokenize": False}),
    ("generate completions", {"logprobs": 2}, {"logprobs": 2}),
    ("completions", {"max_tokens": None}, {"max_tokens": 16}),
    ("chat", {"max_completion_tokens": 3}, {"max_tokens": 3}),
    ("chat responses", {}, {"max_tokens": None, "tools": None, "tool_choice": "auto"}),
    ("chat", {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    ("chat", {"tools": [WEATHER]}, {"tools": PLAIN, "parallel_tool_calls": True}),
    ("chat", {"tools": [WEATHER], "tool_choice": NAMED}, {"tool_choice": {"name": "get_weather"}}),
    (
        "chat",
        {"reasoning_effort": "none", "chat_template_kwargs": {"x": 1}},
        {"chat_template_kwargs": {"x": 1, "enable_thinking": False}},
    ),
    (
        "chat",
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True}},
    ),
    (
        "chat",
        {"reasoning_effort": "max"},
        {"chat_template_kwargs": {"reasoning_effort": "max", "enable_thinking": True}},
    ),
    ("responses", {"max_output_tokens": 5, "stop": "x"}, {"max_tokens": 5, "stop": "x"}),
    ("responses", {"tools": [FLAT]}, {"tools": PLAIN, "parallel_tool_calls": True}),
    (
        "responses",
        {"tools": [FLAT], "tool_choice": FLAT_NAMED, "parallel_tool_calls": False},
        {"tool_choice": {"name": "get_weather"}, "parallel_tool_calls": False},
    ),
    (
        "responses",
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True}},
    ),
    (
        "responses",
        {"reasoning": {"effort": "none"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": OBJECT}}},
        {"json": OBJECT, "lenient": True},
    ),
    (
        "responses",
        {
            "tools": [
                {
                    **{"type": "function", **FREE, "allowed_callers": ["direct"], "async": True},
                    **{"defer_loading": True, "output_schema": OBJECT},
                }
            ],
            "input": [
                *call(**{"async": True, "caller": {"type": "direct"}, "namespace": "n"}),
                {"type": "function_call_output", "name": "w", "call_id": "c", "output": "Sun"},
            ],
        },
        {"tools": [{"type": "function", "function": FREE}]},
    ),
    ("messages", {"max_tokens": 50}, {"max_tokens": 50, "thinking_token_budget": None}),
    ("messages", {"stop_sequences": ["x", "y"]}, {"stop": ["x", "y"]}),
    ("messages", {"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
    ("messages", {"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    (
        "messages",
        {"tools": [THEIRS], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        "messages",
        {"tools": [THEIRS], "tool_choice": {"type": "tool", "name": "get_weather"}},
        {"tool_choice": {"name": "get_weather"}, "parallel_tool_calls": True},
    ),
    ("messages", {}, {"chat_template_kwargs": None}),
    (
        "messages",
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    (
        "messages",
        {"thinking": {"type": "adaptive"}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    (
        "messages",
        {
            "thinking": {"type": "enabled", "budget_tokens": 20},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": OBJECT}},
        },
        {
            "thinking_token_budget": 20,
            "json": OBJECT,
            "lenient": False,
            "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True},
        },
    ),
]

# The names that other servers have.
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
DOES_NOT = {"chat_template_kwargs": {"enable_thinking": False}}
NO_BUDGET = {"thinking_token_budget": None}
REACHES += [
    (GENERATING, {"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ("chat completions responses generate", {"n_predict": 7}, {"max_tokens": 7}),
    ("chat completions responses generate", {"n_predict": -1}, {"max_tokens": None}),
    (GENERATING, {"best_of": 1}, {}),
    ("chat completions generate", {"best_of": 2, "n": 2}, {"n": 2}),
    (GENERATING, {"regex": "a+"}, {"regex": "a+"}),
    (GENERATING, {"regex": "", "grammar": "", "ebnf": ""}, {"structured": None}),
    (GENERATING, {"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    (GENERATING, {"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    (GENERATING, {"json_schema": OBJECT}, {"json": OBJECT}),
    (GENERATING, {"json_schema": '{"type": "object"}'}, {"json": OBJECT}),
    (GENERATING, {"typical_p": 1, "mirostat": 0, "mirostat_tau": 5}, {"plugin_args": {}}),
    (
        GENERATING,
        {"typical_p": 0.9, "plugin_args": {"x": {"a": 1}}},
        {"plugin_args": {"x": {"a": 1}, "typical_p": {"p": 0.9}}},
    ),
    (
        GENERATING,
        {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
        {"plugin_args": {"mirostat": {"tau": 4.0, "eta": 0.2}}},
    ),
    (GENERATING, {"mirostat": 2}, {"plugin_args": {"mirostat": {}}}),
    ("chat responses messages", {"enable_thinking": True}, THINKS),
    ("chat responses messages", {"enable_thinking": False}, DOES_NOT),
    (
        "chat",
        {"enable_thinking": False, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}},
    ),
    ("chat", {"enable_thinking": True, **DOES_NOT}, DOES_NOT),
    ("chat", {"thinking": True}, THINKS),
    ("chat", {"thinking": {"type": "disabled"}}, DOES_NOT | NO_BUDGET),
    (
        "chat",
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        THINKS | {"thinking_token_budget": 9},
    ),
    ("chat", {"thinking": {"type": "auto"}}, {"chat_template_kwargs": None} | NO_BUDGET),
    ("completions generate", {"enable_thinking": False}, {}),
    (
        "chat completions",
        {"truncate_prompt_tokens": 5, "truncation_side": "left"},
        {"truncate_prompt_tokens": 5},
    ),
    ("chat completions", {"truncation_side": "right"}, {"truncate_prompt_tokens": None}),
]

# Refusals: (dialects, fields, path of the wrong field, words of the message).

NOT_IN_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
NO_TOOLS = "there are no server tools"
TEXT_ALONE = "is not supported: the model reads text alone"
RESULT = {"type": "tool_result", "tool_use_id": "a"}
REFUSED = [
    (GENERATING, {"temperature": -1}, "temperature", ">= 0"),
    (GENERATING, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    (GENERATING, {"logit_bias": {"a": 1, "5": 1, "-1": 2}}, "logit_bias", "got 'a', '-1'"),
    (
        GENERATING,
        {"logit_bias": {f"x{number}": 1 for number in range(25)}},
        "logit_bias",
        "'x19' and 5 others",
    ),
    (GENERATING, {"logit_bias": {"999999": 1}}, "logit_bias", "vocabulary"),
    (GENERATING, {"plugin_args": {"x": {}}}, "plugin_args.x", "no enabled plugin"),
    (GENERATING, {"plugin_args": {}, "vllm_xargs": {}}, None, "got both"),
    (GENERATING, {"structured_outputs": {"choise": []}}, "structured_outputs.choise", "'choice'"),
    (GENERATING, {"repeat_penalty": 1.2, "repetition_penalty": 1.2}, None, "got both"),
    (GENERATING, {"repeat_penalty": 0}, "repeat_penalty", "> 0"),
    ("chat completions generate", {"n_predict": 3, "max_tokens": 3}, None, "got both"),
    ("chat", {"n_predict": 3, "max_completion_tokens": 3}, None, "got both"),
    ("responses", {"n_predict": 3, "max_output_tokens": 3}, None, "got both"),
    ("messages", {"n_predict": 3}, "n_predict", "use max_tokens"),
    ("messages", {"thread": {"type": "create"}}, "thread", "thread=False"),
    ("completions generate", {"n_predict": -2}, "n_predict", ">= -1"),
    ("chat completions", {"n_predict": 0}, "n_predict", "at least 1"),
    ("responses generate", {"n_predict": 0}, "n_predict", ">= 1"),
    ("chat completions", {"n_predict": 2, "min_tokens": 5}, "min_tokens", "n_predict"),
    (GENERATING, {"best_of": 2}, "best_of", "value of n"),
    (GENERATING, {"regex": "("}, "regex", "unclosed"),
    (GENERATING, {"json_schema": {"type": "x"}}, "json_schema.type", "got 'x'"),
    (GENERATING, {"ebnf": "root ::="}, "ebnf", "no text"),
    (GENERATING, {"grammar": "root ::="}, "grammar", "no text"),
    (GENERATING, {"regex": "a", "ebnf": 'root ::= "a"'}, None, "expected one of them"),
    (GENERATING, {"typical_p": 0.9}, "typical_p", "no enabled plugin"),
    (GENERATING, {"typical_p": 2}, "typical_p", "<= 1"),
    (GENERATING, {"mirostat": 2, "mirostat_tau": 3}, "mirostat", "no enabled plugin"),
    (GENERATING, {"mirostat": 1}, "mirostat", "expected 0 or 2"),
    (GENERATING, {"mirostat": 2, "plugin_args": {"mirostat": {}}}, None, "got both"),
    ("completions generate", {"enable_thinking": True}, "enable_thinking", "read as they are"),
    ("completions generate", {"thinking": True}, "thinking", "read as they are"),
    ("responses", {"thinking": {"type": "enabled"}}, "thinking", "use enable_thinking"),
    ("chat", {"thinking": {"type": "off"}}, "thinking.type", "expected"),
    ("chat", {"thinking": True, "enable_thinking": False}, None, "got both"),
    ("messages", {"thinking": {"type": "disabled"}, "enable_thinking": True}, None, "got both"),
    ("chat", {"reasoning_format": "none"}, "reasoning_format", '"hidden"'),
    (
        "chat completions",
        {"truncate_prompt_tokens": 5, "truncation_side": "right"},
        "truncation_side",
        'expected "left"',
    ),
    ("responses messages generate", {"truncation_side": "left"}, "truncation_side", "cut the"),
    (GENERATING[:4], {"chat_template": "x"}, "chat_template", "operator"),
    (GENERATING[:4], {"use_beam_search": True}, "use_beam_search", "not supported"),
    ("responses messages", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cut the"),
    ("responses messages", {"logprob_token_ids": [5]}, "logprob_token_ids", "/v1/completions"),
    ("generate", {"logprob_token_ids": []}, "logprob_token_ids", "length >= 1"),
    ("responses", {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "not supp"),
    ("chat completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ("chat completions", {"guided_regex": "("}, "guided_regex", "unclosed"),
    ("chat completions", {"guided_json": {"type": "x"}}, "guided_json.type", "got 'x'"),
    ("chat completions", {"guided_choice": []}, "guided_choice", "length >= 1"),
    ("chat", {"guided_choice": ["a"], "guided_regex": "b"}, None, "expected one of them"),
    (
        "chat completions",
        {"response_format": NOT_IN_SCHEMA},
        "response_format.json_schema.schema.type",
        "got 'x'",
    ),
    ("chat", {"response_format": {"type": "json"}}, "response_format.type", '"json_schema"'),
    ("chat", {"tool_choice": "required"}, "tool_choice", "needs tools"),
    ("chat", {"tool_choice": "any"}, "tool_choice", '"auto"'),
    (
        "chat",
        {"tool_choice": UNKNOWN, "tools": [WEATHER]},
        "tool_choice.function.name",
        "get_weather",
    ),
    ("chat", {"tools": [{**NAMED, "function": {}}]}, "tools[0].function.name", "missing"),
    ("chat", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
    ("chat completions generate", {"stream_options": {}}, "stream_options", "stream to be true"),
    ("chat", {"min_tokens": 5, "max_tokens": 2}, "min_tokens", "got 5"),
    ("chat", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "allowed"),
    ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role", '"assistant"'),
    (
        "chat",
        message_of("user", {"type": "image_url"}),
        "messages[0].content[0].type",
        "'image_url'",
    ),
    ("chat", {"messages": []}, "messages", "length >= 1"),
    ("chat", {"reasoning_effort": "huge"}, "reasoning_effort", '"max"'),
    ("chat", message_of("user", {"type": "refusal"}), "messages[0].content[0].type", "'refusal'"),
    ("completions", {"prompt": []}, "prompt", "at least one prompt"),
    ("completions", {"prompt": {}}, "prompt", "expected a text"),
    ("completions", {"prompt": ["a", 5]}, "prompt[1]", "expected a text or"),
    ("completions", {"prompt": [True]}, "prompt[0]", "expected a text or"),
    ("completions", {"prompt": ""}, "prompt", "at least one token"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]", "at least one token"),
    ("completions", {"prompt": [[]]}, "prompt[0]", "at least one token"),
    ("completions", {"prompt": [999999]}, "prompt[0]", "got 999999"),
    ("completions", {"prompt": [[1], [2, 999999]]}, "prompt[1][1]", "got 999999"),
    ("completions", {"prompt": [[1], [2, 999999]], "stream": True}, "prompt[1][1]", "got 999999"),
    ("completions", {"max_tokens": 0}, "max_tokens", "without echo"),
    ("completions", {"best_of": 2}, "best_of", "value of n"),
    ("completions", {"suffix": "y"}, "suffix", "not supported"),
    ("completions", {"logprobs": 21}, "logprobs", "at most 20"),
    ("completions", {"logprobs": -1}, "logprobs", ">= 0"),
    ("completions", {"messages": HI}, "messages", "/v1/chat/completions"),
    ("completions", {"prompt": None}, "prompt", "missing"),
    ("generate", {"token_ids": []}, "token_ids", "length >= 1"),
    ("generate", {"token_ids": [-1]}, "token_ids[0]", ">= 0"),
    ("generate", {"token_ids": [1, 99999]}, "token_ids[1]", "got 99999"),
    ("generate", {"sampling_params": {"n": 1000}}, "sampling_params.n", "at most 128"),
    ("generate", {"sampling_params": {"topk": 1}}, "sampling_params.topk", "'top_k'"),
    ("generate", {"sampling_params": {"logits_processors": ["os"]}}, ..., "plugin_args"),
    ("generate", {"sampling_params": {"stream": True}}, "sampling_params.stream", "outside"),
    ("generate", {"sampling_params": {}, "temperature": 0}, "temperature", "sampling_params"),
    ("generate", {"request_id": "a\nb"}, "request_id", "expected"),
    ("generate", {"sampling_params": {}, "features": "x"}, "features", "text alone"),
    (
        "responses",
        {"tools": [FLAT], "tool_choice": {**FLAT_NAMED, "name": "time"}},
        "tool_choice.name",
        "expected one of the tools ('get_weather'), got 'time'",
    ),
    (
        "responses",
        {"tools": [FLAT], **allowed({**FLAT_NAMED, "name": "time"}, mode="auto")},
        "tool_choice.tools[0].name",
        "expected one of the tools ('get_weather'), got 'time'",
    ),
    (
        "responses",
        {"tools": [FLAT], **allowed({"type": "mcp"})},
        "tool_choice.tools[0].type",
        "'mcp' is not supported: there are no hosted tools",
    ),
    (
        "responses",
        {"tools": [{**FLAT, "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
        'expected "direct" among them',
    ),
    (
        "responses",
        {"moderation": {"policy": {}}},
        "moderation",
        "supported: there is no moderation",
    ),
    (
        "responses",
        {"input": [{"type": "program", "code": "1"}]},
        "input[0].type",
        "'program' is not",
    ),
    ("responses", {"previous_response_id": "r"}, "previous_response_id", "supported: nothing is"),
    ("responses", {"conversation": "c"}, "conversation", "not supported: nothing is stored"),
    ("responses", {"background": True}, "background", "expected false"),
    ("responses", {"prompt": {"id": "p"}}, "prompt", "not supported: there are no stored prompts"),
    ("responses", {"max_tool_calls": 3}, "max_tool_calls", "not supported"),
    ("responses", {"tools": [{"type": "custom"}]}, "tools[0].name", "missing"),
    ("responses", {"tools": [{"type": "shell_x"}]}, "tools[0].type", "'shell_x' is not"),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
        'expected "function"',
    ),
    ("responses", {"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "namespace"),
    ("responses", {"tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp' is not supported"),
    ("responses", {"max_output_token": 3}, ..., "did you mean 'max_output_tokens'?"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", "expected"),
    ("responses", {"top_logprobs": 2}, "top_logprobs", "expected include to hold"),
    ("responses", {"top_logprobs": 21}, "top_logprobs", "expected"),
    ("responses", {"input": []}, "input", "expected"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, ..., "nothing is stored"),
    ("responses", {"input": [{"type": "banana"}]}, "input[0].type", '"message" or "reasoning"'),
    (
        "responses",
        {"input": message_of("user", {"type": "input_image", "image_url": "data:,"})["messages"]},
        "input[0].content[0].type",
        f"'input_image' {TEXT_ALONE}",
    ),
    (
        "responses",
        {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
        "input[0].call_id",
        "expected the call_id of a function_call before it",
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        None,
        "structured_outputs and text.format: expected one of them",
    ),
    ("messages", {"max_tokens": None}, "max_tokens", "missing"),
    ("messages", {"max_tokens": 0}, "max_tokens", "expected"),
    ("messages", {"stop_sequence": ["a"]}, ..., "did you mean 'stop_sequences'?"),
    ("messages", {"stop_sequences": ["a"] * 65}, "stop_sequences", "at most 64 on this server"),
    ("messages", {"mcp_servers": [{}]}, "mcp_servers", f"not supported: {NO_TOOLS}"),
    (
        "messages",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
        f"'web_search_20250305' is not supported: {NO_TOOLS}",
    ),
    (
        "messages",
        message_of("user", {"type": "image", "source": {"type": "url", "url": "data:,"}}),
        "messages[0].content[0].type",
        f"'image' {TEXT_ALONE}",
    ),
    (
        "messages",
        message_of("user", {**RESULT, "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0].source",
        "missing",
    ),
    (
        "messages",
        message_of("user", RESULT),
        "messages[0].content[0].tool_use_id",
        "expected the id of a tool_use before it",
    ),
    (
        "messages",
        message_of("user", {"type": "thinking", "thinking": "a"}),
        "messages[0].content[0].type",
        "messages of role 'user' cannot hold 'thinking'",
    ),
    (
        "messages",
        {
            "messages": [
                *HI,
                *message_of("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": {}})[
                    "messages"
                ],
            ]
        },
        "messages[1]",
        "expected a message with the tool_result of each tool_use after it",
    ),
    ("messages", {"messages": [{"role": "human", "content": "a"}]}, "messages[0].role", "expected"),
    ("messages", {"tool_choice": {"type": "all"}}, "tool_choice.type", "expected"),
    ("tokenize", {}, None, "expected one of them"),
    ("tokenize", {"prompt": "x", "messages": HI}, None, "expected one of them"),
    ("tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template", "conversations"),
    ("tokenize", {"prompt": "x" * 40_000}, "prompt", "characters"),
    ("tokenize", {"messages": user("x" * 40_000)}, "messages", "characters"),
    ("tokenize", {"messages": []}, "messages", "expected"),
    ("detokenize", {"tokens": [100_000]}, "tokens[0]", "expected a token id below 261"),
    ("detokenize", {"tokens": [-1]}, "tokens[0]", "expected a whole number >= 0"),
    ("detokenize", {"tokens": "x"}, "tokens", "expected a list"),
]
NOT_FOUND = [
    (GENERATING, {"model": "gpt-5"}, "model: expected 'scripted' or 'other', got 'gpt-5'"),
    ("tokenize", {"prompt": "x", "model": "y"}, "model: expected"),
]


def rows(table):
    """Return a case for each dialect of a table's rows."""
    cases = []
    for dialects, fields, *rest in table:
        for dialect in dialects.split() if isinstance(dialects, str) else dialects:
            name = "-".join([dialect, *fields])
            cases.append(pytest.param(dialect, fields, *rest, id=name))
    return cases


def body_of(dialect, fields):
    _, base = BODIES[dialect]
    if not are_inner(dialect, fields):
        return {**base, **fields}
    return {**base, "sampling_params": fields}


def are_inner(dialect, fields):
    """Return whether fields are of the sampling parameters of `generate`."""
    return dialect == "generate" and fields.keys().isdisjoint((*OUTSIDE, "sampling_params"))


def post(server, dialect, fields):
    return server.post(BODIES[dialect][0], body_of(dialect, fields))


@pytest.fixture(scope="module")
def fake():
    with running(DeltaEngine(config=configured())) as running_server:
        yield running_server


def reached(fake):
    """Return the parameters and the options of the last request by name."""
    prompt, params, extras = fake.engine.asked[-1]
    named = {name: getattr(params, name) for name in params.__struct_fields__}
    structured = params.structured and msgspec.structs.asdict(params.structured)
    return {"prompt": prompt, **named, **(structured or {}), **extras}


@pytest.mark.parametrize(("dialect", "fields", "expected"), rows(REACHES))
def test_what_reaches_the_engine(fake, dialect, fields, expected):
    answer = post(fake, dialect, fields)
    assert answer.status_code == 200, answer.text
    value = reached(fake)
    if "request_id" in expected:  # made unique: any number of requests may give one
        assert f"{expected['request_id']}-" in value["request_id"]
        assert post(fake, dialect, fields).status_code == 200
        assert reached(fake)["request_id"] != value["request_id"]
        return
    assert {name: value.get(name) for name in expected} == expected


@pytest.mark.parametrize(("dialect", "fields", "param", "words"), rows(REFUSED))
def test_what_is_refused(server, dialect, fields, param, words):
    answer = post(server, dialect, fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    if isinstance(param, str) and are_inner(dialect, fields):
        param = f"sampling_params.{param}"
    if param is ...:
        return
    if "/messages" in BODIES[dialect][0]:  # whose errors have no member for it
        assert answer.json()["type"] == "error"
        assert param is None or error["message"].startswith(f"{param}: ")
    else:
        assert error["param"] == param


@pytest.mark.parametrize(("dialect", "fields", "words"), rows(NOT_FOUND))
def test_what_is_not_there(server, dialect, fields, words):
    answer = post(server, dialect, fields)
    assert answer.status_code == 404, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("dialect", ["chat", "completions", "generate"])
def test_what_is_for_a_kv_connector_is_refused_without_one(fake, dialect):
    path, base = BODIES[dialect]
    body = {**base, "kv_transfer_params": {"do_remote_decode": True}}
    answer = fake.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "kv_transfer_params")

    async def authenticate(headers, path):
        return Client(name="me", kv_transfer=True)

    extensions = (("keys", Authenticator(authenticate=authenticate)),)
    with running(FakeEngine(config=configured(), extensions=extensions)) as server:
        answer = server.post(path, body)
    assert answer.status_code == 400
    assert "has no KV connector" in answer.json()["error"]["message"]


LIMITED = [
    (
        "responses",
        {"max_output_tokens": 6},
        "max_output_tokens: expected at most 5 on this server, got 6",
    ),
    ("responses", {"input": HI * 2}, "input: expected at most 1 on this server, got 2"),
    ("completions", {"prompt": ["a"] * 3}, "prompt: expected at most 2 prompts, got 3"),
]


def test_limits_name_the_field_of_the_dialect():
    limits = {"max_tokens": 5, "messages": 1, "prompts": 2}
    with running(FakeEngine(config=configured(limits=limits))) as server:
        for dialect, fields, message in LIMITED:
            answer = post(server, dialect, fields)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        assert post(server, "completions", {"prompt": ["a"] * 2}).status_code == 200
