"""Tests that run with --all only, of those that a decorator does not reach.

They are inherited from suites, or single parameters. All others have the marker where they are.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_PATTERNS = (
    # What a suite finds out about memory is shown by components that are broken.
    "tests/testing/test_*_conform.py::*::test_memory",
    "tests/builtin_plugins/test_draft_model.py::TestDraftModel::test_memory",
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
    # Of the places and ways that are much alike, one or two always run.
    "tests/journal/test_replayed_schedules.py::test_engines_of_each_kind[[]own process-stores]",
    "tests/journal/test_replayed_schedules.py::test_engines_of_each_kind[[]in process-tensor 2]",
    "tests/journal/test_replayed_schedules.py::test_random_schedules[[]range([123]0, *",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-*_requests]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-add_request]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-update]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]executor-sample_tokens]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_of_the_*[[]worker-__init__]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_of_the_*[[]worker-start]",
    "tests/process/test_embedding.py::test_a_plain_program_without_a_guard[[]-c]",
    "tests/replicas/test_joining_engines.py::test_garbage_ends_its_engine_alone[[]frames[1234]]",
    "tests/features/adapters/test_adapter_scale.py::test_scales_share_*[[]process]",
    "tests/test_equality_real.py::test_fp32_tokens_do_not_depend_*[[]whole prompts]",
    "tests/test_equality_real.py::test_drafts_change_no_fp32_token[[]alone]",
    "tests/builtin_plugins/test_scheduler_step_time.py::test_tokens_are_the_same_*[[][13]]",
    "tests/builtin_plugins/test_stat_opentelemetry.py::test_a_collector_that_is_gone_*[[]grpc]",
    "tests/builtin_plugins/server/test_extensions.py::test_a_callback_that_holds_*[[]call_*]",
    "tests/kernels/test_kernel_paths.py::test_each_path_passes_the_suite[[]avx*2]",
)


def is_nightly(node_id: str) -> bool:
    """Whether a test is one of them."""
    return any(fnmatchcase(node_id, pattern) for pattern in _PATTERNS)
