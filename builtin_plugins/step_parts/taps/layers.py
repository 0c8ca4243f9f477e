"""The worker half of activation taps: calls them in the layers of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from hardpoint.plugins import (
    ActivationTap,
    ActivationTapContext,
    EngineCoreRequest,
    RequestError,
    SchedulerOutput,
    TapRows,
    TapSite,
)
from hardpoint.plugins.step_part import ResidualStream, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext

from .messages import TapReport, TapValues
from .requests import KIND, Tap, Taps

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentCalls
    from hardpoint.plugins.step_part.worker_data import StepRows


_PLACES: dict[Literal["attention", "mlp"], tuple[str, ...]] = {
    "attention": ("attention_output",),
    "mlp": ("mlp_output", "layer_output"),
}


@dataclass(frozen=True)
class _Request:
    """A request that uses taps.

    Attributes:
        taps: the request's taps.
        num_prompt_tokens: length of its prompt.
        forms: dtype and shape of a position's numbers, by key of the reading.
    """

    taps: Sequence[Tap]
    num_prompt_tokens: int
    forms: dict[str, tuple[torch.dtype, list[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _TapCall:
    """The requests of a step for which a tap is called at a site.

    Attributes:
        request_ids: in the order of their tokens.
        indices: their tokens, within the tokens of all users; None is all.
        rows: as the tap gets them.
    """

    request_ids: Sequence[str]
    indices: torch.Tensor | None
    rows: TapRows


class _FailedError(Exception):
    """The result of a tap cannot be used; the text follows its name in messages."""


class TapsInLayers(WorkerStep, ResidualStream):
    """Calls the taps of a step's requests, and reports their readings."""

    only_users = True

    def __init__(self, context: WorkerHalfContext, taps: Taps, *, samples: bool) -> None:
        """Build the enabled taps.

        Args:
            taps: finds the taps of requests.
            samples: whether the engine reads the report of this rank.

        Raises:
            PluginError: one cannot be built.
        """
        self._context, self._taps, self._reports = context, taps, samples
        self._built: dict[str, tuple[ActivationTap, ComponentCalls]] = {}
        try:
            for name in taps.components.enabled(KIND):
                self._built[name] = self._build(name), taps.components.calls(KIND, name)
        except BaseException:
            self.close()
            raise
        self._requests: dict[str, _Request] = {}
        self._first: dict[str, int] = {}
        self._last_form: dict[str, tuple[torch.dtype, list[int]]] = {}
        self._rows: StepRows | None = None
        self._calls: dict[tuple[str, TapSite], _TapCall] = {}
        self._exited: torch.Tensor | None = None  # tokens of all users that skip later layers
        self._missing: set[tuple[str, TapSite]] = set()
        self._read: list[tuple[str, str, torch.Tensor]] = []
        self._report = TapReport()

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the positions of a step, and the taps of new requests."""
        self._first = msgspec.msgpack.decode(data, type=dict[str, int])
        self._rows, self._calls, self._read = None, {}, []
        self._report = TapReport()
        for new in plan.new_requests:
            if self._taps.are_used(new.source):
                self._start(new.source)
        users = [self._requests[name] for name in self._first]
        sites = {(tap.name, site) for user in users for tap in user.taps for site in tap.sites}
        self._missing = sites
        self.layers = frozenset(site.layer for _, site in sites)

    def _build(self, name: str) -> ActivationTap:
        context, loaded = self._context, self._context.loaded
        whole = loaded if context.world_size == 1 else None
        tap: ActivationTap = self._taps.components.create(
            KIND,
            name,
            ActivationTapContext,
            device=context.device,
            hidden_size=context.hidden_size,
            ops=None if loaded is None else loaded.ops,
            unembed=None if whole is None else whole.model.unembed,
        )
        return tap

    def _start(self, source: EngineCoreRequest) -> None:
        taps: Sequence[Tap] = ()
        try:
            taps = self._taps.of(source)
        except RequestError as error:  # the engine's half got other sites
            self._report.failed[source.request_id] = str(error), ""
        before = self._requests.get(source.request_id)  # it was preempted
        forms = {} if before is None else before.forms
        self._requests[source.request_id] = _Request(taps, len(source.prompt_token_ids), forms)

    def added(
        self,
        layer: int,
        branch: Literal["attention", "mlp"],
        residual: torch.Tensor,
        delta: torch.Tensor,
        rows: StepRows,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Call the taps of a layer after one of its branches; return their changes."""
        if self._rows is not rows:  # of a step that runs again, the last pass counts
            self._rows, self._calls, self._exited = rows, dict(self._calls_of(rows)), None
            self._read = []
        before, added = residual, delta
        for place in _PLACES[branch]:
            for (name, site), call in self._calls.items():
                if site == (layer, place):
                    self._missing.discard((name, site))
                    residual, delta = self._at(name, site, call, residual, delta)
        is_changed = residual is not before or delta is not added
        return (residual, delta) if is_changed else None

    def skips(self, layer: int, rows: StepRows) -> torch.Tensor | None:  # noqa: ARG002
        """Return the tokens for which a tap has ended the layers of the step."""
        return self._exited if self._rows is rows else None

    def _calls_of(self, rows: StepRows) -> Iterator[tuple[tuple[str, TapSite], _TapCall]]:
        """Yield the calls of a step, in the order of the taps."""
        places = {name: index for index, name in enumerate(rows.request_ids)}
        users: dict[tuple[str, TapSite], list[tuple[str, Any]]] = {}
        for name in rows.request_ids:
            for tap in self._requests[name].taps:
                for site in tap.sites:
                    users.setdefault((tap.name, site), []).append((name, tap.arguments))
        order = {name: index for index, name in enumerate(self._taps.components.enabled(KIND))}
        for key in sorted(users, key=lambda key: order[key[0]]):
            names = [name for name, _ in users[key]]
            spans = [range(*rows.starts[places[name] : places[name] + 2]) for name in names]
            starts = [0, *np.cumsum([len(span) for span in spans]).tolist()]
            is_all = starts[-1] == rows.starts[-1]
            indices = [index for span in spans for index in span]
            yield (
                key,
                _TapCall(
                    names,
                    None if is_all else torch.tensor(indices, device=self._context.device),
                    TapRows(
                        arguments=[arguments for _, arguments in users[key]],
                        starts=starts,
                        first_positions=[self._first[name] for name in names],
                        prompt_lens=[self._requests[name].num_prompt_tokens for name in names],
                        device=self._context.device,
                    ),
                ),
            )

    def _at(
        self,
        name: str,
        site: TapSite,
        call: _TapCall,
        residual: torch.Tensor,
        delta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_sum = site.place == "layer_output"
        values = _of(delta, call)
        if is_sum:
            values = values + _of(residual, call)
        tap = self._built[name][0]
        changed = self._called(tap, "change", site, values, call)
        if changed:
            values = _replaced(values, changed, call)
            # Set, not added: kernels that add them give these very bits, and others keep theirs.
            if is_sum:
                residual, delta = _with(residual, values, call), _with(delta, None, call)
            else:
                delta = _with(delta, values, call)
        if is_sum:
            for places, exits in self._called(tap, "exits", site, values, call):
                self._exit(exits, places, call)
        if self._reports:
            for places, values_read in self._called(tap, "read", site, values, call):
                self._keep(_key(tap, site), values_read, places, call)
        return residual, delta

    def _exit(self, exits: torch.Tensor, places: range, call: _TapCall) -> None:
        starts, num_tokens = call.rows.starts, self._rows.starts[-1] if self._rows else 0
        span = slice(starts[places.start], starts[places.stop])
        exited = exits.new_zeros(num_tokens) if self._exited is None else self._exited.clone()
        exited[span if call.indices is None else call.indices[span]] |= exits
        self._exited = exited

    def _called(
        self, tap: ActivationTap, method: str, site: TapSite, values: torch.Tensor, call: _TapCall
    ) -> list[tuple[range, torch.Tensor]]:
        """Return the results of a method, and the places of the requests that each is of.

        If it fails for all together, it is called for each on its own. Requests for which it fails
        end; they keep the values that they have.
        """
        if getattr(type(tap), method) is getattr(ActivationTap, method):
            return []
        every = range(len(call.request_ids))
        try:
            return self._results(tap, method, site, values, call, every)
        except BaseException as cause:
            self._context.describe_fault(cause)  # raises an interrupt again
            if len(every) == 1:
                self._fail(tap, method, call.request_ids[0], cause)
                return []
        results = []
        for place in every:
            try:
                single = range(place, place + 1)
                results += self._results(tap, method, site, values, call, single)
            except BaseException as cause:
                self._fail(tap, method, call.request_ids[place], cause)
        return results

    def _results(
        self,
        tap: ActivationTap,
        method: str,
        site: TapSite,
        values: torch.Tensor,
        call: _TapCall,
        places: range,
    ) -> list[tuple[range, torch.Tensor]]:
        """Return the result of a method for all requests or one of them; none if it gives None.

        Raises:
            _FailedError: it cannot be used.
            BaseException: the method failed.
        """
        starts, names = call.rows.starts, call.request_ids[places.start : places.stop]
        is_all = len(names) == len(call.request_ids)
        rows = call.rows if is_all else _single_request(call.rows, places.start)
        rows_of_places = values[starts[places.start] : starts[places.stop]]
        result = self._result(tap, method, site, rows_of_places, rows)
        if result is None:
            return []
        if method == "read":
            self._check_form(_key(tap, site), names, result)
        return [(places, result)]

    def _check_form(self, key: str, request_ids: Sequence[str], result: torch.Tensor) -> None:
        """Check that values can be joined with values of the same requests in earlier steps.

        New requests are compared with the last ones: if their form differs, the tap is called for
        each request alone, which gives the form of each.
        """
        form = result.dtype, list(result.shape[1:])
        last = None if len(request_ids) == 1 else self._last_form.get(key)
        for name in request_ids:
            before = self._requests[name].forms.get(key, last)
            if before not in (None, form):
                raise _FailedError(
                    f"read() gave {form[0]} {form[1]} for a position, expected {before[0]} "
                    f"{before[1]}, as for earlier positions"
                )
        for name in request_ids:
            self._requests[name].forms[key] = form
        self._last_form[key] = form

    def _result(
        self, tap: ActivationTap, method: str, site: TapSite, values: torch.Tensor, rows: TapRows
    ) -> torch.Tensor | None:
        """Return the result of a method.

        Raises:
            _FailedError: it cannot be used.
            BaseException: the method failed.
        """
        run, before = self._built[tap.name][1].run, values.clone()
        result = run(method, getattr(tap, method), site, values, rows)
        if not torch.equal(before.nan_to_num(), values.nan_to_num()):
            values.copy_(before)
            raise _FailedError(f"{method}() changed its values in place, expected a new tensor")
        if result is None:
            return None
        if not isinstance(result, torch.Tensor):
            raise _FailedError(f"{method}() gave {type(result).__name__}, expected a tensor")
        if method == "exits":
            if result.dtype is not torch.bool or result.shape != values.shape[:1]:
                form = f"{result.dtype} {list(result.shape)}"
                raise _FailedError(f"exits() gave {form}, expected torch.bool [{len(values)}]")
            return result
        if method == "change":
            if result.shape != values.shape:
                raise _FailedError(
                    f"change() gave {list(result.shape)}, expected {list(values.shape)}"
                )
            if not result.isfinite().all():
                raise _FailedError("change() gave numbers that are not finite")
            return result.to(values.dtype)
        if not result.dim() or len(result) != len(values):
            raise _FailedError(f"read() gave {list(result.shape)}, expected [{len(values)}, ...]")
        return result

    def _fail(self, tap: ActivationTap, method: str, request_id: str, cause: BaseException) -> None:
        described = self._context.describe_fault(cause)  # raises an interrupt again
        defect = (
            str(cause) if isinstance(cause, _FailedError) else f"{method}() failed: {described}"
        )
        source = self._taps.components.source(KIND, tap.name)
        self._report.failed.setdefault(request_id, (f"{source}: its {defect}", tap.name))

    def _keep(self, key: str, result: torch.Tensor, places: range, call: _TapCall) -> None:
        if result.dtype is torch.bfloat16:  # which numpy does not have
            result = result.float()
        result = result.detach().clone()  # of memory that the step goes on with
        starts = call.rows.starts
        for place in places:
            start, end = (at - starts[places.start] for at in starts[place : place + 2])
            self._read.append((call.request_ids[place], key, result[start:end]))

    def report(self) -> bytes | None:
        """Return the numbers that taps have read in the step."""
        report, self._report = self._report, TapReport()
        for name, site in self._missing if self._rows is not None else ():
            self._fail_users(report, name, site)
        for request_id, key, tensor in self._read:
            if request_id not in report.failed:
                array = tensor.cpu().numpy()
                array = array.astype(array.dtype.newbyteorder("<"))
                values = TapValues(key, array.dtype.str, list(array.shape), array.tobytes())
                report.values.setdefault(request_id, []).append(values)
        self._read = []
        if not report.values and not report.failed:
            return None
        return msgspec.msgpack.encode(report)

    def _fail_users(self, report: TapReport, name: str, site: TapSite) -> None:
        source = self._taps.components.source(KIND, name)
        message = f"{source}: the model has no layer {site.layer} with {site.place!r}"
        for request_id in self._first:
            taps = self._requests[request_id].taps
            if any(tap.name == name and site in tap.sites for tap in taps):
                report.failed.setdefault(request_id, (message, name))

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests."""
        for name in request_ids:
            self._requests.pop(name, None)

    def close(self) -> None:
        """Close the taps."""
        for tap, _ in self._built.values():
            self._taps.components.close(tap)


def _of(values: torch.Tensor, call: _TapCall) -> torch.Tensor:
    return values if call.indices is None else values[call.indices]


def _with(values: torch.Tensor, changed: torch.Tensor | None, call: _TapCall) -> torch.Tensor:
    if call.indices is None:
        return torch.zeros_like(values) if changed is None else changed
    result = values.clone()
    result[call.indices] = 0 if changed is None else changed
    return result


def _key(tap: ActivationTap, site: TapSite) -> str:
    return f"{tap.name}/{site.layer}/{site.place}"


def _replaced(
    values: torch.Tensor, changed: Sequence[tuple[range, torch.Tensor]], call: _TapCall
) -> torch.Tensor:
    if len(changed[0][0]) == len(call.request_ids):
        return changed[0][1]
    result = values.clone()
    for places, part in changed:
        result[call.rows.starts[places.start] : call.rows.starts[places.stop]] = part
    return result


def _single_request(rows: TapRows, index: int) -> TapRows:
    start, end = rows.starts[index : index + 2]
    return TapRows(
        arguments=rows.arguments[index : index + 1],
        starts=[0, end - start],
        first_positions=rows.first_positions[index : index + 1],
        prompt_lens=rows.prompt_lens[index : index + 1],
        device=rows.device,
    )
