"""The conformance suite for attention backends; the built-in one passes it too."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import GeneralComponentSuite, first_device
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.model.sequences import (
    SequenceBlocks,
    WholeHistory,
    ordered,
    softmax_attention,
)
from hardpoint.testing.snapshots import snapshot, without_growth
from hardpoint.testing.suite import Rule, Violation, checks
from hardpoint.toolkit.kv_codes import CODE_DTYPES

from .block_views import (
    BLOCK_VIEWS,
    MOVED_BLOCKS,
    NUM_BLOCKS,
    check_size,
    check_views,
    move_blocks,
    tensors_of,
)
from .cases import (
    BLOCKS,
    CACHE,
    CAUSAL,
    CODED_STEPS,
    CODES,
    GROUPS,
    HEADS,
    LAYERS,
    PADDING,
    ROTATES,
    ROWS,
    SEES,
    SEQUENCES,
    SINKS,
    SOFTCAP,
    VALUES,
    WINDOW,
    AttentionCase,
    RowsCase,
    check_output,
    copied,
    decode_step,
    drawn_angles,
    rotated,
    rows_cases,
    seen_ahead,
    threads_of_torch,
    tolerance,
    value_size,
)
from .checks import ARGUMENTS, LENGTH, NAMES, check_arguments, check_padding

_NUM_BLOCKS = 328  # four sequences of 80 tokens, in blocks of one token
_MOVED_LENGTHS = (17, 3, 1)


class AttentionBackendSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `backend`, and `options` if it has some.

    Each test is a situation, simple ones first; its result is compared with plain attention in
    float64. If the result shows a common mistake, the message names it.

    Attributes:
        backend: the class under test.
        device: where it runs; None is the first of its `devices` that this machine has.
        dtypes: dtypes of queries, keys and values; all but the first in few of the tests.
        heads: numbers of query heads and of key heads of a layer.
        head_sizes: elements of a head.
        block_sizes: tokens per block.
        windows: windows of a layer.
        softcaps: soft caps of a layer, in `test_softcap`, if the backend reports that it has them.
        batch_invariant: whether the rows of a sequence are compared bit for bit, each alone and
            among others; otherwise within the tolerance.
        tolerance: maximum difference; None depends on the dtype.
    """

    kind = "attention_backends"
    num_uses = 200
    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    heads: ClassVar[Sequence[tuple[int, int]]] = ((1, 1), (4, 4), (6, 2), (4, 1), (8, 1))
    head_sizes: ClassVar[Sequence[int]] = (8, 16)
    block_sizes: ClassVar[Sequence[int]] = (1, 4, 16)
    windows: ClassVar[Sequence[int | None]] = (None, 1, 3, 8, 17)
    softcaps: ClassVar[Sequence[float]] = (0.3, 2.0, 50.0)
    batch_invariant: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None

    def reference(
        self, spec: KVSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of one query; override it if another function is meant.

        Args:
            spec: the layer.
            query: float64 [num_heads, head_size].
            keys: float64 [visible, num_kv_heads, head_size]; the keys that the query may see.
            values: like keys.
        """
        return softmax_attention(spec, query, keys, values)

    def draw(self, generator: torch.Generator, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return queries, keys or values, float32 [tokens, heads, head_size]; normal ones."""
        return torch.randn(*shape, generator=generator)

    def _component(self) -> type[Component]:
        return self.backend

    def _check_construction(self) -> None:
        self._make(self.block_sizes[0]).close()

    def test_sizes(self) -> None:
        """Each further block of `allocate` takes the bytes that `bytes_per_block` returns (at least
        half), and a new cache is zero.
        """
        checks = [
            functools.partial(self._check_size, block_size, spec, cache_dtype)
            for block_size in self.block_sizes
            for heads in self.heads
            for cache_dtype in ("auto", *self._coded_dtypes())
            for spec in self._specs(heads, self.head_sizes[0], block_size, cache_dtype)
        ]
        self._run_checks("sizes: a block takes bytes_per_block", *checks)

    def test_causal(self) -> None:
        """One prompt in one step: a token attends to itself and to earlier ones. The output has the
        shape, dtype and device of q.
        """
        self._compare(CAUSAL, heads=self._equal_heads, windows=[None], names="a", steps=1)

    def test_heads(self) -> None:
        """Groups of query heads share key heads."""
        shared = [pair for pair in self.heads if pair[0] != pair[1]]
        if not shared:
            pytest.skip("no pair of `heads` has fewer key heads than query heads")
        self._compare(HEADS, heads=shared, windows=[None], names="a", steps=1)

    def test_window(self) -> None:
        """A token attends to at most `spec.window` tokens, itself included."""
        windows = [window for window in self.windows if window is not None]
        if not windows:
            pytest.skip("`windows` has None only")
        self._compare(WINDOW, heads=self._equal_heads, windows=windows, names="a", steps=1)

    def test_softcap(self) -> None:
        """Scores are limited to `spec.softcap`. Only if the class states `softcaps = True`;
        otherwise models with a softcap are rejected.
        """
        if not self._make(self.block_sizes[0]).softcaps:
            pytest.skip("`softcaps` of the backend is False")
        for dtype in self.dtypes:
            self._compare(
                SOFTCAP,
                heads=self.heads,
                windows=self.windows,
                names="abc",
                steps=3,
                dtype=dtype,
            )

    def test_sinks(self) -> None:
        """Heads have sinks, in steps of all kinds, and each step reads the tensor. Only if the
        class states `has_sinks = True`; otherwise models with sinks are rejected.
        """
        if not self._make(self.block_sizes[0]).has_sinks:
            pytest.skip("`has_sinks` of the backend is False")
        for dtype in self.dtypes:
            heads, windows = self.heads, self.windows
            self._compare(SINKS, heads=heads, windows=windows, names="abc", steps=3, dtype=dtype)

    def test_sees_ahead(self) -> None:
        """Tokens see later ones of the step, by `AttentionStep.sees`. Only if the class states
        `sees_ahead = True`; otherwise models that need it are rejected.
        """
        if not self._make(self.block_sizes[0]).sees_ahead:
            pytest.skip("`sees_ahead` of the backend is False")
        for dtype in self.dtypes:
            heads, windows = self.heads, self.windows
            self._compare(SEES, heads=heads, windows=windows, names="abc", steps=3, dtype=dtype)

    def test_values(self) -> None:
        """Values are the last elements of the keys, by `KVSpec.value_size`. Only if `shares_values`
        is True; otherwise the backend stores the keys of such layers twice.
        """
        if not self._make(self.block_sizes[0]).shares_values:
            pytest.skip("`shares_values` of the backend is False")
        for dtype in self.dtypes:
            heads, windows = self.heads, self.windows
            self._compare(VALUES, heads=heads, windows=windows, names="abc", steps=3, dtype=dtype)

    def test_cache(self) -> None:
        """A prompt in chunks, then tokens one by one."""
        self._compare(CACHE, heads=self._equal_heads, windows=[None], names="a", steps=4)

    def test_blocks(self) -> None:
        """Blocks come in any order, and may hold the content of sequences that have ended."""
        self._compare(
            BLOCKS, heads=self._equal_heads, windows=[None], names="a", steps=4, shuffled=True
        )

    def test_sequences(self) -> None:
        """Several sequences in one step attend each to its own tokens."""
        self._compare(SEQUENCES, heads=self._equal_heads, windows=[None], names="abcd", steps=3)

    def test_layers(self) -> None:
        """All of it together, with layers that differ."""
        self._compare(
            LAYERS,
            heads=self.heads,
            windows=self.windows,
            names="abcd",
            steps=4,
            shuffled=True,
            layers=2,
        )

    def test_rotates(self) -> None:
        """A backend with `rotates` rotates queries and keys, the first elements of a head or
        all of it, before it attends.
        """
        if not self._make(self.block_sizes[0]).rotates:
            pytest.skip("`rotates` of the backend is False")
        for dtype in self.dtypes:
            self._compare(
                ROTATES,
                heads=self.heads,
                windows=self.windows,
                names="ab",
                steps=3,
                dtype=dtype,
            )

    def test_pads(self) -> None:
        """A backend with `pads` runs a recorded step with the numbers that its tensors have
        then, and writes nothing for padding.
        """
        if not self._make(self.block_sizes[0]).pads:
            pytest.skip("`pads` of the backend is False")
        checks = [
            functools.partial(self._check_padding, block_size, heads, dtype)
            for dtype in self.dtypes
            for block_size in self.block_sizes
            for heads in self.heads
        ]
        self._run_checks(PADDING.text, *checks)

    def test_groups(self) -> None:
        """Layers of several windows share a cache, each with the blocks of its group; blocks
        outside of a window are allocated again.
        """
        self._compare(
            GROUPS,
            heads=self.heads,
            windows=self.windows,
            names="ab",
            steps=4,
            shuffled=True,
            layers=2,
        )

    def test_dtypes(self) -> None:
        """The same in the other dtypes."""
        if len(self.dtypes) < 2:
            pytest.skip("`dtypes` has one only")
        for dtype in self.dtypes[1:]:
            self._compare(
                LAYERS,
                heads=self.heads,
                windows=self.windows,
                names="abc",
                steps=3,
                shuffled=True,
                dtype=dtype,
            )

    def test_codes(self) -> None:
        """With each other dtype in `cache_dtypes`, the stored codes and scales of each token and
        head are read back, in the step that writes them and in later ones.
        """
        self._compare(CODES, heads=self.heads, windows=[None], names="a", steps=3)

    def test_coded_steps(self) -> None:
        """The same with all of it together: chunks, several sequences, blocks that are used again,
        windows, and soft caps if it has them.
        """
        for dtype in self.dtypes:
            self._compare(
                CODED_STEPS,
                heads=self.heads,
                windows=self.windows,
                names="abc",
                steps=4,
                shuffled=True,
                layers=2,
                dtype=dtype,
            )

    def test_rows(self) -> None:
        """A row of a sequence has the result that it has as the single query of a step: among 1 to
        16 rows, in a chunk of a prompt, in steps with other sequences, with 1 and 2 threads, with
        each of `cache_dtypes`. Bit for bit if the suite's `batch_invariant` is True.
        """
        softcaps = self.softcaps if self._make(self.block_sizes[0]).softcaps else ()
        specs = st.builds(
            lambda heads, *rest: KVSpec(*heads, *rest),
            st.sampled_from(self.heads),
            st.sampled_from(self.head_sizes),
            st.just(0.4),
            st.sampled_from(self.windows),
            st.sampled_from((None, *softcaps)),
        )
        cases = rows_cases(self.block_sizes, specs, ("auto", *self._coded_dtypes()))
        self._device()  # skips
        for dtype in self.dtypes:
            check = functools.partial(self._check_rows, dtype)
            self._search(ROWS.text, 60, check, case=cases)

    def test_arguments(self) -> None:
        """A sequence has the result of its own arguments, alone and in a step with others. Only if
        the class has `Arguments`; needs the suite's `arguments`.
        """
        if self.backend.Arguments is AttentionBackend.Arguments:
            pytest.skip("the backend takes no arguments of requests")
        if self.arguments is None:
            missing = ARGUMENTS.violation(
                "the suite has no `arguments`, a strategy that draws some"
            )
            self._run_checks(ARGUMENTS.text, functools.partial(_reraise, missing))
        self._device()  # skips
        drawn = self._drawn_arguments(vocab_size=100)
        chosen = st.lists(drawn, min_size=len(NAMES), max_size=len(NAMES))
        self._search(ARGUMENTS.text, 40, self._check_arguments, arguments=chosen)

    def test_block_views(self) -> None:
        """Blocks can be copied as bytes, to other blocks and other caches."""
        backend = self._make(self.block_sizes[0])
        spec = KVSpec(*self.heads[0], self.head_sizes[0], 0.4)
        try:
            backend.block_views(backend.allocate(spec, 1))
        except NotImplementedError:
            pytest.skip("the backend has no block_views, and cannot run with a KV connector")
        except Exception as cause:
            self._run_checks(BLOCK_VIEWS.text, functools.partial(_reraise, cause))
        checks = [
            functools.partial(self._check_blocks, block_size, spec, dtype, cache_dtype)
            for dtype in self.dtypes
            for block_size in self.block_sizes
            for heads in self.heads
            for cache_dtype in ("auto", *self._coded_dtypes())
            for spec in self._specs(heads, self.head_sizes[-1], block_size, cache_dtype)
        ]
        self._run_checks(BLOCK_VIEWS.text, *checks)

    @checks("reads only: plan and attend change nothing but the cache")
    def test_reads_only(self) -> None:
        """Queries, keys, values and the step stay as they are."""
        backend = self._make(self.block_sizes[0])
        blocks = SequenceBlocks(_NUM_BLOCKS, self.block_sizes[0], self._device(), shuffled=True)
        spec = KVSpec(*self.heads[-1], self.head_sizes[0], 0.4, self.windows[-1])
        cache, generator = backend.allocate(spec, _NUM_BLOCKS), torch.Generator().manual_seed(0)
        for counts in ([("a", 5), ("b", 3)], [("b", 1), ("a", 4)]):
            step = blocks.step(counts)
            tensors = self._inputs(generator, spec, int(step.query_starts[-1]), self.dtypes[0])
            parts = dict(zip(("q", "k", "v"), tensors, strict=True)) | _fields(step)
            before = {name: snapshot(part) for name, part in parts.items()}
            with torch.inference_mode():
                backend.attend(spec, cache, backend.plan(step), *tensors)
            after = {name: snapshot(part) for name, part in parts.items()}
            if changed := [name for name in parts if before[name] != after[name]]:
                raise Violation(
                    f"after attend {', '.join(changed)} had changed",
                    "work on copies: the model may use its queries, keys and values again, and "
                    "all layers share the step",
                )

    @checks("memory: nothing grows with the number of steps")
    def test_memory(self) -> None:
        """Nothing grows with the number of steps."""
        fix = "keep the data of a step in its plan, and keys and values in the cache"
        with self._in_use() as (backend, use):
            for wave in without_growth(backend, 50, "the backend: in 50 steps", fix):
                use(wave)

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        backend = self._make(size := self.block_sizes[0])
        blocks = SequenceBlocks(_NUM_BLOCKS, size, self._device(), shuffled=False)
        spec, generator = KVSpec(*self.heads[0], self.head_sizes[0], 0.4), torch.Generator()
        inputs = functools.partial(self._inputs, generator, spec, 1, self.dtypes[0])
        cache = backend.allocate(spec, _NUM_BLOCKS)
        yield InUse(backend, decode_step(backend, spec, cache, blocks, inputs))

    @property
    def _equal_heads(self) -> Sequence[tuple[int, int]]:
        return [pair for pair in self.heads if pair[0] == pair[1]] or self.heads

    def _device(self) -> torch.device:
        return first_device(self.backend, self.device)

    def _coded_dtypes(self) -> list[str]:
        supported = self._make(self.block_sizes[0]).cache_dtypes
        return [name for name in CODE_DTYPES if name in supported]

    def _needed_codes(self) -> list[str]:
        if coded := self._coded_dtypes():
            return coded
        pytest.skip('`cache_dtypes` of the backend has none but "auto"')

    def _softcaps_of(self, rule: Rule) -> Sequence[float | None]:
        if rule is CODED_STEPS and self._make(self.block_sizes[0]).softcaps:
            return (None, *self.softcaps)
        return self.softcaps if rule is SOFTCAP else (None,)

    def _specs(
        self, heads: tuple[int, int], head_size: int, block_size: int, cache_dtype: str
    ) -> list[KVSpec]:
        spec = KVSpec(*heads, head_size, 0.4)
        if not self._make(block_size, cache_dtype=cache_dtype).shares_values:
            return [spec]
        return [spec, replace(spec, value_size=value_size(head_size))]

    def _make(
        self, block_size: int, dtype: torch.dtype | None = None, cache_dtype: str = "auto"
    ) -> AttentionBackend:
        backend: AttentionBackend = self._build(
            AttentionContext,
            device=self._device(),
            dtype=dtype or self.dtypes[0],
            block_size=block_size,
            cache_dtype=cache_dtype,
        )
        return backend

    def _compare(
        self,
        rule: Rule,
        *,
        heads: Sequence[tuple[int, int]],
        windows: Sequence[int | None],
        names: str,
        steps: int,
        shuffled: bool = False,
        layers: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        counts = st.dictionaries(
            st.sampled_from(names), st.integers(1, 7) | st.integers(1, 20), min_size=1
        )
        grouped = rule is GROUPS
        pairs = st.tuples(*[st.sampled_from(heads)] * layers)
        if grouped:
            pairs = st.sampled_from(heads).map(lambda pair: (pair,) * layers)
        cases = st.builds(
            AttentionCase,
            block_size=st.sampled_from(self.block_sizes),
            head_size=st.sampled_from(self.head_sizes),
            heads=pairs,
            windows=st.tuples(*[st.sampled_from(windows)] * layers),
            steps=st.lists(counts, min_size=1, max_size=steps).map(tuple),
            ends=st.lists(st.sampled_from(names + "-"), max_size=steps).map(tuple)
            if shuffled
            else st.just(()),
            shuffled=st.just(shuffled),
            softcap=st.sampled_from(self._softcaps_of(rule)),
            has_sinks=st.just(rule is SINKS),
            grouped=st.just(grouped),
            shares_values=st.just(rule is VALUES),
            cache_dtype=st.sampled_from(
                self._needed_codes() if rule in (CODES, CODED_STEPS) else ["auto"]
            ),
        )
        self._device()  # skips
        self._search(rule.text, 60, lambda case: self._play(rule, case, dtype), case=cases)

    @torch.inference_mode()
    def _play(self, rule: Rule, case: AttentionCase, dtype: torch.dtype | None = None) -> None:
        """Run the steps of a case; compare each layer of each step."""
        backend, device = self._make(case.block_size, dtype, case.cache_dtype), self._device()
        blocks = SequenceBlocks(_NUM_BLOCKS, case.block_size, device, shuffled=case.shuffled)
        groups, specs = (
            blocks.groups(case.windows) if case.grouped else [blocks],
            case.specs(device),
        )
        group_of = range(len(groups)) if case.grouped else [0] * len(specs)
        caches = [backend.allocate(spec, _NUM_BLOCKS) for spec in specs]
        if case.grouped:
            caches = caches[:1] * len(groups)
        histories = [WholeHistory(spec, self.reference, case.cache_dtype) for spec in specs]
        generator = torch.Generator().manual_seed(0)
        for index, step in enumerate(case.steps):
            counts = ordered(list(step.items()))
            ahead = seen_ahead(generator, counts) if rule is SEES else ()
            plans = [backend.plan(group.step(counts, ahead)) for group in groups]
            tokens = sum(count for _, count in counts)
            for sinks in (spec.sinks for spec in specs if spec.sinks is not None):
                sinks.neg_()  # the tensor stays, its elements may change
            for layer, (cache, history) in enumerate(zip(caches, histories, strict=True)):
                q, k, v = self._inputs(generator, history.spec, tokens, backend.context.dtype)
                spec, plan, tensors = history.spec, plans[group_of[layer]], copied(q, k, v)
                if rule is ROTATES:
                    angles = drawn_angles(generator, spec, tokens, device)
                    out = backend.rotate_and_attend(spec, cache, plan, *tensors, angles)
                    q, k = rotated(q, angles), rotated(k, angles)
                else:
                    out = backend.attend(spec, cache, plan, *tensors)
                history.append(counts, k, v, ahead)
                self._check_output(rule, out, q, history, counts)
            if index < len(case.ends):
                for group in groups:
                    group.release(case.ends[index])
                for history in histories:
                    history.release(case.ends[index])

    @torch.inference_mode()
    def _check_padding(self, block_size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
        spec, generator = KVSpec(*heads, self.head_sizes[0], 0.4), torch.Generator().manual_seed(0)
        inputs = functools.partial(self._inputs, generator, spec, dtype=dtype)
        history = WholeHistory(spec, self.reference)
        limit = tolerance(dtype, self.tolerance)
        check_padding(self._make(block_size, dtype), spec, inputs, history, limit)

    def _inputs(
        self, generator: torch.Generator, spec: KVSpec, tokens: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        q, k, v = (
            self.draw(generator, (tokens, heads, spec.head_size)).to(self._device(), dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        return [q, k, v if spec.value_size is None else k]

    def _check_output(
        self,
        rule: Rule,
        out: Any,
        q: torch.Tensor,
        history: WholeHistory,
        counts: Sequence[tuple[str, int]],
    ) -> None:
        check_output(rule, out, q, history, counts, tolerance(q.dtype, self.tolerance))

    @torch.inference_mode()
    def _check_rows(self, dtype: torch.dtype, case: RowsCase) -> None:
        backend, device = self._make(case.block_size, dtype, case.cache_dtype), self._device()
        length = case.before + case.count
        size = -(-length // case.block_size) + -(-4 * case.others // case.block_size)
        blocks = SequenceBlocks(size, case.block_size, device, shuffled=True)
        cache, generator = backend.allocate(case.spec, size), torch.Generator().manual_seed(0)
        tensors = self._inputs(generator, case.spec, length, dtype)
        others = self._inputs(generator, case.spec, case.others, dtype)

        def attend(start: int, end: int, *, others_too: bool = False) -> torch.Tensor:
            counts = [("a", end - start)] + [("b", case.others)] * (others_too and case.others > 0)
            inputs = {"a": [x[start:end] for x in tensors], "b": others}
            counts = list(ordered(counts))
            blocks.rewind("a", start)
            plan = backend.plan(blocks.step(counts))
            parts = zip(*(inputs[name] for name, _ in counts), strict=True)
            out = backend.attend(case.spec, cache, plan, *map(torch.cat, parts))
            first = 0 if counts[0][0] == "a" else counts[0][1]
            return out[first : first + end - start]

        if case.before:
            attend(0, case.before)
        rows = range(case.before, length)
        alone = torch.cat([attend(row, row + 1) for row in rows])
        limit = 0.0 if self.batch_invariant else tolerance(dtype, self.tolerance)
        for threads in (1, 2):
            for chunk in (0, min(case.chunk, case.before)):
                with threads_of_torch(threads):
                    output = attend(case.before - chunk, length, others_too=True)[chunk:]
                difference = (output.double() - alone.double()).abs().nan_to_num(torch.inf)
                if float(difference.max()) > limit:
                    row = int(difference.flatten(1).amax(-1).argmax())
                    raise ROWS.violation(
                        f"row {row + 1} of {case.count} that end a step of {chunk + case.count} "
                        f"tokens of their sequence and {case.others} of another one, with "
                        f"{threads} threads and kv_cache.dtype {case.cache_dtype!r}, differs by "
                        f"{float(difference[row].max()):.3g} from the same row alone; at most "
                        f"{limit:.3g} is accepted"
                    )

    def _check_arguments(self, arguments: Sequence[Any]) -> None:
        backend, dtype = self._make(self.block_sizes[-1] // 4 or 1), self.dtypes[0]
        spec, generator = KVSpec(*self.heads[0], self.head_sizes[0], 0.4), torch.Generator()
        flat = self._inputs(generator.manual_seed(0), spec, len(NAMES) * LENGTH, dtype)
        tensors = [part.view(len(NAMES), LENGTH, *part.shape[1:]) for part in flat]
        limit, defaults = tolerance(dtype, self.tolerance), self._prepared({}, 100)
        check_arguments(backend, spec, tensors, arguments, defaults, limit)

    def _check_size(self, block_size: int, spec: KVSpec, cache_dtype: str) -> None:
        check_size(self._make(block_size, cache_dtype=cache_dtype), block_size, spec)

    @torch.inference_mode()
    def _check_blocks(
        self, block_size: int, spec: KVSpec, dtype: torch.dtype, cache_dtype: str
    ) -> None:
        backend, device = self._make(block_size, dtype, cache_dtype), self._device()
        check_views(backend, spec, tensors_of)
        old = SequenceBlocks(NUM_BLOCKS, block_size, device, shuffled=True)
        new = SequenceBlocks(NUM_BLOCKS, block_size, device, shuffled=False)
        cache = backend.allocate(spec, NUM_BLOCKS)
        history = WholeHistory(spec, self.reference, cache_dtype)
        generator = torch.Generator().manual_seed(0)
        for index, count in enumerate(_MOVED_LENGTHS):
            counts, blocks = [("a", count)], old if index == 0 else new
            step, copy = blocks.step(counts), new.step(counts) if index == 0 else None
            q, k, v = self._inputs(generator, spec, count, dtype)
            plan = backend.plan(step)
            out = backend.attend(spec, cache, plan, *copied(q, k, v))
            history.append(counts, k, v)
            self._check_output(MOVED_BLOCKS, out, q, history, counts)
            if copy is not None:
                tables = step.block_table[0].tolist(), copy.block_table[0].tolist()
                cache = move_blocks(backend, spec, cache, tables)


def _reraise(cause: BaseException) -> None:
    raise cause


def _fields(step: AttentionStep) -> dict[str, Any]:
    names = ("query_starts", "seq_lens", "block_table", "slots")
    return {f"step.{name}": getattr(step, name) for name in names}
