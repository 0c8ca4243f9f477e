"""Logits processors as other engines' users write them; none of them knows of Hardpoint."""

from __future__ import annotations

import functools
import threading
from enum import Enum, auto

import numpy as np
import torch


class MoveDirectionality(Enum):
    """The stand-ins of such modules for where vLLM is not installed."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


class MinP:
    """min_p with the state of vLLM's own class: arrays by row, moved by hand.

    Method: Nguyen et al. 2024, arXiv:2407.01082.
    """

    def __init__(self, vllm_config, device, is_pin_memory):
        assert not is_pin_memory
        self.values = torch.zeros(vllm_config.scheduler_config.max_num_seqs, device=device)
        self.count = 0

    @classmethod
    def validate_params(cls, params):
        if not 0 <= params.extra_args.get("min_p", 0) <= 1:
            raise ValueError(f"min_p: expected a number from 0 to 1, got {params.extra_args}")

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.values[index] = 0
        for index, params, _, _ in batch_update.added:
            self.values[index] = (params.extra_args or {}).get("min_p", 0)
        for a, b, direction in batch_update.moved:
            first, second = self.values[a].item(), self.values[b].item()
            self.values[b] = first
            self.values[a] = second if direction == MoveDirectionality.SWAP else 0
        self.count = int((self.values != 0).sum())

    def apply(self, logits):
        if not self.count:
            return logits
        probabilities = torch.softmax(logits, dim=-1)
        floor = probabilities.amax(-1, keepdim=True) * self.values[: len(logits)].unsqueeze(1)
        return logits.masked_fill_(probabilities < floor, -torch.inf)


class OneToken:
    """The example of vLLM's documentation: only `target_token` may be produced."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.requests = {}

    @classmethod
    def validate_params(cls, params):
        target = params.extra_args and params.extra_args.get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token value {target} is not int")
        if target == 13:
            raise KeyError("thirteen")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if not batch_update:
            return
        for index, params, _, output_ids in batch_update.added:
            self.requests.pop(index, None)
            if params.extra_args and (target := params.extra_args.get("target_token")) is not None:
                self.requests[index] = (target, output_ids)
        for index in batch_update.removed:
            self.requests.pop(index, None)
        for a, b, direction in batch_update.moved:
            first, second = self.requests.pop(a, None), self.requests.pop(b, None)
            if first is not None:
                self.requests[b] = first
            if direction == MoveDirectionality.SWAP and second is not None:
                self.requests[a] = second

    def apply(self, logits):
        for row, (target, output_ids) in self.requests.items():
            # The target changes with the output's length: a list that is not live shows.
            token = (target + len(output_ids)) % self.vocab_size
            logit = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = logit
        return logits


class ReadsConfig(OneToken):
    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        self.ranks = vllm_config.parallel_config.world_size


class Sums:
    """In the form of vLLM V1, with state that `update_state` carries on by one token per call."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        for row, (outputs, known, total) in self.rows.items():
            if len(outputs) > known:
                self.rows[row] = (outputs, known + 1, total * 3 + outputs[-1])
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self.rows.pop(row, None)
            if params.extra_args:
                total = functools.reduce(
                    lambda t, token: t * 3 + token, output_ids, sum(prompt_ids)
                )
                self.rows[row] = (output_ids, len(output_ids), total)
        for a, b, direction in batch_update.moved:
            pair = {a: self.rows.pop(a, None), b: self.rows.pop(b, None)}
            back = pair[b] if direction == MoveDirectionality.SWAP else None
            self.rows |= {r: s for r, s in ((b, pair[a]), (a, back)) if s is not None}

    def apply(self, logits):
        for row, (outputs, known, total) in self.rows.items():
            assert len(outputs) == known
            logits[row, total % logits.shape[1]] += 20.0
        return logits


class Locked(Sums):
    """Cannot be copied."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()


class CountsCalls(Sums):
    """Broken: `apply` changes the state."""

    def apply(self, logits):
        for row, (outputs, known, total) in self.rows.items():
            logits[row, total % logits.shape[1]] += 20.0
            self.rows[row] = (outputs, known, total + 1)
        return logits


class Fickle(OneToken):
    """Changes its mind once it is built."""

    def __init__(self, *args):
        super().__init__(*args)
        self.is_argmax_invariant = lambda: False

    def is_argmax_invariant(self):
        return True


class Shy(OneToken):
    """Reports it only from a built object."""

    def __init__(self, *args):
        super().__init__(*args)
        self.claim = True

    def is_argmax_invariant(self):
        return self.claim


class TwoArguments(OneToken):
    def __init__(self, vllm_config, device):
        pass


class OldApply:
    """Of neither form: a V2 constructor, and `apply` without the layout of the step."""

    def __init__(self, vllm_config, req_states):
        pass

    def apply(self, logits):
        return logits


class SlotToken:
    """In the form of vLLM V2, with neither base class nor drafts in mind.

    Only `target_token` plus the number of outputs may be produced. It reads lengths from the host,
    and tokens from the shared buffers.
    """

    def __init__(self, vllm_config, req_states):
        assert vllm_config.speculative_config is None
        self.states = req_states
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.targets = np.full(req_states.max_num_reqs, -1, dtype=np.int64)
        self.staged = torch.full((req_states.max_num_reqs,), -1)

    @classmethod
    def validate_params(cls, sampling_params):
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token value {target} is not int")

    def add_request(self, req_idx, sampling_params):
        target = (sampling_params.extra_args or {}).get("target_token")
        if target == 13:
            raise KeyError("thirteen")
        self.targets[req_idx] = -1 if target is None else target
        return target is not None

    def apply_staged_writes(self):
        self.staged = torch.from_numpy(self.targets.copy())

    def apply(self, logits, ctx):
        assert len(logits) == len(ctx.expanded_idx_mapping) == len(ctx.idx_mapping_np)
        assert (ctx.pos + 1).tolist() == ctx.seq_lens_upper_bound_np.tolist()
        for row, slot in enumerate(ctx.idx_mapping_np):
            length = int(ctx.seq_lens_upper_bound_np[row])
            assert length == self.states.total_len.gpu[slot]
            assert self.states.all_token_ids.gpu[slot, length - 1] == ctx.input_ids[row]
            outputs = length - self.states.prompt_len.np[slot]
            token = (self.staged[slot] + outputs) % self.vocab_size
            logit = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = logit
        return logits


class Echo:
    """In the form of vLLM V2: tokens of the sequence come again; a new tensor is returned."""

    def __init__(self, vllm_config, req_states):
        self.states = req_states

    def apply(self, logits, ctx):
        ids = self.states.all_token_ids.gpu[ctx.expanded_idx_mapping].long()
        lengths = self.states.total_len.gpu[ctx.expanded_idx_mapping].unsqueeze(1)
        known = torch.arange(ids.shape[1], device=ids.device) < lengths
        seen = torch.zeros_like(logits).scatter_add_(1, ids, known.to(logits.dtype))
        return logits + 50.0 * (seen > 0)


class OldSlots(SlotToken):
    """Broken: keeps the state of the last request of a slot."""

    def add_request(self, req_idx, sampling_params):
        if self.targets[req_idx] < 0:
            return super().add_request(req_idx, sampling_params)
        return True


class RowsAsSlots(SlotToken):
    """Broken: takes rows for slots."""

    def apply(self, logits, ctx):
        for row in range(len(logits)):
            logits[row, self.targets[row] % self.vocab_size] += 20.0
        return logits


class BothForms(SlotToken):
    """With V2's constructor, and methods of V1 for older engines."""

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        raise AssertionError("it runs in V2's form")

    def apply(self, logits, ctx=None):
        return super().apply(logits, ctx)


class SlotReads(SlotToken):
    """Reads a field, with a default, in the method that its request names."""

    def __init__(self, vllm_config, req_states):
        super().__init__(vllm_config, req_states)
        self.config = vllm_config

    def add_request(self, req_idx, sampling_params):
        where, name = sampling_params.extra_args["read"].split(".")
        objects = {"params": sampling_params, "states": self.states, "config": self.config}
        getattr(objects[where], name, None)
        return True

    def apply(self, logits, ctx):
        return logits


class SlotValidation(SlotToken):
    def validate_params(self, sampling_params):
        pass


class InstanceValidation(OneToken):
    def validate_params(self, params):
        pass


class Everywhere(OneToken):
    """Changes every row, whichever request asked."""

    def apply(self, logits):
        logits[:] = -torch.inf
        logits[:, 70] = 0.0
        return logits


class PerRequestClass:
    """A class of per-request callables, which no factory makes."""

    def __init__(self, tokenizer, boost=1.0):
        pass

    def __call__(self, prompt_ids, output_ids, logits):
        return logits


class Stepping:
    """A class that is a factory itself: it takes the parameters of a request."""

    def __init__(self, params):
        self.token = params.extra_args["token"]

    def __call__(self, prompt_ids, output_ids, logits):
        token = self.token + len(prompt_ids) + len(output_ids)
        logits[token % len(logits)] = 1e4  # in place
        return logits


def forcing(params):
    """A factory: makes a callable of two, or none."""
    wanted = (params.extra_args or {}).get("token")
    if wanted is None:
        return None

    def force(output_ids, logits):
        forced = torch.full_like(logits, -torch.inf)  # a new tensor
        forced[(wanted + len(output_ids)) % len(logits)] = 0.0
        return forced

    return force


def _variadic(output_ids, *rest):
    return rest[-1]


def _defaulted(output_ids, logits, scale=1.0):
    return logits


def _keyword_only(output_ids, logits, *, scale):
    return logits


def _keywords(output_ids, logits, **extra):
    return logits


def _one(logits):
    return logits


def _no_answer(output_ids, logits):
    logits[0] = 5.0


def _short(output_ids, logits):
    return logits[:-1]


def _double(output_ids, logits):
    return logits.double()


def _raising(output_ids, logits):
    raise RuntimeError("out of ideas")


PRODUCTS = {
    "variadic": _variadic,
    "defaulted": _defaulted,
    "keyword_only": _keyword_only,
    "keywords": _keywords,
    "one": _one,
    "no_answer": _no_answer,
    "short": _short,
    "double": _double,
    "raising": _raising,
    "number": 7,
}


def odd(params):
    """Return the object that the request names."""
    return PRODUCTS[params.extra_args["what"]]


def lengths(params):
    """Read fields that only vLLM's parameters have."""
    stop_ids = params.all_stop_token_ids
    assert params.stop == []
    assert params.max_tokens == 4

    def ban(output_ids, logits):
        logits[list(stop_ids)] = -torch.inf
        return logits

    return ban


def two_parameters(output_ids, logits):
    logits[len(output_ids) * 3 % len(logits)] += 20.0
    return logits


def four_parameters(prompt_ids, output_ids, logits, scale):
    return logits


class Boost:
    """A callable of vLLM V0 that keeps state between its calls; it is no factory."""

    def __init__(self, token=65, verbose=False):
        self.token = token

    def __call__(self, token_ids, logits):
        logits[(self.token + len(token_ids)) % len(logits)] += 20.0
        self.token += 1
        return logits


boost = Boost()


def with_default(params, scale=1.0):
    return None
