"""The rules of step parts, and checks of the results of their methods."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from hardpoint.plugins import EngineHalf, GrammarBitmask, RequestError, RequestFault
from hardpoint.testing.suite import Rule, short_repr

HALVES = Rule(
    "contract: the loader can check and build the class and its halves",
    "return halves with hooks: of a class that derives from FrontendHalf, or that implements "
    "protocols such as RequestFilter and WorkerStep",
)
USES = Rule(
    "uses: it returns a bool, and check returns or raises a RequestError",
    "decide by the request alone, and refuse a request by a RequestError",
)
GATE = Rule(
    "gate: it returns None, a text or a WaitReason, or raises a RequestError",
    "refuse a request that can never run by a RequestError with the reason",
)
READY = Rule(
    "ready: the gate of each request ends in bounded time",
    "return None or raise a RequestError when the awaited operation has ended, failed or "
    "taken too long",
)
COSTS = Rule(
    "costs: each call gives the same amounts of resources that `capacity` names",
    "compute the amounts from the request alone, and count nothing: the engine releases them",
)
DATA = Rule(
    "data: begin returns bytes, and None in a plan without requests that use the part",
    "serialize the data for the worker halves, and find your requests among the scheduled ones",
)
MASKS = Rule(
    "masks: each planned request has no row or 1 + drafts rows, which allow some token",
    "build int32 [rows, ceil(vocab_size / 32)] with consecutive rows of each request of the plan "
    "that uses the part, and report a request for which nothing is left in `result`",
)
RESULTS = Rule(
    "results: result ends requests of the plan that use the part, each by a RequestFault",
    "return a mapping of their ids to RequestFault, empty if all go on",
)
DRAFTS = Rule(
    "drafts: drafts gives tokens of live requests that use the part, num_draft_tokens at most",
    "return a mapping of request ids to lists of token ids of the model's vocabulary, and forget "
    "requests in ended()",
)
DRAFT_LIMITS = Rule(
    "limited drafts: limit_drafts gives how many of the drafts that it was given are left",
    "return a mapping of ids of these requests to numbers from 0 to their number of drafts",
)
VERIFIED = Rule(
    "verified drafts: verify_drafts accepts drafts that equal the tokens of the rows before them",
    "return a number for each request of the step, sample its first row, and the row after each "
    "draft that you accept",
)
FIGURES = Rule(
    "figures: figures gives numbers, lists of numbers, or texts, by name",
    "return a mapping of texts to numbers or texts of a live request, {} before there are any",
)
ARRAYS = Rule(
    "arrays: arrays gives rows for positions that are computed, ascending, in one form by name",
    "number positions from 0, the first token of the prompt: a step that samples the first output "
    "token has computed the prompt's positions alone, and the next step computes that token's own, "
    "`num_prompt_tokens`",
)
CALLS = Rule(
    "calls: calls are answered with plain data, others refused by a RequestError",
    "return data for JSON, or a future of it, and raise RequestError for a method "
    "or an argument that does not exist",
)
LOST = Rule(
    "lost plans: a plan that is lost and planned again has the same masks",
    "advance by the tokens of the request, which follow a result, and not by the calls of begin; "
    "let lost() and preempted() take any plan and any request that use the part",
)
ALONE = Rule(
    "alone as together: the results of a request do not depend on others",
    "keep state by request id; a part that divides something among requests sets "
    "`shares = True` in its suite",
)
ENDED = Rule(
    "ended: nothing is kept for the id of a request that ended or was refused",
    "forget the id in ended() and in refused(), whatever the request had reached",
)
WEIGHTS = Rule(
    "weights changed: data made from earlier weights is computed again",
    "drop data that depends on weights in weights_changed() of both halves, and in the engine the "
    "record that workers have it: send its inputs with the next plan that needs it",
)
READS_ONLY = Rule(
    "reads only: plan, request and result belong to the engine",
    "copy a value before you change it",
)
WORKER = Rule(
    "worker: each method of a worker half returns a valid result, and raises nothing",
    "return None, or a finite tensor of the shape that was given, from `embedded`, `linear`, "
    "`hidden` and `logits`, two of them from `added`, a bool tensor [tokens] from `skips`, a "
    "function from `around_layers`, and bytes or None from `report`",
)
WORKER_READS = Rule(
    "worker reads only: the inputs of a worker half belong to the worker",
    "clone a tensor and change the clone, or return the changed tensor",
)


_CALL_SECONDS = 10.0


@dataclass(frozen=True)
class GateLimits:
    """Limits after which a waiting gate counts as blocked forever.

    Attributes:
        steps: in which it was asked.
        seconds: since the first of them.
    """

    steps: int
    seconds: float

    def check(self, steps: int, since: float, reason: Any) -> None:
        """Check the calls of a gate so far.

        Raises:
            Violation: there were too many.
        """
        seconds = time.monotonic() - since
        if steps > self.steps and seconds > self.seconds:
            raise READY.violation(
                f"after {steps} calls in {seconds:.1f} s gate() still returns {short_repr(reason)}"
            )


def check_declared(half: EngineHalf) -> None:
    """Check the attributes of a half.

    Raises:
        Violation: one is not an amount.
    """
    capacity, limit = half.capacity, half.num_draft_tokens
    if not isinstance(capacity, Mapping) or not all(
        isinstance(name, str) and type(amount) is int and amount >= 0
        for name, amount in capacity.items()
    ):
        raise HALVES.violation(f"capacity is {short_repr(capacity)}, expected an amount by name")
    if type(limit) is not int or limit < 0:
        raise HALVES.violation(
            f"num_draft_tokens is {short_repr(limit)}, expected a number of tokens"
        )


def check_costs(first: Any, second: Any, capacity: Mapping[str, int]) -> None:
    """Check two answers of cost() for one request.

    Raises:
        Violation: they differ, or are not amounts of resources.
    """
    for cost in (first, second):
        if not isinstance(cost, Mapping):
            raise COSTS.violation(f"cost() returned {short_repr(cost)}, expected a mapping")
        for name, amount in cost.items():
            if name not in capacity:
                raise COSTS.violation(
                    f"cost() names {name!r}, capacity has {sorted(capacity)}",
                    "set `capacity` in the half to the amount of each resource",
                )
            if type(amount) is not int or amount < 0:
                raise COSTS.violation(f"cost() returned {short_repr(amount)} of {name!r}")
    if dict(first) != dict(second):
        raise COSTS.violation(f"cost() returned {dict(first)}, and when asked again {dict(second)}")


def check_data(data: Any, users: Collection[str], *, every_plan: bool) -> None:
    """Check the result of begin() for a plan with `users`; of a part with `every_plan`.

    Raises:
        Violation: it is not bytes, or the plan has no request for which it could be.
    """
    if data is not None and not isinstance(data, bytes):
        raise DATA.violation(f"begin() returned {short_repr(data)}, expected bytes or None")
    if data is not None and not users and not every_plan:
        raise DATA.violation(
            f"begin() returned {len(data)} bytes for a plan without requests that use the part"
        )


def check_names(names: Any, users: Collection[str]) -> None:
    """Check the result of needs_results() for a plan with `users`.

    Raises:
        Violation: it names others.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise MASKS.violation(f"needs_results() returned {short_repr(names)}, expected ids")
    if foreign := set(names) - set(users):
        raise MASKS.violation(
            f"needs_results() names {sorted(map(repr, foreign))}, of the plan only "
            f"{sorted(users)} use the part"
        )


def check_mask(mask: Any, users: Mapping[str, int], vocab_size: int) -> dict[str, np.ndarray]:
    """Check a mask; return the rows of each request that has some.

    Args:
        mask: result of mask().
        users: number of drafts of each planned request that uses the part.
        vocab_size: vocabulary size of the model.

    Raises:
        Violation: it does not fit the plan.
    """
    if mask is None:
        return {}
    if not isinstance(mask, GrammarBitmask):
        raise MASKS.violation(f"mask() returned {short_repr(mask)}, expected a GrammarBitmask")
    names, bits = list(mask.request_ids), mask.bitmask
    shape = (len(names), -(-vocab_size // 32))
    if not isinstance(bits, np.ndarray) or bits.dtype != np.int32 or bits.shape != shape:
        layout = f"{getattr(bits, 'dtype', type(bits).__name__)} {getattr(bits, 'shape', '')}"
        raise MASKS.violation(f"the bitmask is {layout}, expected int32 {shape}")
    if foreign := set(names) - users.keys():
        raise MASKS.violation(
            f"mask() has rows of {sorted(foreign)}, of the plan only {sorted(users)} use the part"
        )
    rows: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(names):
        first, count = names.index(name), names.count(name)
        if count != 1 + users[name] or names[first : first + count] != [name] * count:
            raise MASKS.violation(
                f"{name!r} has {count} rows of the mask, expected {1 + users[name]} in sequence"
            )
        request_rows = np.ascontiguousarray(bits[first : first + count])
        for index in range(count):
            if not allowed_tokens(request_rows, index, vocab_size):
                raise MASKS.violation(f"row {index} of {name!r} allows no token")
        rows[name] = request_rows.copy()
    return rows


def check_faults(faults: Any, users: Collection[str]) -> None:
    """Check the result of result() for a plan with `users`.

    Raises:
        Violation: it ends others, or not by a RequestFault.
    """
    if not isinstance(faults, Mapping):
        raise RESULTS.violation(f"result() returned {short_repr(faults)}, expected a mapping")
    for name, fault in faults.items():
        if name not in users:
            raise RESULTS.violation(
                f"result() ends {name!r}, of the plan only {sorted(users)} use the part"
            )
        if not isinstance(fault, RequestFault):
            raise RESULTS.violation(f"result() returned {short_repr(fault)} for {name!r}")


def check_drafts(drafts: Any, users: Collection[str], limit: int, vocab_size: int) -> None:
    """Check the result of drafts() while `users` are live.

    Raises:
        Violation: it drafts for others, too many, or an id that is not a token.
    """
    if not isinstance(drafts, Mapping):
        raise DRAFTS.violation(f"drafts() returned {short_repr(drafts)}, expected a mapping")
    for name, tokens in drafts.items():
        if name not in users:
            raise DRAFTS.violation(
                f"drafts() names {name!r}, of the live requests only {sorted(users)} use the part"
            )
        if not isinstance(tokens, Sequence) or len(tokens) > limit:
            raise DRAFTS.violation(
                f"drafts() returned {short_repr(tokens)} for {name!r}, expected at most {limit} "
                f"tokens, its num_draft_tokens"
            )
        if wrong := [t for t in tokens if type(t) is not int or not 0 <= t < vocab_size]:
            raise DRAFTS.violation(
                f"drafts() returned the token {short_repr(wrong[0])} for {name!r}, expected token "
                f"ids in 0..{vocab_size - 1}"
            )


def check_draft_limits(limits: Any, drafts: Mapping[str, Sequence[int]]) -> None:
    """Check the result of limit_drafts() for drafts.

    Raises:
        Violation: it is of others, or no number of their drafts.
    """
    if not isinstance(limits, Mapping):
        raise DRAFT_LIMITS.violation(
            f"limit_drafts() returned {short_repr(limits)}, expected a mapping"
        )
    for name, limit in limits.items():
        if name not in drafts:
            raise DRAFT_LIMITS.violation(
                f"limit_drafts() names {name!r}, it was given drafts of {sorted(drafts)}"
            )
        if type(limit) is not int or not 0 <= limit <= len(drafts[name]):
            raise DRAFT_LIMITS.violation(
                f"limit_drafts() returned {short_repr(limit)} for {name!r}, expected a number from "
                f"0 to {len(drafts[name])}"
            )


def check_figures(figures: Any) -> None:
    """Check the result of figures() for a request.

    Raises:
        Violation: it has other values than numbers, lists of them, and texts.
    """
    listed = isinstance(figures, Mapping) and [
        (name, value if isinstance(value, list | str) else [value])
        for name, value in figures.items()
    ]
    if listed is False or not all(
        isinstance(name, str)
        and (isinstance(values, str) or all(isinstance(v, int | float) for v in values))
        for name, values in listed
    ):
        raise FIGURES.violation(f"figures() returned {short_repr(figures)}")


def check_arrays(arrays: Any, num_positions: int, forms: dict[str, tuple[Any, ...]]) -> None:
    """Check the result of arrays() for a request with some computed positions.

    Args:
        arrays: the result.
        num_positions: number of computed positions.
        forms: type and shape of a row by name, of earlier steps; completed.

    Raises:
        Violation: it is not a mapping of arrays of these positions.
    """
    if not isinstance(arrays, Mapping):
        raise ARRAYS.violation(f"arrays() returned {short_repr(arrays)}, expected a mapping")
    for name, array in arrays.items():
        positions, values = getattr(array, "positions", None), getattr(array, "values", None)
        if not (
            isinstance(name, str)
            and isinstance(positions, np.ndarray)
            and isinstance(values, np.ndarray)
            and (positions.dtype, positions.ndim, values.shape[:1])
            == (np.dtype(np.int64), 1, positions.shape)
            and bool((np.diff(positions) > 0).all())
        ):
            raise ARRAYS.violation(
                f"arrays() returned {short_repr(array)} as {name!r}, expected a PartArray of "
                f"ascending int64 positions, with a row for each"
            )
        for position in positions[[0, -1]].tolist() if len(positions) else ():
            if not 0 <= position < num_positions:
                raise ARRAYS.violation(
                    f"arrays() gave position {position} as {name!r}, expected positions in "
                    f"0..{num_positions - 1}, which are computed"
                )
        form = values.dtype, values.shape[1:]
        if forms.setdefault(name, form) != form:
            raise ARRAYS.violation(
                f"arrays() gave rows of {form[0]} {list(form[1])} as {name!r}, expected "
                f"{forms[name][0]} {list(forms[name][1])}, as in the steps before"
            )


def check_changed(method: str, returned: Any, before: torch.Tensor) -> None:
    """Check the result of a worker half's method for rows.

    Logits may be -inf, but not all of a row.

    Raises:
        Violation: it is neither None nor such rows.
    """
    if returned is None:
        return
    expected = f"expected a tensor {list(before.shape)} or None"
    if not isinstance(returned, torch.Tensor):
        raise WORKER.violation(f"{method}() returned {short_repr(returned)}, {expected}")
    if returned.shape != before.shape:
        raise WORKER.violation(f"{method}() returned a tensor {list(returned.shape)}, {expected}")
    if not torch.can_cast(returned.dtype, before.dtype):
        raise WORKER.violation(
            f"{method}() returned {returned.dtype}, expected a dtype that can be cast "
            f"to {before.dtype}"
        )
    values = returned.float()
    if method == "logits":
        values = torch.where(values == float("-inf"), values.amax(1, keepdim=True), values)
    if not values.isfinite().all():
        raise WORKER.violation(f"{method}() returned values that are not finite")


def check_added(returned: Any, before: torch.Tensor) -> None:
    """Check the result of added().

    Raises:
        Violation: it is neither None nor two finite tensors of the shape of `before`.
    """
    if returned is None:
        return
    if not isinstance(returned, tuple) or len(returned) != 2:
        form = "one tensor" if isinstance(returned, torch.Tensor) else short_repr(returned)
        raise WORKER.violation(f"added() returned {form}, expected a tuple of two tensors or None")
    for part in returned:
        check_changed("added", part, before)


def check_skipped(skipped: Any, num_tokens: int) -> None:
    """Check the result of skips().

    Raises:
        Violation: it is neither None nor a bool tensor [tokens].
    """
    if skipped is None:
        return
    is_tensor = isinstance(skipped, torch.Tensor)
    if not is_tensor or (skipped.dtype, skipped.shape) != (torch.bool, (num_tokens,)):
        form = f"{skipped.dtype} {list(skipped.shape)}" if is_tensor else short_repr(skipped)
        raise WORKER.violation(
            f"skips() returned {form}, expected torch.bool [{num_tokens}] or None"
        )


def check_function(attend: Any) -> None:
    """Check the result of around_layers().

    Raises:
        Violation: it is not a function.
    """
    if not callable(attend):
        raise WORKER.violation(
            f"around_layers() returned {short_repr(attend)}, expected a function"
        )


def check_attention(out: Any, q: torch.Tensor, layer: int, called: Sequence[int]) -> None:
    """Check a call of the function that around_layers() returned.

    Args:
        out: its result.
        q: queries that it was given.
        layer: index of the layer that is computed.
        called: layers for which it called the attention.

    Raises:
        Violation: it gave something else than attention of this layer.
    """
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        layout = f"a tensor {list(out.shape)}" if isinstance(out, torch.Tensor) else short_repr(out)
        raise WORKER.violation(
            f"the function of around_layers() returned {layout}, expected a tensor {list(q.shape)}"
        )
    if wrong := set(called) - {layer}:
        raise WORKER.violation(
            f"the function of around_layers() called the attention of layer {min(wrong)} in layer "
            f"{layer}"
        )


def check_report(report: Any) -> None:
    """Check the result of report().

    Raises:
        Violation: it is neither bytes nor None.
    """
    if report is not None and not isinstance(report, bytes):
        raise WORKER.violation(f"report() returned {short_repr(report)}, expected bytes or None")


def allowed_tokens(rows: np.ndarray | None, index: int, vocab_size: int) -> list[int]:
    """Return the tokens that a row allows; None allows all."""
    if rows is None:
        return list(range(vocab_size))
    bits = np.unpackbits(rows[index].view(np.uint8), bitorder="little")[:vocab_size]
    token_ids: list[int] = np.flatnonzero(bits).tolist()
    return token_ids


def is_allowed(rows: np.ndarray | None, index: int, token: int) -> bool:
    """Return whether a row allows a token; None allows all."""
    return rows is None or bool(rows[index].view(np.uint32)[token // 32] >> token % 32 & 1)


def check_call(
    half: EngineHalf, method: str, arguments: Mapping[str, Any], *, refuses: bool
) -> None:
    """Check a call of a program.

    Raises:
        Violation: it is not answered with plain data, or `refuses` and it is not refused.
    """
    named = f"call({method!r}, {dict(arguments)!r})"
    try:
        answer = half.call(method, arguments)
        if isinstance(answer, Future):
            answer = answer.result(_CALL_SECONDS)
        msgspec.msgpack.encode(answer)
    except RequestError as refusal:
        if not refuses:
            raise CALLS.violation(f"{named} was refused: {refusal}") from refusal
    except Exception as error:
        raise CALLS.violation(f"{named} raised {type(error).__name__}: {error}") from error
    else:
        if refuses:
            raise CALLS.violation(f"{named} returned {short_repr(answer)}, expected RequestError")
