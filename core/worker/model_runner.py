"""The model runner: carries out a plan on the persistent batch."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.plugins import (
    AttentionBackend,
    EngineCoreRequest,
    ForwardBatch,
    LogitsRequest,
    Model,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenLogprobs,
    typed,
)
from hardpoint.plugins.logits import LogitsPlugin

from ..sampling.logprobs import gather_logprobs
from ..sampling.stage import SamplingStage
from .batch import InputBatch, StepInput

__all__ = ["ModelRunner"]

_PROMPT_ROWS = 256  # rows of logits held at once for prompt log-probabilities


class ModelRunner:
    """Runs the model over a plan's tokens, then samples where a sequence's end was reached."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampling: SamplingStage,
        batch: InputBatch,
        processors: dict[str, type[LogitsPlugin]],
        device: torch.device,
    ) -> None:
        """`processors` are the logits processors' classes by name, for their `Arguments`."""
        self._model = model
        self._attention = attention
        self._sampling = sampling
        self._batch = batch
        self._argument_types = {name: cls.Arguments for name, cls in processors.items()}
        self._device = device
        self._specs = model.kv_specs()
        self._caches: list[Any] = []
        self._pending: tuple[StepInput, torch.Tensor] | None = None

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache of every layer."""
        self._caches = [self._attention.allocate(spec, num_blocks) for spec in self._specs]

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model; return None if `sample` has to follow."""
        self._apply(plan)
        if plan.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        step = self._batch.prepare(plan.num_scheduled_tokens, self._device)
        attention_plan = self._attention.plan(step.attention)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attention.attend(
                self._specs[layer], self._caches[layer], attention_plan, q, k, v
            )

        hidden = self._model.forward(ForwardBatch(step.token_ids, step.positions, attend))
        self._pending = (step, hidden)
        return None

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Sample from what `execute` computed."""
        assert self._pending is not None, "sample() without an execute() that returned None"
        (step, hidden), self._pending = self._pending, None
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(step, hidden))
        requests = [r for r, samples in zip(step.requests, step.samples, strict=True) if samples]
        if not requests:
            return output
        last = torch.from_numpy(step.attention.query_starts[1:][step.samples] - 1)
        tokens, logprobs = self._sampling.run(self._logits(hidden[last.to(self._device)]), requests)
        for request, token in zip(requests, tokens, strict=True):
            self._batch.append(request.request_id, token)
            self._sampling.pipeline.advance(request, token)
            output.sampled_token_ids[request.request_id] = [token]
        output.logprobs = {request_id: [entry] for request_id, entry in logprobs.items()}
        return output

    def _apply(self, plan: SchedulerOutput) -> None:
        """Bring the batch up to date with the plan."""
        for request_id in plan.finished_request_ids | plan.preempted_request_ids:
            self._batch.remove(request_id)
        for cached in plan.cached_requests:
            self._batch.extend_blocks(cached.request_id, cached.new_block_ids)
        for new in plan.new_requests:
            self._add(new)

    def _add(self, new: NewRequest) -> None:
        source, outputs = new.source, list(new.output_token_ids)
        request = LogitsRequest(
            request_id=source.request_id,
            prompt_token_ids=source.prompt_token_ids,
            output_token_ids=outputs,
            params=source.params,
            stop_token_ids=source.stop_token_ids,
            child_index=source.child_index,
            arguments=self._arguments(source),
        )
        self._sampling.pipeline.start(request)
        self._batch.add(request, outputs, new.block_ids, new.num_computed_tokens)

    def _arguments(self, source: EngineCoreRequest) -> dict[str, Any]:
        return {
            name: typed.convert(plain, self._argument_types[name], path=f"plugin_args.{name}")
            for name, plain in source.plugin_args.items()
        }

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden).float()

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs | None]]:
        """Return the log-probabilities of prompt tokens that this step's positions predict."""
        result: dict[str, list[TokenLogprobs | None]] = {}
        for index, request in enumerate(step.requests):
            count = request.params.prompt_logprobs
            start = int(step.starts[index])
            prompt = request.prompt_token_ids
            if count is None or start >= len(prompt):
                continue
            first, end = step.attention.query_starts[index : index + 2]
            targets = prompt[start + 1 : start + 1 + int(end - first)]
            entries: list[TokenLogprobs | None] = [] if start else [None]
            for offset in range(0, len(targets), _PROMPT_ROWS):
                part = targets[offset : offset + _PROMPT_ROWS]
                logits = self._logits(hidden[first + offset : first + offset + len(part)])
                chosen = torch.tensor(part, device=self._device)
                entries += gather_logprobs(logits, chosen, [count] * len(part))
            result[request.request_id] = entries
        return result
