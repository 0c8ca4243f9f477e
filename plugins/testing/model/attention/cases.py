"""The rules of the conformance suite for attention backends, and the steps that it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from hardpoint.plugins import AttentionBackend, KVSpec
from hardpoint.testing.model.sequences import SequenceBlocks, WholeHistory
from hardpoint.testing.suite import Rule, short_repr

RESULT = Rule(
    "result: attend returns a tensor of the shape, dtype and device of q",
    "return one row per query, [tokens, num_heads, head_size], as q is",
)
CAUSAL = Rule(
    "causal: a token attends to itself and to the earlier tokens of its sequence",
    "for query i of a sequence with n cached tokens use keys 0 to n + i",
)
HEADS = Rule(
    "heads: each group of num_heads / num_kv_heads query heads shares a key and value head",
    "let query head i read key head i // (num_heads // num_kv_heads)",
)
WINDOW = Rule(
    "window: a token attends to at most spec.window tokens, itself included",
    "mask the keys up to position - window; None is unlimited, and the plan serves layers with "
    "different windows",
)
SOFTCAP = Rule(
    "softcap: scores are limited to spec.softcap before they are masked",
    "compute softcap * tanh(score * scale / softcap) where spec.softcap is not None, or leave the "
    "class attribute `softcaps` False: models that need it are refused then",
)
SINKS = Rule(
    "sinks: each head has one more score, from spec.sinks, with the value 0",
    "where spec.sinks is not None, add exp(sinks[head] - maximum) to each query's sum of weights, "
    "and read the tensor in each step; or leave the class attribute `has_sinks` False: "
    "models that need them are refused then",
)
SEES = Rule(
    "sees: a token sees the keys of its sequence up to the position in step.sees",
    "mask the keys after step.sees, where the step has it, not the keys after the token itself; "
    "windows begin where they do without it; or leave the class attribute `sees_ahead` False: "
    "models that need it are refused then",
)
VALUES = Rule(
    "values: with spec.value_size, values are the last so many elements of the keys",
    "store k alone, which v is, and return value_size elements of each head; or leave the property "
    "`shares_values` False: `attend` gets such a layer without it then, and keys as values",
)
CACHE = Rule(
    "cache: the tokens of earlier steps are remembered",
    "write k and v to the slots of the step, then read the keys and values of the whole sequence",
)
BLOCKS = Rule(
    "blocks: keys and values are written to plan.slots and read through plan.block_table",
    "position p of sequence i is at block_table[i, p // block_size], offset p % block_size; "
    "other contents of a block are from a sequence that has gone",
)
SEQUENCES = Rule(
    "sequences: a token attends to no other sequence",
    "tokens query_starts[i] to query_starts[i + 1] are of sequence i; entries of block_table "
    "beyond its length are padding and name a block of another sequence",
)
LAYERS = Rule(
    "layers: any mix of steps, sequences and layers equals plain attention",
    "keep nothing of a layer in the backend or in the plan, which the step's layers share",
)

ROTATES = Rule(
    "rotates: rotate_and_attend rotates q and k, then attends as attend does",
    "turn the first angles.shape[1] elements of each head of q and k as Ops.rotate does, in "
    "float32, and cache the rotated keys; or leave the class attribute `rotates` False",
)
PADDING = Rule(
    "padding: a recorded step has the numbers of its tensors when it runs, and passes over padding",
    "read the step's lens, slots and block_table in attend, not in plan, where query_starts and "
    "seq_lens are upper bounds; write nothing at slot -1; or leave the class attribute `pads` "
    "False",
)
GROUPS = Rule(
    "groups: layers of several windows share a cache, each with the blocks of its group",
    "keep the data of a step in its plan, one for each group; blocks that the "
    "window has passed are written to by others",
)
CODES = Rule(
    "codes: with another kv_cache.dtype, values are the scales times the codes of each token "
    "and head",
    "store keys and values as AttentionBackend.cache_dtypes describes it, with a scale for each "
    "token, head and side, and read all of them so, also the step's own; quantize_heads and "
    "dequantize_heads of hardpoint.toolkit.kv_codes do it in torch",
)
CODED_STEPS = Rule(
    "coded steps: codes and scales are from the last token that was written to their slot",
    "write the scales with the codes, to plan.slots, and read both through plan.block_table",
)
ROWS = Rule(
    "rows: a row of a sequence has the result that it has as the single query of a step",
    "read all keys and values from the cache, also the step's own, and sum a row's values in the "
    "same order however many rows, sequences and threads a step has; or leave `batch_invariant` of "
    "the suite False, which allows rows to differ within the tolerance",
)
_TOLERANCES = {torch.bfloat16: 0.06, torch.float16: 0.01}
MOST_ROWS = 16
"""Of a sequence that decodes: a token and its drafts."""


@dataclass(frozen=True)
class AttentionCase:
    """Steps to run.

    Attributes:
        heads: query heads and key heads per layer.
        windows: per layer.
        softcap: softcap of all layers.
        has_sinks: whether all layers have sinks.
        steps: tokens by sequence; an ended sequence of the same name starts again.
        ends: sequences that end after each step.
        shuffled: whether blocks are handed out in any order.
        grouped: whether each layer is a group, with blocks of its own in a cache that they share.
        cache_dtype: `kv_cache.dtype`.
        shares_values: whether values are part of the keys.
    """

    block_size: int
    head_size: int
    heads: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    steps: tuple[Mapping[str, int], ...]
    ends: tuple[str, ...] = ()
    shuffled: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    grouped: bool = False
    cache_dtype: str = "auto"
    shares_values: bool = False

    def specs(self, device: torch.device) -> list[KVSpec]:
        """Return one spec per layer; the sinks of heads differ."""
        generator = torch.Generator().manual_seed(0)
        width = value_size(self.head_size) if self.shares_values else None

        def sinks(heads: int) -> torch.Tensor | None:
            drawn = torch.randn(heads, generator=generator) * 2
            return drawn.to(device) if self.has_sinks else None

        return [
            KVSpec(
                *(num_heads, num_kv_heads, self.head_size, 0.4, window),
                softcap=self.softcap,
                sinks=sinks(num_heads),
                value_size=width,
            )
            for (num_heads, num_kv_heads), window in zip(self.heads, self.windows, strict=True)
        ]


@dataclass(frozen=True)
class RowsCase:
    """Rows that end a sequence, and how they are computed together.

    Attributes:
        spec: the layer.
        before: tokens before the rows.
        count: rows in the step that has them alone.
        chunk: tokens before the rows in the step that has a part of the prompt, too.
        others: tokens of another sequence in these steps, or 0.
        cache_dtype: `kv_cache.dtype`.
    """

    block_size: int
    spec: KVSpec
    before: int
    count: int
    chunk: int
    others: int
    cache_dtype: str


def rows_cases(
    block_sizes: Sequence[int], specs: st.SearchStrategy[KVSpec], cache_dtypes: Sequence[str]
) -> st.SearchStrategy[RowsCase]:
    """Return a strategy for rows that end a sequence."""
    return st.builds(
        RowsCase,
        block_size=st.sampled_from(block_sizes),
        spec=specs,
        before=st.integers(0, 20) | st.integers(0, 300),
        count=st.integers(1, MOST_ROWS),
        chunk=st.integers(0, 40),
        others=st.sampled_from((0, 1, 3)),
        cache_dtype=st.sampled_from(cache_dtypes),
    )


def decode_step(
    backend: AttentionBackend,
    spec: KVSpec,
    cache: Any,
    blocks: SequenceBlocks,
    inputs: Callable[[], Sequence[torch.Tensor]],
) -> Callable[[int], None]:
    """Return a function that runs a step of one token; a sequence ends after ten tokens.

    Args:
        backend: under test.
        spec: spec of the layer.
        cache: cache of the layer.
        blocks: blocks of the cache.
        inputs: returns q, k and v of a token.
    """

    def use(number: int) -> None:
        plan = backend.plan(blocks.step([("a", 1)]))
        with torch.inference_mode():
            backend.attend(spec, cache, plan, *inputs())
        if number % 10 == 9:
            blocks.release("a")

    return use


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Set the number of threads of torch and of libraries that share its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn_angles(
    generator: torch.Generator, spec: KVSpec, tokens: int, device: torch.device
) -> torch.Tensor:
    """Return angles for the first elements of heads, or for all, float32 [tokens, size]."""
    half = int(torch.randint(1, spec.head_size // 2 + 1, (1,), generator=generator))
    turns = torch.rand(tokens, half, generator=generator) * 6
    return torch.cat((turns.cos(), turns.sin()), 1).to(device)


def seen_ahead(generator: torch.Generator, counts: Sequence[tuple[str, int]]) -> list[int]:
    """Return the number of later tokens that each token of a step sees: all of its span."""
    ahead: list[int] = []
    for _, count in counts:
        first, last = torch.randint(0, count, (2,), generator=generator).sort()[0].tolist()
        ahead += [last - i if first <= i <= last else 0 for i in range(count)]
    return ahead


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads x [tokens, heads, head_size], rotated as `Ops.rotate` does."""
    size = angles.shape[1]
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    a, b = x[..., :size].float().chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., size:]), -1)


def value_size(head_size: int) -> int:
    """Return how many elements of keys are values, where they are part of them."""
    return head_size - head_size // 4


def copied(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies of queries, keys and values, which stay one tensor if they are."""
    keys = k.clone()
    return q.clone(), keys, keys if v is k else v.clone()


def tolerance(dtype: torch.dtype, stated: float | None) -> float:
    """Return the maximum difference of results of a dtype; `stated` is the suite's."""
    return stated or _TOLERANCES.get(dtype, 1e-4)


def check_output(
    rule: Rule,
    out: Any,
    q: torch.Tensor,
    history: WholeHistory,
    counts: Sequence[tuple[str, int]],
    limit: float,
) -> None:
    """Compare the result of a step with plain attention.

    Args:
        rule: the broken rule if it differs.
        out: the result.
        q: queries of the step.
        history: the layer, to which the step was appended.
        counts: the sequences and their tokens.
        limit: maximum difference.
    """
    if not isinstance(out, torch.Tensor):
        raise RESULT.violation(f"attend returned {short_repr(out)}, no tensor")
    size = history.spec.value_size
    like = q if size is None else q[..., :size]
    got, wanted = ((x.dtype, list(x.shape), x.device) for x in (out, like))
    if got != wanted:
        expectation = "q is" if size is None else "with value_size it should be"
        raise RESULT.violation(
            f"attend returned {got[0]} {got[1]} on {got[2]}, {expectation} "
            f"{wanted[0]} {wanted[1]} on {wanted[2]}"
        )
    out = out.double().cpu()
    expected = history.attend(counts, q)
    difference = (out - expected).abs().nan_to_num(torch.inf)
    if float(difference.max()) <= limit:
        return
    query = int(difference.flatten(1).amax(-1).argmax())
    names = [f"query {i} of {name!r}" for name, count in counts for i in range(count)]
    observed = (
        f"in a step of {', '.join(f'{count} tokens of {name!r}' for name, count in counts)}, "
        f"the output of {names[query]} differs from plain attention by "
        f"{float(difference[query].max()):.3g}, at most {limit:.3g} is accepted"
    )
    for mistake, wrong in history.with_mistakes(counts, q):
        if (wrong - expected).abs().max() > limit and (out - wrong).abs().max() <= limit:
            observed += f"; the output is {mistake}"
            break
    raise rule.violation(observed)
