"""Keys of rank_pattern and alpha_pattern match as in PEFT, in linear time."""

from __future__ import annotations

import itertools
import time

import pytest
from peft.utils.other import get_pattern_key

from hardpoint.builtin_plugins.step_parts.adapters.patterns import ModulePatterns

KEYS = (
    "q_proj",
    "self_attn.q_proj",
    "^model.layers.1.self_attn.q_proj",
    "layers.1.self_attn.q_proj$",
    r"layers\.1\..*",
    r".*\.self_attn\.[qk]_proj",
    r"layers\.\d\.mlp\.\w+_proj",
    r"^layers\.[0-9]+.*",
    r"model\.layers\.1[0-5]?\..*_proj",
    r"layers.[^2-9]\.mlp.*?down_proj$",
    r".*.*.*.*up_proj",
)
MODULES = [
    f"{prefix}layers.{layer}.{name}"
    for prefix in ("", "model.", "model.language_model.")
    for layer in (0, 1, 12, 21)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "xq_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize("keys", [*itertools.combinations(KEYS, 2), *((key,) for key in KEYS)])
@pytest.mark.parametrize("step", [1, -1])
def test_the_first_key_that_matches_counts_as_in_peft(keys, step):
    keys = keys[::step]
    patterns = ModulePatterns({key: index for index, key in enumerate(keys)})
    for module in MODULES:
        key = get_pattern_key(keys, module)
        expected = keys.index(key) if key in keys else -1
        assert patterns.value_of(module, -1) == expected, (keys, module)


@pytest.mark.parametrize("key", [r"((\w|\.)+)+!", "(a", "a{2}", "a|b", r"\b", "a**", "[", "a$b"])
def test_other_expressions_are_refused(key):
    with pytest.raises(ValueError, match="expected a name, or one with"):
        ModulePatterns({"q_proj": 1, key: 2})


def test_the_time_of_a_match_does_not_grow_with_repetitions():
    patterns = ModulePatterns({".*" * 120 + "x": 1, r"[\w.]+" * 30 + "-?x": 2})
    start = time.perf_counter()
    assert patterns.value_of("a" * 2000, 0) == 0
    assert patterns.value_of("a" * 2000 + "x", 0) == 1
    assert time.perf_counter() - start < 60
