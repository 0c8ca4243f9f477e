"""vLLM's `LLM` over Hardpoint's."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hardpoint
from hardpoint import SamplingParams as NativeSamplingParams
from hardpoint.errors import ConfigError, RequestError

from .beams import BeamSearchOutput, search
from .conversations import checked_variables, is_single, plain_messages, plain_texts
from .engine_args import EngineArgs
from .engine_internals import checked_method, no_member, worker_hint
from .helpers import Counter
from .inputs import is_one, load_chat_template, native_prompt
from .metrics import Metric, read_metrics
from .outputs import PoolingRequestOutput, RequestOutput, pooled
from .params import (
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    native_lora,
    request_options,
    with_guided_options,
)
from .params import sampling_params as vllm_params
from .special import add_statistics
from .tokenizer import TokenizerLike

_log = logging.getLogger("hardpoint")


class LLM:
    """vLLM's LLM: the constructor takes vLLM's arguments, the methods return vLLM's outputs.

    `native` is Hardpoint's LLM, for all that vLLM has not; `close`, or leaving a `with` block,
    releases it.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        """Load a model.

        Args:
            model: a directory, a .gguf file or a Hugging Face id.
            arguments: vLLM's engine arguments, see the table in the README.

        Raises:
            ConfigError, a ValueError: an argument is unknown or has no counterpart.
        """
        if model is not None:
            arguments["model"] = model
        template = arguments.pop("chat_template", None)
        self._template = None if template is None else load_chat_template(template)
        self._open(EngineArgs(**arguments))

    def _open(self, args: EngineArgs) -> None:
        translated = args.translated()
        if not args.disable_log_stats:
            add_statistics(translated)
        self.processors, self._pooling = translated.processors, translated.pooling
        self._native = hardpoint.LLM(config=translated.config(), progress=args.progress)
        self._tokenizer = TokenizerLike(self._native.tokenizer, str(self._native.config.model))
        self._version = self._native.weights.version
        self.engine_args, self.request_counter = args, Counter()
        self.pooling_tasks: dict[str, str] = {}
        self.arrivals: dict[str, float] = {}
        self._waiting: list[tuple[int, Callable[..., list[RequestOutput]]]] = []
        default = vllm_params(self._native.model.default_sampling_params())
        default = SamplingParams() if translated.neutral else default
        for name, value in translated.overrides.items():
            setattr(default, "max_tokens" if name == "max_new_tokens" else name, value)
        self._default = default

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Load a model by arguments in one object."""
        llm = cls.__new__(cls)
        llm._template = None
        llm._open(engine_args)
        return llm

    @property
    def native(self) -> hardpoint.LLM:
        """Hardpoint's LLM."""
        return self._native

    @property
    def llm_engine(self) -> Any:
        """vLLM's engine, for programs that step it themselves."""
        from .engines import LLMEngine  # noqa: PLC0415

        return LLMEngine(self)

    @llm_engine.deleter
    def llm_engine(self) -> None:
        self.close()

    @property
    def model_config(self) -> Any:
        """The model's configuration; see `LLMEngine.model_config`."""
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> Sequence[str]:
        """The tasks of the model."""
        return tuple(self._native.model.supported_tasks)

    def get_tokenizer(self) -> TokenizerLike:
        """Return the tokenizer."""
        return self._tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Accept the engine's tokenizer.

        Raises:
            RequestError: it is another one.
        """
        if isinstance(tokenizer, TokenizerLike):
            return
        raise RequestError(
            f"tokenizer: expected none, got {tokenizer!r}; it is an argument of the constructor"
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters that a call without any has."""
        return self._default.clone()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks."""
        parallel = self._native.config.parallel
        return parallel.tensor * parallel.pipeline * (parallel.data if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics, under vLLM's names and Hardpoint's.

        Raises:
            ConfigError: the engine has none.
        """
        if self.engine_args.disable_log_stats:
            raise ConfigError("disable_log_stats: expected false for metrics, got True")
        return read_metrics(self._native.metrics())

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: list[int] | int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_token_ids: Any = None,
        guided_options_request: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; see vLLM.

        Raises:
            RequestError, a ValueError: a prompt or its parameters are wrong.
        """
        if prompt_token_ids is not None:  # before vLLM 0.10
            prompts = _of_ids(prompt_token_ids)
        if guided_options_request is not None:  # before vLLM 0.10
            sampling_params = with_guided_options(
                sampling_params or self._default, guided_options_request
            )
        if prompts is None:
            raise RequestError("prompts: expected a prompt or a list of prompts, got None")
        prompt_list = [prompts] if is_one(prompts) else list(prompts)
        prompts, salts = _split(prompt_list)
        params = self._params(sampling_params)
        many = request_options(
            sampling_params,
            lora_request,
            tokenization_kwargs,
            priority=priority,
            cache_salt=salts,
            **options,
        )
        start = time.time()
        outputs = self._native.generate(prompts, params, use_tqdm=bool(use_tqdm), **many)
        return [RequestOutput.of(output, start) for output in outputs]

    def enqueue(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list[str]:
        """Keep prompts for `wait_for_completion`; return their ids."""
        prompts = [prompts] if is_one(prompts) else list(prompts)
        return self._keep(len(prompts), self.generate, prompts, sampling_params, options)

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> list[str]:
        """Keep conversations for `wait_for_completion`; return their ids."""
        count = 1 if is_single(messages) else len(messages)
        return self._keep(count, self.chat, messages, sampling_params, options)

    def _keep(
        self, count: int, call: Any, inputs: Any, params: Any, options: Mapping[str, Any]
    ) -> list[str]:
        start = sum(size for size, _ in self._waiting)
        options = {name: value for name, value in options.items() if name != "use_tqdm"}
        self._waiting.append((count, functools.partial(call, inputs, params, **options)))
        return [str(start + number) for number in range(count)]

    def wait_for_completion(self, use_tqdm: Any = True, **_: Any) -> list[RequestOutput]:
        """Complete the prompts of `enqueue` and `enqueue_chat`."""
        waiting, self._waiting = self._waiting, []
        return [output for _, call in waiting for output in call(use_tqdm=use_tqdm)]

    def chat(  # noqa: PLR0913 - as vLLM's
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; the tools' calls are text, as in vLLM. See vLLM.

        Raises:
            RequestError, a ValueError: messages or parameters are wrong.
        """
        del chat_template_content_format
        if mm_processor_kwargs:
            raise RequestError("mm_processor_kwargs: expected none; see multi_modal_data")
        many = request_options(sampling_params, lora_request, tokenization_kwargs, **options)
        params = self._params(sampling_params)
        template = load_chat_template(chat_template) or self._template
        shown = template or self._native.tokenizer.chat_template
        messages = plain_messages(messages)
        chat_template_kwargs = checked_variables(shown, chat_template_kwargs) or None
        if tools and "tools" not in (shown or "tools"):
            _log.warning("tools: ignored, because the chat template shows no tools, as in vLLM")
            tools = None
        start = time.time()
        if template is None:
            outputs = self._native.chat(
                messages,
                params,
                use_tqdm=bool(use_tqdm),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                **many,
            )
        else:
            rendered = self._render(
                [messages] if is_single(messages) else messages,
                add_generation_prompt=add_generation_prompt,
                template=template,
                tools=tools,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            outputs = self._native.generate(rendered, params, use_tqdm=bool(use_tqdm), **many)
        return [RequestOutput.of(output, start) for output in outputs]

    def _render(self, conversations: Any, **options: Any) -> list[list[int]]:
        """Return the token ids of conversations by a template of the program's own."""
        tokenizer = self._native.tokenizer
        texts = [tokenizer.apply_chat_template(messages, **options) for messages in conversations]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def beam_search(
        self, prompts: Sequence[Any], params: BeamSearchParams, lora_request: Any = None, **_: Any
    ) -> list[BeamSearchOutput]:
        """Return the likeliest outputs of each prompt, the best first."""
        prompt_list = [prompts] if is_one(prompts) else list(prompts)
        return search(self._native, prompt_list, params, native_lora(lora_request))

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Return the tensors of prompts by a task, or the output of the IO processor.

        A mapping with `data` is an input of the IO processor that is enabled.
        """
        del use_tqdm
        if isinstance(prompts, Mapping) and "data" in prompts:
            output = self._native.plugins.process(prompts["data"])
            return [PoolingRequestOutput("", output, [])]
        first = pooling_params[0] if isinstance(pooling_params, Sequence) else pooling_params
        task = pooling_task or getattr(first, "task", None)
        if task is None:
            task = next((name for name in self.supported_tasks if name != "generate"), "embed")
        options["truncate_prompt_tokens"] = truncate_prompt_tokens
        options |= {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        outputs = self._pool(prompts, pooling_params, str(task), options)
        return [pooled(output, "") for output in outputs]

    def embed(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput[Any]]:
        """Return a vector for each prompt; see vLLM."""
        return self._task("embed", prompts, options)

    def classify(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput[Any]]:
        """Return the probabilities of classes for each prompt; see vLLM."""
        return self._task("classify", prompts, options)

    def reward(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput[Any]]:
        """Return the tensors of a reward model; see vLLM."""
        options.setdefault("pooling_task", "score")
        return self.encode(prompts, **options)

    def score(  # noqa: PLR0913 - as vLLM's
        self,
        data_1: Any = None,
        data_2: Any = None,
        *,
        text_1: Any = None,
        text_2: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Return how well pairs of texts match; see vLLM."""
        del use_tqdm
        if chat_template is not None:
            raise RequestError(
                "chat_template: expected none; write the texts as the model expects them"
            )
        params = None if pooling_params is None else pooling_params.native("score")
        many = request_options(pooling_params, lora_request, tokenization_kwargs, **options)
        first, second = plain_texts(data_1 or text_1), plain_texts(data_2 or text_2)
        outputs = self._native.score(first, second, params, **many)
        return [pooled(output, "score") for output in outputs]

    def _task(self, task: str, prompts: Any, options: dict[str, Any]) -> list[Any]:
        pooling_params = options.pop("pooling_params", None)
        options.pop("use_tqdm", None)
        outputs = self._pool(prompts, pooling_params, task, options)
        return [pooled(output, task) for output in outputs]

    def _pool(self, prompts: Any, params: Any, task: str, options: dict[str, Any]) -> list[Any]:
        prompt_list = [prompts] if is_one(prompts) else list(prompts)
        prompts, options["cache_salt"] = _split(prompt_list)
        many = request_options(params, options.pop("lora_request", None), **options)
        if isinstance(params, Sequence):
            native: Any = [pooling_params.native(task) for pooling_params in params]
        else:
            native = (params or PoolingParams(**self._pooling)).native(task)
        return self._native.encode(prompts, native, **many)

    def _params(self, params: Any) -> Any:
        if isinstance(params, Sequence):
            return [self._params(item) for item in params]
        if isinstance(params, NativeSamplingParams):
            return params
        return (params or self._default).native(self.processors)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory."""
        self._native.sleep(level=level, mode=mode)  # type: ignore[arg-type]

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again."""
        self._native.wake_up(tags=tags)

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """Clear the prefix cache."""
        self._native.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """Clear the embeddings of images."""
        if self._native.model.takes_images:
            self._native.engines.reset_encoder_cache()

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by its name.

        Raises:
            RequestError: it is a function, has keyword arguments, or is unknown.
        """
        if method == "reload_weights":
            self._reload(**(kwargs or {}))
            return [None] * self.get_world_size()
        name = checked_method(method, kwargs)
        try:
            return list(self._native.collective_rpc(name, args=list(args), timeout=timeout))
        except RequestError as error:
            raise RequestError(f"{error}; {worker_hint(name)}") from None

    def _reload(self, weights_path: str | None = None, **options: Any) -> None:
        """Read weights from a folder; without one, the model's own, which `wake_up` reads again."""
        if options.pop("is_checkpoint_format", True) is not True or options:
            raise RequestError(
                "reload_weights: expected weights_path alone, with the names of the checkpoint; "
                f"{worker_hint('reload_weights')}"
            )
        if weights_path is not None:
            self._native.weights.update(weights_path)
        elif self._native.weights.version != self._version:
            raise RequestError(
                "reload_weights: expected weights_path, as the model has other weights than those "
                "of its folder; `llm.native.weights.update` takes the folder of the model"
            )

    def apply_model(self, func: Callable[..., Any]) -> list[Any]:
        """Refuse a function that gets the model.

        Raises:
            RequestError: always, with what there is instead.
        """
        raise RequestError(
            f"func: expected none, got {func!r}; activation taps and step parts read "
            f"the model's states (docs/write-an-activation-tap.md, docs/step-parts.md)"
        )

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the workers; `profiler_config` names the folder."""
        del profile_prefix
        self._native.debug.start_profile()

    def stop_profile(self) -> None:
        """Write the profiles."""
        self._native.debug.stop_profile()

    def close(self) -> None:
        """Release model, cache and processes."""
        self._native.close()

    shutdown = close

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        raise no_member("LLM", name)

    def __repr__(self) -> str:
        return f"LLM(model={str(self._native.config.model)!r})"


def _split(prompts: Sequence[Any]) -> tuple[list[Any], list[str | None] | None]:
    pairs = [native_prompt(prompt) for prompt in prompts]
    salts = [salt for _, salt in pairs]
    return [prompt for prompt, _ in pairs], salts if any(salts) else None


def _of_ids(ids: Any) -> list[Any]:
    return [ids] if ids and isinstance(ids[0], int) else list(ids)
