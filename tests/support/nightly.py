"""Tests that run with --all only, of those that a decorator does not reach.

They are inherited from suites, or single parameters. All others have the marker where they are.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_PATTERNS = (
    # What a suite finds out about memory is shown by components that are broken.
    "tests/testing/test_*_conform.py::*::test_memory",
    "tests/testing/test_kv_connectors_conform.py::TestStores::test_storage",
    "tests/testing/test_scheduling_conform.py::TestDefaultSchedulerWithOtherOptions::*",
    # Triton's interpreter takes seconds for what a GPU does in no time.
    "tests/testing/test_worker_conform.py::TestTritonOps::test_codes",
    "tests/testing/test_worker_conform.py::TestTritonOps::test_top_?",
    "tests/testing/test_worker_conform.py::TestTritonAttention::test_rows",
    "tests/testing/test_worker_conform.py::TestGemma3WithImages::test_weights",
    # One of each generation of vLLM's interface always runs.
    "tests/testing/test_foreign_conform.py::TestV0Factory::*",
    "tests/testing/test_foreign_conform.py::TestV0Class::*",
    "tests/testing/test_foreign_conform.py::TestV1Tokens::*",
    "tests/testing/test_foreign_conform.py::TestV1WithState::*",
    "tests/testing/test_foreign_conform.py::TestV2History::*",
    "tests/testing/test_worker_kit_catches.py::test_a_mistake_in_codes_*[[]ScalesTokens]",
    "tests/testing/test_worker_kit_catches.py::test_a_mistake_in_codes_*[[]ScalesOfValues]",
    "tests/process/test_joined_engines.py::*[[]with_time]",
    "tests/process/test_live_changes_in_processes.py::test_random_*[[]two engines-*]",
    "tests/test_stranger_small.py::*[[]acme_ops]",
    "tests/test_stranger_small.py::*[[]acme_spans]",
    "tests/test_stranger_small.py::*[[]acme_ring]",
    "tests/builtin_plugins/test_sampler.py::TestDistribution::test_a_big_vocabulary_*[[]torch]",
)


def is_nightly(node_id: str) -> bool:
    """Whether a test is one of them."""
    return any(fnmatchcase(node_id, pattern) for pattern in _PATTERNS)
