"""Patterns by which checkpoints name modules, matched in a time that stays small."""

from __future__ import annotations

import re

from hardpoint.toolkit.hf_config import short

_REPEAT = r"[*+{]|(?<!\()\?"
_MOST_REPEATS = 4


def matches(stated: str, prefix: str, module: str, source: str) -> bool:
    """Return whether a module's name begins with a match of a pattern.

    Args:
        stated: a regular expression of a checkpoint, after a prefix.
        prefix: text before it, "re:" for example.
        module: name of a module, "model.layers.0.mlp.down_proj" for example.
        source: which field has the pattern, for messages.

    Raises:
        ValueError: it is no pattern, or may take exponential time.
    """
    pattern = stated.removeprefix(prefix)
    # A repeated group, or a long repetition, can take exponential time.
    if re.search(r"\)[*+{]", pattern) or len(re.findall(_REPEAT, pattern)) > _MOST_REPEATS:
        raise ValueError(
            f"{source}: expected patterns with at most {_MOST_REPEATS} repeats, none of them of "
            f"a group, got {short(stated)}"
        )
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as cause:
        raise ValueError(f"{source}: {short(stated)} is no pattern: {cause}") from cause
