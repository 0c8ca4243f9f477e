"""The worker half of pooling: feeds poolers with hidden states, chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hardpoint.plugins import (
    Arguments,
    ModelError,
    NewRequest,
    Pooler,
    PoolerContext,
    PromptPooler,
    SchedulerOutput,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.step_part import HiddenStates, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.typed import ReadOnlyList, prepared_type

from .folder import DenseLayer, ModelPooling
from .messages import PooledPrompt, PoolingReport
from .requests import KIND, PAIRED

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.step_part.components import ComponentCalls
    from hardpoint.plugins.step_part.worker_data import StepRows


@dataclass
class _Pooler:
    """A pooler, and its guard."""

    pooler: Pooler
    calls: ComponentCalls
    arguments: type[Arguments]


@dataclass
class _PooledPrompt:
    """A prompt that is pooled.

    Attributes:
        state: None once it has failed.
        missing: tokens that are not computed yet.
    """

    params: PoolingParams
    pooler: _Pooler
    state: PromptPooler | None
    missing: int


_Alike = tuple[Sequence[int], int | None, bool]
"""Shape of a result, the dimensions that were asked for, and whether it is scaled."""


class PoolingWorker(WorkerStep, HiddenStates):
    """Pools the hidden states of requests, in the rank that has the last ones."""

    only_users = True

    def __init__(self, context: WorkerHalfContext, model: ModelPooling) -> None:
        """Load the dense layers of the model.

        Raises:
            ModelError: their weights are missing, or of other shapes.
        """
        self._context, self._components = context, context.components
        self._activation, self._activates = model.activation, model.activates
        sizes = [context.hidden_size, *(layer.out_features for layer in model.dense)]
        for layer, size in zip(model.dense, sizes, strict=False):
            if layer.in_features != size:
                raise ModelError(
                    f"{layer.folder / 'config.json'}: in_features: expected {size}, the size of "
                    f"its input, got {layer.in_features}"
                )
        self._dense = [_Dense(layer, context.device) for layer in model.dense]
        self._poolers: dict[str, _Pooler] = {}
        self._prompts: dict[str, _PooledPrompt] = {}
        self._pooled: dict[_Alike, list[tuple[str, _PooledPrompt, torch.Tensor]]] = {}
        self._report = PoolingReport()

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Start the new pooling requests; start preempted ones again."""
        for new in plan.new_requests:
            if (params := new.source.pooling_params) is not None:
                self._start(new, params)

    def _start(self, new: NewRequest, params: PoolingParams) -> None:
        source, name = new.source, params.pooler
        assert name is not None, "the frontend's half names one"
        pooler = self._pooler(name)
        plain = source.plugin_args.get(f"{KIND}/{name}", {})
        missing = len(source.prompt_token_ids) - new.num_computed_tokens
        prompt = _PooledPrompt(params, pooler, None, missing)
        self._prompts[source.request_id] = prompt
        prompt.state = self._called(
            source.request_id,
            "start",
            prompt,
            pooler.pooler.start,
            ReadOnlyList(source.known_prompt_ids),
            msgspec.convert(plain, pooler.arguments),
        )
        if prompt.state is not None and not isinstance(prompt.state, PromptPooler):
            type_name = type(prompt.state).__name__
            self._fail(
                source.request_id, prompt, f"start() gave {type_name}, expected a PromptPooler"
            )

    def _pooler(self, name: str) -> _Pooler:
        if name not in self._poolers:
            context, components = self._context, self._components
            loaded = context.loaded
            whole = loaded if context.world_size == 1 else None
            pooler = components.create(
                KIND,
                name,
                PoolerContext,
                device=context.device,
                hidden_size=context.hidden_size,
                ops=None if loaded is None else loaded.ops,
                unembed=None if whole is None else whole.model.compute_logits,
            )
            cls = cast(type[Pooler], components.find(KIND, name))
            self._poolers[name] = _Pooler(pooler, components.calls(KIND, name), prepared_type(cls))
        return self._poolers[name]

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> None:
        """Give each request its hidden states; finish complete prompts."""
        for index, name in enumerate(rows.request_ids):
            first, end = rows.starts[index : index + 2]
            prompt = self._prompts[name]
            prompt.missing -= end - first
            if prompt.state is None:
                continue
            self._called(name, "update", prompt, prompt.state.update, hidden[first:end])
            if prompt.missing <= 0 and prompt.state is not None:
                self._finish(name, prompt, prompt.state)
        if self._pooled:
            self._report_pooled()

    def _finish(self, name: str, prompt: _PooledPrompt, state: PromptPooler) -> None:
        """Keep the result of a prompt, to be reported with the other results of the step."""
        pooled = self._called(name, "finish", prompt, state.finish)
        if prompt.state is None:
            return
        if (defect := self._defect(pooled, prompt)) is not None:
            self._fail(name, prompt, f"finish() gave {defect}")
            return
        prompt.state = None
        params = prompt.params
        conversion: tuple[int | None, bool] = None, False
        if params.task in PAIRED:
            values = self._classified(pooled, params)
        else:
            values, conversion = pooled.float(), (params.dimensions, bool(params.normalize))
            if not prompt.pooler.pooler.per_token:
                for dense in self._dense:
                    values = dense(values)
        group = self._pooled.setdefault((values.shape, *conversion), [])
        group.append((name, prompt, values))

    def _report_pooled(self) -> None:
        import torch  # noqa: PLC0415 - halves elsewhere load without it

        for (_, dimensions, normalize), results in self._pooled.items():
            values = torch.stack([values for *_, values in results])
            values = _as_asked(values, dimensions, normalize=normalize)
            finite = values.isfinite().reshape(len(results), -1).all(1).tolist()
            arrays = values.cpu().numpy().astype("<f4")
            for (name, prompt, _), is_finite, array in zip(results, finite, arrays, strict=True):
                if is_finite:
                    self._report.pooled[name] = PooledPrompt(list(array.shape), array.tobytes())
                else:
                    self._fail(name, prompt, "finish() gave numbers that are not finite")
        self._pooled.clear()

    def _classified(self, pooled: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the numbers of the classes of a prompt; of the task "score", the only one."""
        loaded = self._context.loaded
        assert loaded is not None, "the engine has made the context"
        assert loaded.classify is not None, "the task is refused of other models"
        values = loaded.classify(pooled.unsqueeze(0))[0].float()
        use_activation = params.use_activation
        if self._activates if use_activation is None else use_activation:
            values = (
                values.softmax(-1)
                if self._activation == "softmax"
                else getattr(values, self._activation)()
            )
        return values[0] if params.task == "score" else values

    def _defect(self, pooled: Any, prompt: _PooledPrompt) -> str | None:
        import torch  # noqa: PLC0415 - halves elsewhere load without it

        per_token, size = prompt.pooler.pooler.per_token, self._context.hidden_size
        expected = f"a tensor [{'vectors, ' if per_token else ''}{size}] of floating-point numbers"
        if not isinstance(pooled, torch.Tensor):
            return f"{type(pooled).__name__}, expected {expected}"
        shape = list(pooled.shape)
        if len(shape) != 1 + per_token or shape[-1] != size or not pooled.is_floating_point():
            return f"{shape} of {pooled.dtype}, expected {expected}"
        return None

    def _called(
        self, name: str, method: str, prompt: _PooledPrompt, function: Any, *args: Any
    ) -> Any:
        try:
            return prompt.pooler.calls.run(method, function, *args)
        except BaseException as cause:
            described = self._context.describe_fault(cause)  # raises an interrupt again
            self._fail(name, prompt, f"{method}() failed: {described}")
            return None

    def _fail(self, name: str, prompt: _PooledPrompt, defect: str) -> None:
        prompt.state = None
        pooler = prompt.pooler.pooler.name
        source = self._components.source(KIND, pooler)
        self._report.failed[name] = f"{source}: its {defect}", pooler

    def report(self) -> bytes | None:
        """Return the results of the step."""
        report, self._report = self._report, PoolingReport()
        if not report.pooled and not report.failed:
            return None
        return msgspec.msgpack.encode(report)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests."""
        for name in request_ids:
            self._prompts.pop(name, None)

    def close(self) -> None:
        """Close the poolers."""
        for pooler in self._poolers.values():
            self._components.close(pooler.pooler)


def _as_asked(values: torch.Tensor, dimensions: int | None, *, normalize: bool) -> torch.Tensor:
    """Return vectors cut to the dimensions that were asked for, then scaled to length 1."""
    if dimensions is not None:
        values = values[..., :dimensions]
    if normalize:
        values = values / values.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return values


class _Dense:
    """A linear layer and its activation, in float32."""

    def __init__(self, layer: DenseLayer, device: Any) -> None:
        """Load the weights.

        Raises:
            ModelError: they are missing, damaged, or of other shapes.
        """
        import safetensors  # noqa: PLC0415 - with torch, which halves elsewhere load without
        import torch  # noqa: PLC0415

        path = layer.folder / "model.safetensors"
        shapes = {"linear.weight": [layer.out_features, layer.in_features]}
        if layer.bias:
            shapes["linear.bias"] = [layer.out_features]
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if (sizes := {name: list(tensor.shape) for name, tensor in tensors.items()}) != shapes:
            raise ModelError(f"{path}: expected tensors of the shapes {shapes}, got {sizes}")
        self._weight = tensors["linear.weight"].float().to(device)
        bias = tensors.get("linear.bias")
        self._bias = None if bias is None else bias.float().to(device)
        self._activation = getattr(torch.nn, layer.activation)()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        product = self._weight @ values
        result: torch.Tensor = self._activation(
            product if self._bias is None else product + self._bias
        )
        return result
