"""Runs of the ranks that share a model, compared with the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from hardpoint.plugins import Model, ModelError
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.suite import Violation

from .model_sequences import ModelSequences, relative_difference, summary
from .rank_threads import run_ranks
from .shared_model import (
    HIDDEN_SIZE,
    REFUSED,
    SHARED,
    Division,
    DivisionRefusedError,
    RankResult,
    check_coverage,
    check_cut_weights,
    check_sizes,
    check_specs,
)


@dataclasses.dataclass(frozen=True)
class DividedModel:
    """A model that ranks share.

    Attributes:
        division: how it is divided.
        steps: tokens of each step by sequence.
        tolerance: maximum difference from the whole, relative to the largest number.
        make: `make(parallel=...)` returns the share of a rank that is not loaded, or the whole.
        weights: returns a model's random weights.
        load: loads them.
        sequences: returns a runner of a model, step by step.
    """

    division: Division
    steps: Sequence[Mapping[str, Sequence[int]]]
    tolerance: float
    make: Callable[..., Model]
    weights: Callable[[Model], Mapping[str, torch.Tensor]]
    load: Callable[[Model, Mapping[str, torch.Tensor]], Model]
    sequences: Callable[[Model], ModelSequences]

    def compare(self) -> None:
        """Compare the ranks with the whole model.

        Raises:
            DivisionRefusedError: the model refuses it.
            Violation: they differ.
        """
        whole = self.make()
        weights = self.weights(whole)
        self.load(whole, weights)
        sequences = self.sequences(whole)
        expected = [sequences.step(step) for step in self.steps]
        logits = whole.compute_logits(expected[-1])
        shapes, ranks = whole.weight_shapes(), list[RankResult]()
        before: list[RankResult] = []
        for stage in range(self.division.stages):
            before = self._run_stage(stage, weights, before)
            ranks += before
        check_coverage(shapes, ranks)
        check_sizes(shapes, ranks, self.division)
        check_specs(whole.kv_specs(), ranks, self.division)
        self._check_results(ranks, torch.cat(expected), logits)

    def _check_results(
        self,
        ranks: Sequence[RankResult],
        hidden: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """Compare the last stage with the whole model, and the ranks of other stages.

        Args:
            hidden: hidden states of the whole model.
            logits: logits of the whole model's last step.
        """
        first: dict[int, RankResult] = {}
        for rank in ranks:
            states, other_rank = torch.cat(list(rank.hidden)), first.setdefault(rank.stage, rank)
            if rank.logits is None:
                reference, expected = str(other_rank), torch.cat(list(other_rank.hidden))
                results = [("hidden states", states, expected)]
            else:
                reference = "the whole model"
                results = [("hidden states", states, hidden), ("logits", rank.logits, logits)]
            for label, mine, other in results:
                if mine.shape != other.shape:
                    raise SHARED.violation(
                        f"with {self.division}, the {label} of {rank} are {summary(mine)}, "
                        f"expected {list(other.shape)}, as of {reference}"
                    )
                if (difference := relative_difference(mine, other)) > self.tolerance:
                    raise SHARED.violation(
                        f"with {self.division}, the {label} of {rank} differ from the {label} of "
                        f"{reference} by {difference:.3g} of the largest one"
                    )

    def _run_stage(
        self,
        stage: int,
        weights: Mapping[str, torch.Tensor],
        before: Sequence[RankResult],
    ) -> list[RankResult]:
        """Return the results of a stage's ranks; `before` are the previous stage's."""

        def run(tensor: Communicator | None) -> RankResult:
            share = Parallel(
                stage=stage, num_stages=self.division.stages, expert=self.division.expert
            )
            share = share if tensor is None else dataclasses.replace(share, tensor=tensor)
            with torch.inference_mode():
                return self._run_rank(share, weights, before)

        try:
            size = self.division.tensor
            return [run(None)] if size == 1 else run_ranks(size, run)
        except (Violation, DivisionRefusedError):
            raise
        except Exception as cause:
            raise SHARED.violation(
                f"with {self.division}, a rank of stage {stage} raised "
                f"{type(cause).__name__}: {cause}"
            ) from cause

    def _run_rank(
        self,
        parallel: Parallel,
        weights: Mapping[str, torch.Tensor],
        before: Sequence[RankResult],
    ) -> RankResult:
        """Load and run one rank's share; its hidden states come from the rank of equal number."""
        try:
            model = self.make(parallel=parallel)
        except ModelError as cause:
            if "parallel." not in str(cause):
                raise REFUSED.violation(f"the constructor raised a ModelError: {cause}") from cause
            raise DivisionRefusedError(str(cause)) from cause
        whole = {name: tuple(weight.shape) for name, weight in weights.items()}
        shapes, cuts = model.weight_shapes(), model.weight_cuts()
        result = RankResult(parallel.stage, parallel.tensor.rank, shapes, cuts, (), (), None)
        check_cut_weights(str(result), whole, shapes, cuts)
        parts = {n: cuts[n].of(weights[n]) if n in cuts else weights[n] for n in shapes}
        self.load(model, parts)
        sequences, hidden = self.sequences(model), list[torch.Tensor]()
        for index, step in enumerate(self.steps):
            stage_input = before[parallel.tensor.rank].hidden[index].clone() if before else None
            hidden.append(sequences.step(step, hidden=stage_input))
        if not parallel.is_last and hidden[0].shape[1] != model.hidden_size:
            raise HIDDEN_SIZE.violation(
                f"{result} returned hidden states {list(hidden[0].shape)}, hidden_size is "
                f"{model.hidden_size}"
            )
        logits = model.compute_logits(hidden[-1]) if parallel.is_last else None
        return dataclasses.replace(result, specs=model.kv_specs(), hidden=hidden, logits=logits)
