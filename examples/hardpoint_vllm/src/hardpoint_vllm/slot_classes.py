"""Adapter for classes in the form of the logits processors of vLLM's model runner V2: slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    BatchUpdate,
    LogitsContext,
    LogitsRequest,
    Phase,
    PrepareContext,
    RowMap,
    Rows,
)
from hardpoint.plugins.sampling import Added
from hardpoint.toolkit.logits_calls import drafts_of

from .drafts import base_of, by_depth
from .objects import AdapterArguments, KeptFields, VllmConfigFields
from .rows import VLLMClass, run_on

if TYPE_CHECKING:
    import numpy as np
    import torch


class DeviceField(KeptFields):
    """A tensor of `req_states` that is on the device alone, as vLLM's StagedWriteTensor.

    Attributes:
        gpu: on the device of the logits; which may be a CPU.
    """

    described = "this field of req_states"
    available = "gpu"

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate zeros, int32 by default."""
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        self.gpu = torch.zeros(shape, dtype=dtype or torch.int32, device=device)


class HostField(KeptFields):
    """A tensor of `req_states` with a copy on the host, as vLLM's UvaBackedTensor.

    Attributes:
        cpu, np: on the host; two views of one memory.
        gpu: on the device of the logits.
    """

    described = "this field of req_states"
    available = "cpu, np and gpu"

    def __init__(
        self, size: int | Iterable[int], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate zeros, int32 by default."""
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        shape = (size,) if isinstance(size, int) else tuple(size)
        self.cpu = torch.zeros(shape, dtype=dtype or torch.int32)
        self.np: np.ndarray[Any, Any] = self.cpu.numpy()
        self.gpu = self.cpu if device.type == "cpu" else self.cpu.to(device)

    def flush(self) -> None:
        """Copy the values of the host to the device."""
        if self.gpu is not self.cpu:
            self.gpu.copy_(self.cpu)


class RequestStates(KeptFields):
    """The object `req_states` of such classes: tokens and lengths of the requests, by slot.

    Attributes:
        all_token_ids: [max_num_reqs, max_model_len], valid up to `total_len`.
        prompt_len: [max_num_reqs].
        prefill_len: [max_num_reqs]; tokens when the request entered the batch.
        total_len: [max_num_reqs]; prompt and outputs.
    """

    described = "the req_states given to classes in vLLM's form"
    available = (
        "device, max_num_reqs, vocab_size, all_token_ids.gpu, prompt_len, prefill_len and "
        "total_len.gpu"
    )

    def __init__(self, context: LogitsContext) -> None:
        """Allocate the tensors.

        Raises:
            ValueError: the context has no `max_model_len`.
        """
        if not context.max_model_len:
            raise ValueError("a class in vLLM V2's form needs max_model_len of the context, got 0")
        slots, device = context.max_num_seqs, context.device
        self.device = device
        self.max_num_reqs = slots
        self.vocab_size = context.vocab_size
        self.all_token_ids = DeviceField((slots, context.max_model_len), device)
        self.prompt_len = HostField(slots, device)
        self.prefill_len = HostField(slots, device)
        self.total_len = DeviceField((slots,), device)

    def write(self, slots: Sequence[int], places: Sequence[int], tokens: Sequence[int]) -> None:
        """Write tokens, one for each slot and place in its sequence."""
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

        if slots:
            index = to_device([slots, places], self.device)
            values = to_device(tokens, self.device, torch.int32)
            self.all_token_ids.gpu.index_put_((index[0], index[1]), values)

    def set_lengths(self, lengths: dict[int, int]) -> None:
        """Set `total_len` of slots."""
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

        if lengths:
            index = to_device(list(lengths), self.device)
            values = to_device(list(lengths.values()), self.device, torch.int32)
            self.total_len.gpu.index_copy_(0, index, values)


@dataclass(frozen=True, eq=False)
class StepLayout(KeptFields):
    """The object `ctx` of such classes: the rows of a step. Each request has one row.

    Attributes:
        expanded_idx_mapping, idx_mapping: int64 [rows], slots.
        idx_mapping_np: the same on the host.
        expanded_local_pos: int32 [rows], zeros.
        input_ids: int32 [rows], last token before the one that is sampled.
        pos: int64 [rows], its place in the sequence.
        seq_lens_upper_bound_np: int32 [rows], exact: `pos` + 1.
    """

    described = "the LogitsContext given to classes in vLLM's form"
    available = (
        "expanded_idx_mapping, idx_mapping, idx_mapping_np, expanded_local_pos, input_ids, pos and "
        "seq_lens_upper_bound_np"
    )

    expanded_idx_mapping: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray[Any, Any]
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    pos: torch.Tensor
    seq_lens_upper_bound_np: np.ndarray[Any, Any]


@dataclass(eq=False)
class _Slot:
    """The place of a request, which it keeps while it is in the batch.

    Attributes:
        outputs: the request's live output tokens.
        prompt_len: tokens of its prompt.
        written: tokens that `req_states` has.
        changes: whether the class changes the request's logits.
        failed: what its `add_request` raised.
    """

    number: int
    outputs: Sequence[int]
    prompt_len: int
    written: int
    changes: bool = False
    failed: BaseException | None = None


class VLLMV2Class(VLLMClass):
    """Runs a class in vLLM V2's form on the rows of the requests that use it.

    Rows after draft tokens run one position after the other, with the drafts as tokens of the
    sequence. So the class sees what it sees without drafts, and need not know of any.
    """

    contract = 1
    phase = Phase.PENALTY
    after = ("penalties",)
    adapter = "vLLM V2 class"

    def __init__(self, context: LogitsContext) -> None:
        """Construct the external object."""
        super().__init__(context)
        self._states = RequestStates(context)
        self._inner = self.external.target(VllmConfigFields(context), self._states)
        self._rows = RowMap(self._started)

    @classmethod
    def prepare(cls, arguments: AdapterArguments, context: PrepareContext) -> AdapterArguments:
        """Call the class's `validate_params`; check that the prompt has ids everywhere.

        Raises:
            ValueError: it has embeddings.
        """
        prompt: Any = context.prompt_token_ids  # None in place of embeddings
        if prompt is None or None in prompt:
            raise ValueError(
                "a class in vLLM V2's form needs the ids of the whole prompt, which has embeddings"
            )
        return super().prepare(arguments, context)

    def update_state(self, update: BatchUpdate | None) -> None:
        """Give slots to requests that came, and write the tokens since the last step."""
        self._rows.apply(update)
        slots, places, tokens = [], [], []
        lengths: dict[int, int] = {}
        for slot in self._slots():
            first = slot.written - slot.prompt_len
            for place, token in enumerate(slot.outputs[first:], slot.written):
                slots.append(slot.number)
                places.append(place)
                tokens.append(token)
                slot.written = place + 1
            lengths[slot.number] = slot.written
        self._states.write(slots, places, tokens)
        self._states.set_lengths(lengths)
        self._states.prompt_len.flush()
        self._states.prefill_len.flush()
        if hasattr(self._inner, "apply_staged_writes"):
            self._inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits that the external object returns for the rows.

        Raises:
            Exception: what `add_request` raised for the request of a row.
        """
        requests = rows.requests
        slots = [self._rows[base_of(request).row] for request in requests]
        for slot in slots:
            if slot.failed is not None:
                raise slot.failed
        groups = by_depth(requests)
        try:
            for depth, group in enumerate(groups):
                source = [index for index in group if slots[index].changes]
                if source:
                    if depth:
                        self._write_drafts([(slots[i], drafts_of(requests[i])) for i in source])
                    layout = self._layout([(slots[i], requests[i]) for i in source], depth)
                    logits = run_on(logits, source, lambda part: self._inner.apply(part, layout))  # noqa: B023 - called at once
        finally:
            if len(groups) > 1:
                self._states.set_lengths({slot.number: slot.written for slot in slots})
        return logits

    def _started(self, added: Added) -> _Slot | None:
        """Return the slot of a request that came; None if it does not use the plugin."""
        params = self.params_of(added.params)
        if params is None:
            return None
        prompt = added.prompt_token_ids
        assert prompt is not None, "see prepare"
        used = {slot.number for slot in self._slots()}
        number = next(n for n in range(self._states.max_num_reqs) if n not in used)
        ids = [*prompt, *added.output_token_ids]
        slot = _Slot(number, added.output_token_ids, len(prompt), len(ids))
        self._states.write([number] * len(ids), range(len(ids)), ids)
        self._states.prompt_len.np[number] = len(prompt)
        self._states.prefill_len.np[number] = len(ids)
        try:
            add = getattr(self._inner, "add_request", None)
            slot.changes = True if add is None else bool(add(number, params))
        except KeyboardInterrupt:
            raise
        except BaseException as cause:  # of whatever class, such as SystemExit
            slot.failed = cause  # raised for the rows of this request
        return slot

    def _slots(self) -> list[_Slot]:
        return [self._rows[row] for row in self._rows]

    def _write_drafts(self, rows: Sequence[tuple[_Slot, Sequence[int]]]) -> None:
        """Make the draft tokens before rows tokens of their sequences."""
        written = [
            (slot.number, place, token)
            for slot, drafts in rows
            for place, token in enumerate(drafts, slot.written)
        ]
        self._states.write(*(list(column) for column in zip(*written, strict=True)))
        self._states.set_lengths({slot.number: slot.written + len(drafts) for slot, drafts in rows})

    def _layout(self, rows: Sequence[tuple[_Slot, LogitsRequest]], depth: int) -> StepLayout:
        import numpy as np  # noqa: PLC0415 - as torch
        import torch  # noqa: PLC0415 - the contract imports no torch until it is used

        from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

        device = self._states.device
        numbers = np.array([slot.number for slot, _ in rows], dtype=np.int64)
        lengths = np.array([slot.written + depth for slot, _ in rows], dtype=np.int32)
        last = [
            int((request.output_token_ids or request.prompt_token_ids)[-1]) for _, request in rows
        ]
        mapping = to_device(numbers, device)
        return StepLayout(
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=numbers,
            expanded_local_pos=torch.zeros(len(rows), dtype=torch.int32, device=device),
            input_ids=to_device(last, device, torch.int32),
            pos=to_device(lengths.astype(np.int64) - 1, device),
            seq_lens_upper_bound_np=lengths,
        )
