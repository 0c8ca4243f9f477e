"""Keyword arguments of the calls that generate, stated once for every signature that takes them.

A call takes some of them by `**options: Unpack[RequestOptions]` (PEP 692). A further one is a line
here, one in `BatchOptions` if several prompts have several values, and a field of `RequestExtras`
or a parameter of `Chat`, which read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from .lora import LoRARequest

__all__: list[str] = []


class RequestOptions(TypedDict, total=False):
    """The options of a request, besides prompt and sampling parameters.

    Attributes:
        priority: smaller is more important; by default 0.
        timeout: seconds after which it ends with finish reason "timeout" and its output so far;
            None, the default, is never.
        tags: free-form labels for policies and sinks, such as {"tenant": "acme"}.
        cache_salt: prompts with different salts never share cached beginnings.
        kv_transfer_params: for the KV connector, which puts the like of it into the last output: of
            a prompt that one engine computes for another one, for example.
        trace_headers: headers of the trace that the request belongs to, such as {"traceparent":
            "00-..."}; sinks get them with the finished request.
        truncate_prompt_tokens: number of last prompt tokens to keep; -1 leaves
            room for `max_tokens`; None, the default, rejects a prompt that is too long.
        lora_request: the adapter that changes the model for this request; an adapter that is not
            loaded yet is loaded from its `path`. None, the default, is the model itself.
        session: name of the conversation that the request belongs to, for `retain_seconds`.
        retain_seconds: time, from its end on, for which its computed blocks are kept in the
            prefix cache rather than other requests' blocks; see `CompletionOutput.part_figures`.
            None, the default, is as others.
        data_parallel_rank: number of the engine that runs the request, of several
            (`parallel.data`); None, the default, lets the balancer choose.
    """

    priority: int
    timeout: float | None
    tags: Mapping[str, str] | None
    cache_salt: str | None
    kv_transfer_params: Mapping[str, Any] | None
    trace_headers: Mapping[str, str] | None
    truncate_prompt_tokens: int | None
    lora_request: LoRARequest | None
    session: str | None
    retain_seconds: float | None
    data_parallel_rank: int | None


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt, and how it is answered.

    Attributes:
        tools: tools that the model may call: OpenAI's `{"type": "function", ...}`, or Python
            functions with typed parameters.
        tool_choice: "none" shows the model no tools; "required" and `{"name": ...}` make it call
            one, by a grammar; by default "auto". Tools that are `strict` get arguments of their
            schemas.
        parallel_tool_calls: whether an answer may have several calls, which is the default; if not,
            the first one counts.
        add_generation_prompt: whether the prompt ends with the beginning of an answer; None, the
            default, is unless the last message is continued.
        continue_final_message: the model goes on with the last message, of the assistant; by
            default false.
        chat_template: name of one of the model's chat templates; by default `tool_use` where there
            are tools and such a template, else `default`.
        chat_template_kwargs: variables of the template that the operator allows, such as
            `{"enable_thinking": False}`.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, str]
    parallel_tool_calls: bool
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatRequestOptions(ChatOptions, RequestOptions, total=False):
    """ChatOptions of a conversation, and the RequestOptions of its request."""
