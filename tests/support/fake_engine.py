"""A fake of the engine behind a server: answers a fixed text, a word at a time."""

import asyncio
import dataclasses
import functools
import re
import threading
import time

import msgspec
import numpy as np

from hardpoint.configuration.loading import default_config_type
from hardpoint.conversations.states import OpenConversations
from hardpoint.conversations.turns import AsyncConversation
from hardpoint.host.live.settings import Settings
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    CompletionOutput,
    EngineConfig,
    HardpointError,
    Logprob,
    PrefixCacheStats,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.requests import PoolingRequestOutput, ToolCall
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.server import InstalledExtension
from hardpoint.plugins.server.engine_set import EngineSet, EngineStatus, LoadReport
from hardpoint.process.server_extensions import server_extensions
from hardpoint.requests import with_place


class FakeTokenizer:
    """A token is a character."""

    chat_template = "{{ messages }} enable_thinking reasoning_effort"
    special_tokens = {}
    eos_token_ids = (0,)
    vocab_size = 0x110000

    def vocabulary(self):
        raise NotImplementedError

    def encode(self, text, *, add_special_tokens=True):
        return [1, *map(ord, text)] if add_special_tokens else [*map(ord, text)]

    def decode(self, token_ids, *, skip_special_tokens=True):
        visible = (token for token in token_ids if token > 1 or not skip_special_tokens)
        # Halves of surrogate pairs are no characters.
        return "".join("\ufffd" if 0xD800 <= token < 0xE000 else chr(token) for token in visible)


@dataclasses.dataclass
class FakeEngine:
    """Answers every request with the same parts; records its requests.

    Attributes:
        text: text of the answer; each word is a token.
        reasoning: before it.
        calls: calls of tools, as (id, name, arguments) after it.
        finish_reason: finish reason of each completion.
        delay: seconds before each output.
        error: raised instead of an answer, before the first output.
        fails_after: outputs after which `error` is raised instead.
        asked: for each request: prompt or messages, parameters, and the other arguments.
        open: requests that are being answered.
        aborted: requests that were closed before their end.
        extensions: (plugin, extension) pairs that plugins add.
        hooks: objects with hooks, which the engine's own loader takes.
        arguments: JSON schemas of the arguments of plugins, by name.
        inputs: JSON schemas of the inputs of IO processors, by name.
        transfer: `kv_transfer_params` of last outputs.
        takes_images: whether conversations may have images.
    """

    text: str = "Hello there , friend"
    reasoning: str = ""
    calls: tuple = ()
    finish_reason: str = "stop"
    delay: float = 0.0
    error: Exception | None = None
    fails_after: int = 0
    config: EngineConfig = dataclasses.field(
        default_factory=lambda: default_config_type()(max_model_len=4096)
    )
    asked: list = dataclasses.field(default_factory=list)
    open: int = 0
    aborted: int = 0
    extensions: tuple = ()
    is_running: bool = True
    dead_error: Exception | None = None
    health_now: Health = dataclasses.field(default_factory=lambda: Health({}, {}))
    metrics_text: str = ""
    live: list = dataclasses.field(default_factory=list)
    utilities: list = dataclasses.field(default_factory=list)
    closed: bool = False
    paused: bool = False
    sleep_level: int = 0
    manifest: Manifest = dataclasses.field(
        default_factory=lambda: Manifest(hardpoint="9.9", entries=())
    )
    arguments: dict = dataclasses.field(default_factory=dict)
    inputs: dict = dataclasses.field(default_factory=lambda: {"fake": {}})
    hooks: tuple = ()
    transfer: dict | None = None
    takes_images: bool = False

    def __post_init__(self):
        self.tokenizer = FakeTokenizer()

    @property
    def model(self):
        return self

    adapters = engines = weights = plugins = debug = model

    def default_sampling_params(self):
        return SamplingParams()

    def generate(self, prompt, sampling_params=None, request_id=None, **extras):
        if isinstance(prompt, dict):
            ids, text = list(prompt["prompt_token_ids"]), prompt.get("prompt")
            return self._answer(prompt, text, ids, sampling_params, request_id, extras)
        if not isinstance(prompt, str) and any(not 0 <= token < 0x110000 for token in prompt):
            raise RequestError("prompt: expected token ids below 1114112")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(list(prompt))
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._answer(prompt, text, ids, sampling_params, request_id, extras)

    def open_conversation(self, params=None, request_id=None, *, keep_last=True, **extras):
        open_ones = OpenConversations(self.config.conversations, 4096, time.monotonic)
        return AsyncConversation(
            functools.partial(open_ones.open, request_id, keep_last=keep_last),
            0x110000,
            self.default_sampling_params(),
            params,
            encode=lambda text, first: self.model.tokenize(text, add_special_tokens=first),
            generate=lambda name, prompt, params: self.generate(prompt, params, name, **extras),
            abort=self.abort,
        )

    supported_tasks = ("generate", "embed", "token_embed", "classify")

    async def encode(self, prompt, pooling_params=None, request_id=None, **extras):
        self.asked.append((prompt, pooling_params, {"request_id": request_id, **extras}))
        if self.error is not None:
            raise self.error
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("prompt: expected at least one token, got an empty prompt")
        yield PoolingRequestOutput(
            request_id="r",
            outputs=np.array([0.6, 0.8], np.float32),
            prompt_token_ids=ids,
            finished=True,
            finish_reason="stop",
        )

    async def process(self, data, io_processor=None, *, as_json=False, **extras):
        self.asked.append((data, io_processor, extras))
        if self.error is not None:
            raise self.error
        answer = {"of": data}
        return msgspec.json.encode(answer) if as_json else answer

    def io_processor_schemas(self):
        return self.inputs

    async def encode_batch(
        self, prompts, pooling_params=None, request_id=None, names=None, **extras
    ):
        outputs = []
        for name, prompt in zip(names, prompts, strict=True):
            try:
                async for output in self.encode(prompt, pooling_params, request_id, **extras):
                    outputs.append(output)
            except RequestError as error:
                raise with_place(error, name) from error
        return outputs

    async def call_part(self, part, method, arguments=None):
        if method == "release":
            return "missing"
        return "" if method == "prompt" else {"labels": ["no", "yes"]}

    def chat(self, messages, sampling_params=None, request_id=None, **extras):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        ids = self.tokenizer.encode(text)
        return self._answer(messages, text, ids, sampling_params, request_id, extras)

    async def _answer(self, prompt, text, ids, given_params, request_id, extras):
        params = (given_params or self.default_sampling_params()).checked()
        self.asked.append((prompt, params, {"request_id": request_id, **extras}))
        if self.error is not None and not self.fails_after:
            raise self.error
        self.open += 1
        finished = False
        try:
            for count, output in enumerate(self._outputs(text, ids, params, request_id)):
                if self.error is not None and count == self.fails_after:
                    raise self.error
                await self._wait(count)
                finished = output.finished
                yield output
        finally:
            self.open -= 1
            self.aborted += not finished

    async def _wait(self, count):
        """Wait before an output, after `count` others."""
        if self.delay:
            await asyncio.sleep(self.delay)

    def _outputs(self, text, ids, params, request_id):
        pieces = [("reasoning", word) for word in _words(self.reasoning)]
        pieces += [("content", word) for word in _words(self.text)]
        pieces = pieces[: params.max_tokens]
        if params.output_kind is RequestOutputKind.DELTA:
            for count, piece in enumerate(pieces, 1):
                last = count == len(pieces)
                yield self._output(text, ids, params, request_id, [piece], last=last)
        else:
            yield self._output(text, ids, params, request_id, pieces, last=True)

    def _output(self, text, ids, params, request_id, pieces, *, last):
        completions = []
        for index in range(params.n):
            tokens = [100 + len(word) for _, word in pieces]
            completion = CompletionOutput(
                index=index, text="".join(word for _, word in pieces), token_ids=tokens
            )
            for field in ("reasoning", "content"):
                joined = "".join(word for kind, word in pieces if kind == field)
                setattr(completion, field, joined or None)
            if params.wants_logprobs:
                named = {token: Logprob(-2.0, None, "") for token in params.logprob_token_ids or ()}
                completion.logprobs = [
                    {100 + len(word): Logprob(-0.5, 1, word), 7: Logprob(-1.5, 2, "other"), **named}
                    for _, word in pieces
                ]
            if last:
                completion.finish_reason = self.finish_reason
                if self.calls:
                    completion.finish_reason = "tool_calls"
                    completion.tool_calls = [
                        ToolCall(
                            index=i,
                            id=call[0],
                            name=call[1],
                            arguments=call[2],
                            content_before=len(completion.content or ""),
                        )
                        for i, call in enumerate(self.calls)
                    ]
            completions.append(completion)
        return RequestOutput(
            request_id=request_id or "0",
            prompt=text,
            prompt_token_ids=ids,
            outputs=completions,
            finished=last,
            num_cached_tokens=0,
            kv_transfer_params=self.transfer if last else None,
            seed=5,
        )

    async def apply_chat_template(self, messages, **_):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return {"type": "token", "prompt": text, "prompt_token_ids": self.tokenizer.encode(text)}

    async def prompt_tokens(self, prompt):
        return list(prompt["prompt_token_ids"])

    async def constrained_params(self, prompt, sampling_params, **options):
        return sampling_params

    async def tokenize(self, text, *, add_special_tokens=True):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def abort(self, request_ids):
        self.utilities.append(("abort", request_ids))

    async def health(self):
        if self.dead_error is not None:
            raise self.dead_error
        return self.health_now

    async def metrics(self):
        return self.metrics_text

    async def live_requests(self, external_ids=None):
        return [r for r in self.live if external_ids is None or r.external_id in external_ids]

    async def scheduler_stats(self):
        return SchedulerStats(
            num_running=self.open,
            num_waiting=0,
            kv_cache_usage=0.0,
            prefix_cache=PrefixCacheStats(),
        )

    async def load(self):
        status = EngineStatus(
            rank=0,
            state="serving",
            in_flight=self.open,
            num_running=self.open,
            num_waiting=0,
            waiting_prompt_tokens=6,
            kv_cache_usage=0.5,
        )
        return LoadReport.of([status], 12.0)

    async def scale(self, num_engines, *, drain_seconds=30.0):
        self.utilities.append(("scale", num_engines, drain_seconds))
        return EngineSet(3, tuple(range(num_engines)))

    async def retire(self, ranks, *, drain_seconds=30.0):
        self.utilities.append(("retire", ranks, drain_seconds))
        return EngineSet(4, (0,))

    async def pause(self, mode="abort", *, clear_cache=True):
        self.utilities.append(("pause", mode, clear_cache))
        self.paused = True

    async def resume(self):
        if self.sleep_level:
            raise HardpointError("the engine is asleep; wake_up first")
        self.paused = False

    async def is_paused(self):
        return self.paused

    async def sleep(self, level=1, mode="abort"):
        self.utilities.append(("sleep", level, mode))
        self.paused, self.sleep_level = True, level

    async def wake_up(self, tags=None):
        self.utilities.append(("wake_up", tags))
        if tags is None:
            self.paused, self.sleep_level = False, 0

    async def is_sleeping(self):
        return self.sleep_level > 0

    async def meters(self):
        return {}

    async def states(self):
        return {"acme": {"api_key": "hush", "shares": 2}}

    async def change(self, **changes):
        self.utilities.append(("change", changes))
        return self.manifest

    def settings(self):
        plugins = PluginSet(self.manifest)
        return Settings(self.config, ConfigSources(), plugins).shown()

    def server_extensions(self, server):
        hooks = HookSet()
        for plugin in self.hooks:
            name = type(plugin).__name__.lower()
            hooks.add(plugin, Source(name, f"acme:{name}", "acme", "1.0", "a test"))
        installed = [InstalledExtension(p, f"plugin {p!r}", e) for p, e in self.extensions]
        return [*installed, *server_extensions(hooks, server)]

    def argument_schemas(self):
        return self.arguments

    async def aclose(self):
        self.closed = True

    def __getattr__(self, name):
        if name.startswith("_") or name in ("add", "remove", "list", "resolve"):
            raise AttributeError(name)

        async def utility(*args, **kwargs):
            self.utilities.append((name, *args, *kwargs.values()))

        return utility


@dataclasses.dataclass
class HeldEngine(FakeEngine):
    """Holds its outputs until it is let go.

    Attributes:
        at_once: outputs of each request that are not held.
        go_on: is set: no output is held.
    """

    at_once: int = 0
    go_on: threading.Event = dataclasses.field(default_factory=threading.Event)

    async def _wait(self, count):
        await super()._wait(count)
        while count >= self.at_once and not self.go_on.is_set():
            await asyncio.sleep(0.005)


def _words(text):
    return re.findall(r"\s*\S+", text)


def configured(tables=None, **server):
    """Return a configuration with a table `server`, by default without an access log.

    Args:
        tables: others.
    """
    server = {"port": 0, "access_log": "off", **server}
    config = msgspec.convert({**(tables or {}), "server": server}, default_config_type())
    return msgspec.structs.replace(config, max_model_len=4096)
