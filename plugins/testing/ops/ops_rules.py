"""The rules for operations."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

RESULT = Rule(
    "result: an operation returns a tensor of the stated shape, dtype and device",
    "return one row per row of x, in the context's dtype on its device",
)
VALUES = Rule(
    "values: an operation computes the result in its docstring",
    "sum in float32 at least, and round the result once",
)
ROWS = Rule(
    "rows: a row's result does not depend on the other rows",
    "compute each row with the same sums in the same order, however many there are",
)
IN_PLACE = Rule(
    "in place: add_rms_norm, rotate, scale, add and add_lora change their first argument, and "
    "nothing else",
    "add delta to x itself, rotate the heads of x itself, and write results to new memory",
)
KEPT = Rule(
    "kept: with a layout, packed matrices of one process serve another",
    "return a contiguous tensor that `linear` needs nothing else for, from the weight alone, or "
    "state no layout",
)
TOKENS = Rule(
    "tokens: an operation on logits keeps or returns the tokens in its docstring",
    "do as the method of Ops that is overridden, which is plain torch",
)
REPEATED = Rule(
    "repeated: the result of record repeats every operation, on the same tensors",
    "record all that the operations compute, or return None",
)
SIZES = Rule(
    "sizes: record_sizes gives numbers of sequences in 1..max_num_seqs, ascending",
    "return ints, each once, none larger than max_num_seqs, or an empty sequence",
)
