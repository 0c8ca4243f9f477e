"""The conformance suite for models; the built-in ones pass it too."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import (
    KVSpec,
    Model,
    ModelConfig,
    ModelContext,
    ModelFiles,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.testing.adapted_model import ADAPTERS, AdaptedModel
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.declared import declared_result
from hardpoint.testing.engine_access import load_ops
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.snapshots import count_elements, snapshot
from hardpoint.testing.suite import Violation, checks, short_repr

from . import model_rules as rules
from .divided_model import DividedModel
from .media.checks import MediaChecks, encoded
from .media.rules import MEDIA
from .model_sequences import ModelSequences, SkippingHooks, relative_difference, summary
from .quantized_model import QUANTIZED, codes_of, quantizable_names, quantized_forms
from .sequences import ordered, softmax_attention
from .shared_model import (
    SHARED,
    Division,
    DivisionRefusedError,
)

_MAX_TOKENS = 8  # of a sequence in a drawn step


@dataclass(frozen=True)
class Schedule:
    """Steps to run: the number of tokens by sequence."""

    steps: tuple[Mapping[str, int], ...]


class ModelSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `model` and `config`.

    The weights are random, so that a small configuration is enough; attention is computed plainly,
    in float64.

    Attributes:
        model: the class under test.
        config: configuration of a small model: a few layers, heads and tokens.
        files: files of the model, if its `media_format` reads some.
        max_model_len: maximum length of a sequence, at least 32.
        device: where it runs.
        dtypes: dtypes of weights and hidden states; all but the first in `test_dtypes` alone.
        uses_positions: False for a model with results that do not depend on `batch.positions`.
        tolerance: maximum difference of hidden states, relative to the largest one.
    """

    kind = "models"
    num_uses = 100
    max_bytes_per_use = 256
    model: ClassVar[type[Model]]
    config: ClassVar[ModelConfig]
    files: ClassVar[ModelFiles | None] = None
    max_model_len: ClassVar[int] = 64
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    uses_positions: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-4

    def weight(self, name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        """Return a random weight, float32; override it for weights with limits of their own.

        Args:
            name: name of the weight.
            shape: its shape in `weight_shapes`.
            generator: to draw from.
        """
        mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        return torch.randn(*shape, generator=generator) * 0.2 + mean

    def attention(
        self, spec: KVSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of one query, as `AttentionBackendSuite.reference` does."""
        return softmax_attention(spec, query, keys, values)

    def _component(self) -> type[Component]:
        return self.model

    @contextmanager
    def _exception_guard(self) -> Iterator[None]:
        with torch.inference_mode(), super()._exception_guard():
            yield

    def test_weights(self) -> None:
        """`load_weights` needs exactly the tensors of `weight_shapes`, in any order and floating
        dtype, and each has an effect.
        """
        self._run_checks(
            rules.WEIGHTS.text,
            self._check_shapes_of_weights,
            self._check_order,
            self._check_effects,
        )

    @checks(rules.PACKED)
    def test_packed(self) -> None:
        """`load_packed` makes the same model from the tensors of `packed_weights`, if it returns
        any, and refuses them if one is missing.
        """
        model = self._load(self._make(), self._weights(self._make()))
        packed = model.packed_weights()
        if packed is None:
            pytest.skip("packed_weights returns None: the weight cache does not keep it")
        if not isinstance(packed, Mapping) or not all(
            isinstance(tensor, torch.Tensor) for tensor in packed.values()
        ):
            raise rules.PACKED.violation(f"packed_weights returned {short_repr(packed)}")
        again = self._make()
        again.load_packed(packed)
        expected, actual = (self._hidden(m, [self._example]) for m in (model, again))
        logits = [m.compute_logits(expected) for m in (model, again)]
        if not torch.equal(actual, expected) or not torch.equal(*logits):
            raise rules.PACKED.violation("a model that load_packed has loaded gives other results")
        for name in packed:
            try:
                self._make().load_packed({n: t for n, t in packed.items() if n != name})
            except (KeyError, ValueError):
                continue
            raise rules.PACKED.violation(f"load_packed raised nothing without {name!r}")

    def test_quantized(self) -> None:
        """`quantizable` names matrices of `weight_shapes`; with some or all of them from
        `load_quantized`, the results equal the results with their dequantized tensors. Skipped if
        it names no matrix.
        """
        if not self._make().quantizable():
            pytest.skip("the model has no quantizable matrices")
        self._run_checks(QUANTIZED.text, self._check_quantized)

    @checks(rules.SPECS)
    def test_kv_specs(self) -> None:
        """There is one `KVSpec` per attention layer, before and after loading; `forward` calls
        `attend` once for each, with tensors of its shapes. So it does with `state_specs` and
        `recur`.
        """
        model = self._make()
        declared = (rules.STATES, Model, "state_specs", model.state_specs(), (), rules.STATES.fix)
        states = declared_result(*declared)
        fix = "return such a list, with a softcap of None or > 0"
        specs = declared_result(rules.SPECS, Model, "kv_specs", model.kv_specs(), (), fix)
        for when in ("when it was called again", "after the weights were loaded"):
            if (again := model.kv_specs()) != specs:
                raise rules.SPECS.violation(
                    f"kv_specs returned {short_repr(specs)}, {when} {short_repr(again)}"
                )
            if (again_states := model.state_specs()) != states:
                raise rules.STATES.violation(
                    f"state_specs returned {short_repr(states)}, {when} {short_repr(again_states)}"
                )
            self._load(model, self._weights(model))
        self._hidden(model, [{"a": self._tokens("a", 3)}])

    def test_shapes(self) -> None:
        """Hidden states are [tokens, hidden], logits [rows, `vocab_size`] and finite; q, k and v
        have the context's dtype.
        """
        self._run_checks(rules.SHAPES.text, lambda: self._check_shapes(self._loaded()))

    def test_dtypes(self) -> None:
        """The same in the other dtypes."""
        if len(self.dtypes) < 2:
            pytest.skip("`dtypes` has one only")
        for dtype in self.dtypes[1:]:
            check = functools.partial(self._check_shapes, self._loaded(dtype))
            self._run_checks(rules.SHAPES.text, check)

    @checks("logits: each row of logits is of its own hidden state")
    def test_logits(self) -> None:
        """A row's logits do not depend on the other rows."""
        model = self._loaded()
        hidden = self._hidden(model, [self._example])
        whole = model.compute_logits(hidden).float()
        for rows in ([5], [7, 2, 2], list(range(len(hidden) - 1, -1, -1))):
            logits = model.compute_logits(hidden[rows]).float()
            if (difference := relative_difference(logits, whole[rows])) > self.tolerance:
                raise Violation(
                    f"the logits of rows {rows} alone differ from their logits among all rows by "
                    f"{difference:.3g} of the largest one",
                    "compute each row of logits from its own hidden state",
                )

    def test_batch(self) -> None:
        """A sequence has the same hidden states alone, in parts, and among others."""
        model = self._loaded()
        counts = st.dictionaries(st.sampled_from("abc"), st.integers(1, _MAX_TOKENS), min_size=1)
        schedules = st.lists(counts, min_size=1, max_size=3).map(tuple)
        self._search(
            rules.BATCH.text,
            30,
            lambda schedule: self._check_schedule(model, schedule),
            schedule=st.builds(Schedule, steps=schedules),
        )

    def test_positions(self) -> None:
        """Other positions of the same tokens give other hidden states."""
        if not self.uses_positions:
            pytest.skip("uses_positions is False")
        self._run_checks(rules.POSITIONS.text, self._check_positions)

    def test_length(self) -> None:
        """Positions up to `max_model_len` work."""

        def check() -> None:
            sequences, last = self._sequences(self._loaded()), self.max_model_len - 1
            try:
                sequences.step({"a": [0]}, [last])
            except (IndexError, RuntimeError) as cause:
                raise Violation(
                    f"at position {last} of max_model_len {self.max_model_len}, forward raised "
                    f"{type(cause).__name__}: {cause}",
                    "make tables of positions for context.max_model_len positions",
                ) from cause

        self._run_checks("length: sequences may have max_model_len tokens", check)

    @checks(rules.STATE)
    def test_state(self) -> None:
        """A step gives the same after others, bit for bit, and nothing grows."""
        model = self._loaded()
        first = self._hidden(model, [self._example])
        before = count_elements(vars(model))
        for count in range(1, 9):
            self._hidden(model, [{"d": self._tokens("d", count)}])
        again = self._hidden(model, [self._example])
        if not torch.equal(first, again):
            raise rules.STATE.violation(
                f"the same step, after other ones, gave other hidden states: "
                f"{_num_different(first, again)} of {first.numel()} numbers differ"
            )
        if (grown := count_elements(vars(model)) - before) >= 9:
            raise rules.STATE.violation(
                f"the model's attributes grew by {grown} elements in 9 steps"
            )

    @checks(rules.SKIPS)
    def test_skips(self) -> None:
        """With `hooks.skips`, hidden states equal the hidden states without it where `hooks.added`
        sets what these tokens add to zero. With `ForwardBatch.num_layers`, they equal those of
        tokens that skip all later layers. Skipped for a model that does not call `hooks.added`.
        """
        model = self._loaded()
        layers = self._skipping(model, (), 1)[1]
        if not layers:
            pytest.skip("the model does not call hooks.added: no part skips its layers")
        for skipped in ([min(layers)], [max(layers)], sorted(layers)):
            expected, actual = (self._skipping(model, skipped, 2, asks=a)[0] for a in (0, 1))
            self._compare_skipped(actual, expected, f"tokens that skip layers {skipped}")
        for count in range(1, len(layers) if not model.state_specs() else 1):
            sequences = self._sequences(model)
            actual = sequences.step(self._example, num_layers=count)
            if sequences.num_attended == count:  # others compute all layers, and are refused
                later = [layer for layer in layers if layer >= count]
                expected = self._skipping(model, later, 1)[0]
                self._compare_skipped(actual, expected, f"a batch with num_layers={count}")

    @checks(ADAPTERS)
    def test_adapters(self) -> None:
        """A low-rank change of each matrix of `hooks.matrices`, which step parts such as adapters
        add to the products, gives what a model with changed weights does. A model that names none
        is refused together with adapters, and this is skipped.
        """
        model = self._loaded()
        if not model.context.hooks.matrices:
            pytest.skip("the model names no matrices in hooks.matrices: it takes no adapters")
        adapted = AdaptedModel(model, self._weights(model))
        expected = self._hidden(self._load(self._make(), adapted.merged()), [self._example])
        hooks = model.context.hooks
        hooks.linear = adapted.linear
        try:
            actual = self._hidden(model, [self._example])
        finally:
            hooks.linear = None
        adapted.check_called()
        if (difference := relative_difference(actual, expected)) > self.tolerance:
            raise ADAPTERS.violation(
                f"hidden states differ by {difference:.3g} of the largest one from the "
                f"model with the same changes in its weights"
            )

    def test_media(self) -> None:
        """`media_format` has tokens of the vocabulary, and is the same each time it is made. An
        image of any size becomes the same numbers each time, and has an identifier of its own.
        `encode_media` gives finite embeddings of each item, the same alone as among others, and
        what `hooks.embedded` returns enters the first layer. Skipped for a model of text alone.
        """
        checks = MediaChecks(self.model, self.config, self.files, self.tolerance)
        formats: list[MediaFormat | None] = []
        self._run_checks(MEDIA, lambda: formats.append(checks.format()))
        if (media := formats[0]) is None:
            pytest.skip("media_format() returned None: the model takes text alone")
        self._run_checks(MEDIA, lambda: self._check_media(checks, media))

    @checks("reads only: a step changes nothing that it is given")
    def test_reads_only(self) -> None:
        """Token ids, positions and hidden states stay as they are."""
        model = self._loaded()
        sequences = self._sequences(model)
        hidden = sequences.step(self._example)
        before = snapshot(hidden)
        model.compute_logits(hidden)
        if sequences.changed or snapshot(hidden) != before:
            changed = sequences.changed or ["hidden"]
            raise Violation(
                f"after the step {', '.join(changed)} had changed",
                "work on copies: positions serve all layers, and hidden states are used again "
                "where a plugin fails",
            )

    def test_tensor_2(self) -> None:
        """Two ranks that divide each layer give the same results as one, if `parallelism` has
        "tensor". Together they need all of every weight, each of them its part (`weight_cuts`) and
        its heads (`kv_specs`). Sizes that the constructor rejects with a `ModelError` that names
        the setting are skipped.
        """
        self._check_divided(Division(tensor=2))

    def test_tensor_3(self) -> None:
        """The same with three ranks."""
        self._check_divided(Division(tensor=3))

    def test_pipeline(self) -> None:
        """Two stages give the same results as one, if `parallelism` has "pipeline"."""
        self._check_divided(Division(stages=2))

    def test_tensor_and_pipeline(self) -> None:
        """The same with two ranks in each of two stages."""
        self._check_divided(Division(tensor=2, stages=2))

    def test_expert(self) -> None:
        """Two ranks with whole experts give the same as one, if `parallelism` has "expert"."""
        self._check_divided(Division(tensor=2, expert=True))

    def _check_media(self, checks: MediaChecks, media: MediaFormat) -> None:
        checks.check_process(media)
        model = self._loaded()
        checks.check_encode(model, media)
        tokens = [self._tokens(name, 5) for name in "ab"]
        checks.check_embedded(model, tokens, lambda tokens: self._hidden(model, [{"a": tokens}]))

    def _make(self, dtype: torch.dtype | None = None, parallel: Parallel | None = None) -> Model:
        model: Model = self._build(
            ModelContext,
            parallel=parallel or Parallel(),
            config=self.config,
            dtype=dtype or self.dtypes[0],
            device=torch.device(self.device),
            max_model_len=self.max_model_len,
            ops=load_ops(dtype or self.dtypes[0], torch.device(self.device)),
        )
        return model

    def _weights(self, model: Model) -> dict[str, torch.Tensor]:
        """Return random weights that bfloat16 holds without rounding."""
        generator, weights = torch.Generator().manual_seed(0), {}
        for name, shape in sorted(model.weight_shapes().items()):
            weights[name] = self.weight(name, shape, generator).bfloat16().float()
        return weights

    def _load(
        self,
        model: Model,
        weights: Mapping[str, torch.Tensor],
        matrices: Mapping[str, QuantizedMatrix] | None = None,
    ) -> Model:
        """Load the weights, in the order of the mapping; raise a Violation if that fails.

        Args:
            matrices: quantized matrices, instead of the weights of that name.
        """
        taken = []

        def given() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights.items():
                taken.append(name)
                if matrices and name in matrices:
                    model.load_quantized(name, matrices[name])
                else:
                    yield name, tensor.clone()

        try:
            model.load_weights(given())
        except Exception as cause:
            raise rules.WEIGHTS.violation(
                f"load_weights, which got each weight of weight_shapes once, raised "
                f"{type(cause).__name__}: {cause}"
            ) from cause
        if len(taken) < len(weights):
            raise rules.WEIGHTS.violation(
                f"load_weights took {len(taken)} of {len(weights)} weights of weight_shapes"
            )
        return model

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        model = self._make()
        self._load(model, self._weights(model))

        def use(number: int) -> None:
            name = "abc"[number % 3]
            with torch.inference_mode():
                self._hidden(model, [{name: self._tokens(name, 1 + number % 4)}])

        yield InUse(model, use)

    def _loaded(self, dtype: torch.dtype | None = None) -> Model:
        """Return a model with random weights; fail the test if it cannot be loaded."""
        loaded: list[Model] = []

        def load() -> None:
            self._check_shapes_of_weights()
            model = self._make(dtype)
            loaded.append(self._load(model, self._weights(model)))

        self._run_checks(rules.WEIGHTS.text, load)
        return loaded[0]

    def _hidden(self, model: Model, steps: Iterable[Mapping[str, Sequence[int]]]) -> torch.Tensor:
        sequences = self._sequences(model)
        return torch.cat([sequences.step(step) for step in steps])

    def _skipping(
        self, model: Model, layers: Collection[int], every: int, *, asks: int = 0
    ) -> tuple[torch.Tensor, set[int]]:
        """Return hidden states of two steps, and the layers that called `hooks.added`."""
        sequences, hooks = self._sequences(model), SkippingHooks(layers, every)
        parts = (slice(0, 9), slice(9, None)) if every > 1 else (slice(None),)
        hidden = [
            hooks.run(
                model,
                sequences,
                {name: tokens[part] for name, tokens in self._example.items()},
                asks=bool(asks),
            )
            for part in parts
        ]
        return torch.cat(hidden), hooks.called

    def _compare_skipped(self, actual: torch.Tensor, expected: torch.Tensor, which: str) -> None:
        if (difference := relative_difference(actual, expected)) > self.tolerance:
            raise rules.SKIPS.violation(
                f"hidden states of {which} differ by {difference:.3g} of the largest one"
            )

    def _sequences(self, model: Model) -> ModelSequences:
        return ModelSequences(model, self.attention)

    def _tokens(self, name: str, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(ord(name[0]))
        tokens = torch.randint(0, self.config.vocab_size, (256,), generator=generator)
        drawn: list[int] = tokens[:count].tolist()
        return drawn

    @property
    def _example(self) -> dict[str, list[int]]:
        return {name: self._tokens(name, 16) for name in "abc"}

    def _check_shapes_of_weights(self) -> None:
        shapes = self._make().weight_shapes()
        if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
            raise rules.WEIGHTS.violation(
                f"weight_shapes returned {short_repr(shapes)}", "return a tuple of sizes per name"
            )

    def _check_order(self) -> None:
        weights = self._weights(self._make())
        expected = self._hidden(self._load(self._make(), weights), [self._example])
        backwards = dict(reversed(list(weights.items())))
        halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
        for variant, weights_given in (("in reverse order", backwards), ("in bfloat16", halves)):
            actual = self._hidden(self._load(self._make(), weights_given), [self._example])
            if not torch.equal(actual, expected):
                raise rules.WEIGHTS.violation(
                    f"the same weights, given {variant}, make other hidden states: "
                    f"{_num_different(actual, expected)} of {expected.numel()} numbers differ"
                )

    def _check_effects(self) -> None:
        # A bias of all keys changes no logits, because it cancels out in the softmax. Those of an
        # encoder change the embeddings of an image.
        weights = self._weights(self._make())
        expected = self._effects(weights)
        for name, tensor in weights.items():
            effects = self._effects(weights | {name: tensor.flip(0) * 2 + 0.5})
            if all(map(torch.equal, effects, expected)):
                raise rules.WEIGHTS.violation(
                    f"weight_shapes lists {name!r}, but another tensor of that name gives the same "
                    f"logits",
                    "load it, or leave it out of weight_shapes: a checkpoint without it is refused",
                )

    def _check_quantized(self) -> None:
        names = quantizable_names(self._make())
        weights = self._weights(self._make())
        codes = {name: codes_of(weights[name]) for name in names}
        weights |= {name: matrix.dequantize() for name, matrix in codes.items()}
        expected = self._results(self._load(self._make(), weights))
        for form, matrices in quantized_forms(codes).items():
            actual = self._results(self._load(self._make(), weights, matrices))
            for results, wanted in zip(actual, expected, strict=True):
                if (difference := relative_difference(results, wanted)) > self.tolerance:
                    raise QUANTIZED.violation(
                        f"with {form}, hidden states or logits differ from results of the same "
                        f"numbers as tensors by {difference:.3g} of the largest one"
                    )

    def _results(self, model: Model) -> list[torch.Tensor]:
        hidden = self._hidden(model, [{"a": self._tokens("a", 5), "b": self._tokens("b", 2)}])
        return [hidden, model.compute_logits(hidden)]

    def _check_divided(self, division: Division) -> None:
        """Compare ranks that share the model with the whole; skip sizes that it refuses."""
        requests = {
            "tensor": division.tensor > 1 and not division.expert,
            "pipeline": division.stages > 1,
            "expert": division.expert,
        }
        for name, is_asked in requests.items():
            if is_asked and name not in self.model.parallelism:
                pytest.skip(f"`parallelism` does not have {name!r}")
        first = {name: tokens[:9] for name, tokens in self._example.items()}
        rest = {name: tokens[9:15] for name, tokens in self._example.items()}
        last = {name: tokens[15:] for name, tokens in self._example.items()}
        model = DividedModel(
            division,
            steps=[first, rest, last],  # prompts in parts, and single tokens
            tolerance=self.tolerance,
            make=self._make,
            weights=self._weights,
            load=self._load,
            sequences=self._sequences,
        )
        refusals: list[str] = []

        def check() -> None:
            try:
                model.compare()
            except DivisionRefusedError as refused:
                refusals.append(str(refused))

        self._run_checks(SHARED.text, check)
        if refusals:
            pytest.skip(f"the model refuses {division}: {refusals[0]}")

    def _effects(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        model = self._load(self._make(), weights)
        sequences = self._sequences(model)
        logits = model.compute_logits(sequences.step({"a": self._tokens("a", 16)}))
        media = self.model.media_format(self.config, self.files)
        images = [] if media is None else encoded(model, media)
        return [logits, *sequences.keys, *images]

    def _check_shapes(self, model: Model) -> None:
        sequences = self._sequences(model)
        for step in ({"a": 1}, {"a": 1, "b": 3}, {"c": 2}):
            hidden = sequences.step({n: self._tokens(n, count) for n, count in step.items()})
            for rows in {1, len(hidden)}:
                self._check_logits(model.compute_logits(hidden[:rows]), rows)

    def _check_logits(self, logits: Any, rows: int) -> None:
        expected = (rows, self.config.vocab_size)
        if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected:
            raise rules.SHAPES.violation(
                f"compute_logits returned {summary(logits)}, expected {list(expected)}"
            )
        if not logits.is_floating_point() or not logits.isfinite().all():
            raise rules.SHAPES.violation(
                f"compute_logits returned {summary(logits)} with "
                f"{int(logits.float().isfinite().logical_not().sum())} numbers that are not finite",
                "return finite floating-point logits",
            )

    def _check_schedule(self, model: Model, schedule: Schedule) -> None:
        sequences, lengths = self._sequences(model), dict.fromkeys("abc", 0)
        states_by_name: dict[str, torch.Tensor] = {}
        for counts in schedule.steps:
            step = {}
            for name, count in ordered(list(counts.items())):
                start, lengths[name] = lengths[name], lengths[name] + count
                step[name] = self._tokens(name, lengths[name])[start:]
            rest = sequences.step(step)
            for name, tokens in step.items():
                part, rest = rest[: len(tokens)], rest[len(tokens) :]
                states_by_name[name] = (
                    torch.cat((states_by_name[name], part)) if name in states_by_name else part
                )
        for name, states in states_by_name.items():
            alone = self._hidden(model, [{name: self._tokens(name, lengths[name])}])
            if (difference := relative_difference(states, alone)) > self.tolerance:
                token = int((states - alone).abs().amax(-1).argmax())
                raise rules.BATCH.violation(
                    f"the hidden states of sequence {name!r} differ from its hidden states alone "
                    f"in one step by {difference:.3g} of the largest one, most at token {token}"
                )

    def _check_positions(self) -> None:
        model, tokens = self._loaded(), self._tokens("a", 4)
        near, far = [0, 1, 2, 3], [0, 3, 11, 20]
        hidden = [self._sequences(model).step({"a": tokens}, p) for p in (near, far)]
        if torch.equal(*hidden):
            raise rules.POSITIONS.violation(
                f"four tokens at positions {near} and at positions {far} have the same hidden "
                f"states"
            )


def _num_different(first: torch.Tensor, two: torch.Tensor) -> int:
    return int((first != two).sum()) if first.shape == two.shape else first.numel()


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape)
