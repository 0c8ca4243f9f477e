"""Selection of the tests of a run: the default ones, --all, or --timing.

A test that takes long is marked `nightly`, one that depends on the machine's speed `timing`. Tests
that a decorator does not reach are named here: those inherited from suites, and single parameters.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from support.left_out import LEFT_OUT
from support.process.fork_server import STARTS

ROOT = Path(__file__).resolve().parents[2]
_MANY_STARTS = 5
"""A variable that a test sets for its own engine prevents fewer forks than this."""
ALWAYS_RUN = ("README.md", "docs/first-plugin.md")
"""Pages whose examples every run executes."""

_NIGHTLY = (
    # Of each, another test of the default run shows the same in less time.
    "tests/test_benchmarks.py::test_executors_with_one_worker",
    "tests/core/worker/test_overlapped_steps.py::test_overlapped_equals_alone[[]None-three-*]",
    "tests/builtin_plugins/test_images_through_transformers.py::test_wrong_images_*",
    "tests/builtin_plugins/test_images_through_transformers.py::test_a_processor_that_cannot_start_*",
    "tests/plugins/testing/test_general_kit_catches.py::test_a_thread_that_catches_up_is_no_growth",
    "tests/api/test_answer_lengths.py::test_lengths_of_an_async_llm",
    # What a suite finds out about memory is shown by components that are broken.
    "tests/plugins/testing/test_*_conform.py::*::test_memory",
    "tests/plugins/testing/test_*_conform.py::*::test_resources",
    "tests/plugins/testing/test_scripted_parts.py::*::test_resources",
    "tests/builtin_plugins/test_*.py::Test*::test_resources",
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::*::test_resources",
    "tests/api/test_io_processors.py::*::test_resources",
    "tests/plugins/testing/test_plugin_check.py::test_options_that_the_suite_of_an_author_supplies",
    "tests/plugins/testing/test_io_processor_kit_catches.py::test_correct_components_pass[[]ByHand]",
    "tests/plugins/testing/test_io_processor_kit_catches.py::test_correct_components_pass[[]Pairs]",
    # What other engines show.
    "tests/test_beams_real.py::test_beams_are_those_of_transformers*",
    "tests/deployment/bench/test_startup.py::test_a_start_by_stage",
    "tests/api/test_interrupted_start.py::*[[]starlette.requests]",
    "tests/api/test_interrupted_start.py::*[[]hardpoint.async_llm]",
    "tests/plugins/testing/test_output_parsers_of_families.py::*::test_resources",
    "tests/plugins/testing/test_adapter_resolvers_kit.py::TestFolder::test_resources",
    "tests/plugins/testing/test_text_kit_catches.py::test_correct_components_pass[[]S*",
    "tests/plugins/testing/test_io_processor_kit_catches.py::*[[]KeepsRequests-*",
    "tests/plugins/testing/test_worker_kit_catches.py::test_correct_*[[]WeightLoaderSuite-[1-9]]",
    "tests/builtin_plugins/test_draft_model.py::TestDraftModel::test_memory",
    "tests/plugins/testing/test_scheduling_conform.py::TestDefaultSchedulerWithOtherOptions::*",
    # Triton's interpreter takes seconds for what a GPU does in no time.
    "tests/plugins/testing/test_worker_conform.py::TestTritonOps::test_[!ag]*",
    "tests/plugins/testing/test_worker_conform.py::TestTritonAttention::test_[!c]*",
    "tests/plugins/testing/test_worker_conform.py::TestGemma3WithImages::test_weights",
    # One of each generation of vLLM's interface always runs.
    "tests/process/test_joined_engines.py::*[[]with_time]",
    "tests/plugins/testing/test_worker_kit_catches.py::test_a_mistake_in_codes_*[[]ScalesTokens]",
    "tests/plugins/testing/test_worker_kit_catches.py::test_a_mistake_in_codes_*[[]ScalesOfValues]",
    "tests/process/test_live_changes_in_processes.py::test_random_*[[]two engines-*]",
    "tests/builtin_plugins/test_sampler.py::TestDistribution::test_a_big_vocabulary_*[[]torch]",
    # Of the places and ways that are much alike, one or two always run.
    "tests/deployment/journal/test_replayed_schedules.py::test_engines_of_*[[]own process-stores]",
    "tests/deployment/journal/test_replayed_schedules.py::test_engines_of_*[[]in process-tensor 2]",
    "tests/deployment/journal/test_replayed_schedules.py::test_random_schedules[[]range([123]0, *",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-*_requests]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-add_request]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-update]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]executor-sample_tokens]",
    "tests/deployment/replicas/test_joining_engines.py::test_garbage_ends_*[[]frames[1234]]",
    "tests/test_equality_real.py::test_fp32_tokens_do_not_depend_*[[]whole prompts]",
    "tests/builtin_plugins/step_parts/adapters/test_adapter_scale.py::test_scales_share_*[[]process]",
    "tests/test_equality_real.py::test_drafts_change_no_fp32_token[[]alone]",
    "tests/builtin_plugins/test_scheduler_step_time.py::test_tokens_are_the_same_*[[][123]]",
    "tests/builtin_plugins/test_stat_opentelemetry.py::test_a_collector_that_is_gone_*[[]grpc]",
    "tests/builtin_plugins/server/test_extensions.py::test_a_callback_that_holds_*[[]call_*]",
    "tests/kernels/test_kernel_paths.py::test_each_path_passes_the_suite[[]avx*2]",
    # Of processes: faults of the same kind.
    "tests/process/test_same_errors.py::test_a_fault_that_ends_the_engine[[]s*-apart]",
    # tests/builtin_plugins: of models, formats and ways that are much alike, one or two always run.
    "tests/builtin_plugins/test_mixtures.py::test_parts_equal_the_whole[[]*-1-True]",
    "tests/builtin_plugins/test_mixtures.py::test_parts_equal_the_whole[[][!m]*-1-False]",
    "tests/builtin_plugins/test_mixtures.py::test_[!l]*[[]*-[dgh]*]",
    "tests/builtin_plugins/test_model_families.py::test_[bp]*[[]*-[lotw]*]",
    "tests/builtin_plugins/test_models_gemma.py::test_[abp]*[[]gemma*-[lunr]*]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_mixed_files_*[[]llama-*-tied-*]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_mixed_files_*[[]llama-*-none]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_mixed_files_*[[]phi3-[!q]*]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_mixed_files_*[[]phi3-*-untied-*]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_mixed_files_*[[]phi3-*-auto]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_scales_that_are_not_finite_*inf*",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_experts_*[[]plain]",
    "tests/builtin_plugins/test_quantizations_gguf.py::test_experts_*[[]few]",
    "tests/builtin_plugins/test_quantized_checkpoints.py::test_tokens_are_those_*[[]a*]",
    "tests/builtin_plugins/test_quantized_checkpoints.py::test_tokens_are_those_*[[]int-*]",
    "tests/builtin_plugins/test_qwen3_5.py::test_the_text_model_*[[][dt]*]",
    "tests/builtin_plugins/test_qwen3_5.py::test_a_divided_model_*[[]*-1-2]",
    "tests/builtin_plugins/test_qwen3_5.py::test_a_divided_model_*[[]*-2-1]",
    "tests/builtin_plugins/test_gpt_oss.py::test_new_sinks_*[[]as-released-torch]",
    "tests/builtin_plugins/test_gpt_oss.py::test_new_sinks_*[[]tied-auto]",
    "tests/builtin_plugins/test_loaders_cut.py::test_any_part_of_a_gguf_*[[]Q4_1]",
    "tests/builtin_plugins/test_loaders_cut.py::test_any_part_of_a_gguf_*[[]Q5_0]",
    "tests/builtin_plugins/test_transformers_ranks.py::test_an_engine_of_*[[]gemma3_text]",
    "tests/builtin_plugins/test_transformers_ranks.py::test_an_engine_of_*[[]qwen3_moe]",
    "tests/builtin_plugins/test_transformers_ranks.py::test_what_ranks_*[[]smollm3]",
    "tests/builtin_plugins/test_suffix.py::test_a_tree_occupies_*[[]compiled-300-30]",
    "tests/builtin_plugins/test_suffix.py::test_a_tree_occupies_*[[]python-2-4000]",
    "tests/builtin_plugins/test_kv_events.py::test_a_subscriber_that_is_killed_*[[]tcp]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_ends_*[[]idle-1]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_ends_*[[]step-0]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_ends_*[[]exit-1]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_ends_*[[]sampling-0]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_that_*[[]open-1]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_that_*[[]load-0]",
    "tests/builtin_plugins/test_multiproc.py::test_a_rank_that_fails_a_step_*[[][12]]",
    "tests/builtin_plugins/test_call_formats.py::test_every_text_*-order-True]",
    "tests/builtin_plugins/test_call_formats.py::test_every_text_*-nested-True]",
    "tests/builtin_plugins/test_call_formats.py::test_every_text_*-no schema-True]",
    "tests/builtin_plugins/test_hostile_schemas.py::test_they_*[[]not of anyOf]",
    "tests/builtin_plugins/test_quantized_checkpoints.py::test_tokens_are_those_*[[]com*]",
    "tests/builtin_plugins/test_quantized_checkpoints.py::test_floats_of_few_bits_*[[]nf4]",
    "tests/builtin_plugins/test_model_families.py::test_logits_*[[]olmo2-one-kv-head]",
    "tests/builtin_plugins/test_model_families.py::test_logits_*[[]granite-tied]",
    "tests/builtin_plugins/test_models_gemma.py::test_logits_*[[]gemma2-[nu]*]",
    "tests/builtin_plugins/test_qwen3_5.py::test_*[[]tied*]",
    "tests/builtin_plugins/test_transformers_ranks.py::test_what_ranks_*[[]o*]",
    "tests/builtin_plugins/test_loaders_cut.py::test_any_part_of_a_gguf_*[[]Q8_0]",
    "tests/builtin_plugins/test_suffix.py::test_a_tree_occupies_*[[]python-300-30]",
    "tests/builtin_plugins/test_suffix.py::test_drafts_change_no_output[[]0.9]",
    "tests/builtin_plugins/test_tokenizer_folder.py::test_a_file_of_tiktoken_*[[][QH]*]",
    "tests/builtin_plugins/test_shared_memory_communicator.py::test_a_killed_rank_*[[]3]",
    "tests/builtin_plugins/test_gpt_oss.py::test_new_sinks_*[[]tied-torch]",
    "tests/builtin_plugins/test_qwen3_next.py::test_bfloat16_stays_close",
    "tests/builtin_plugins/test_kv_tiers_in_engine.py::test_prompts_that_*[[]2048]",
    "tests/builtin_plugins/test_configs_as_transformers.py::test_a_config_*[[]no-window-[go]*]",
    "tests/builtin_plugins/test_draft_model.py::test_another_tokenizer_*[[]2-without_end*]",
    "tests/builtin_plugins/test_loader_outline.py::test_an_index_*[[]g*-transformers]",
    "tests/builtin_plugins/test_configs_as_transformers.py::test_a_config_*[[]original-of-[lt]*]",
    "tests/builtin_plugins/test_configs_as_transformers.py::test_a_config_*[[]whole-heads-*]",
    "tests/builtin_plugins/test_call_formats.py::test_values_*[[]glm45, special-*]",
    "tests/builtin_plugins/test_call_formats.py::test_values_*[[]deepseek_v3_2-*]",
    "tests/builtin_plugins/test_mixtures.py::test_logits_*[[]*-[gh]*]",
    "tests/builtin_plugins/test_loaders_gguf.py::test_architectures_*[[]*-[grw]*]",
    "tests/builtin_plugins/test_hostile_schemas.py::test_they_*[[]enums with *]",
    "tests/builtin_plugins/test_multiproc.py::test_the_death_of_a_rank_ends_*[[]exit-0]",
    "tests/builtin_plugins/test_gpt_oss.py::test_logits_*[[]tied]",
    # Processes, servers and commands: of kinds, routes and values that are alike, some always run.
    "tests/process/test_matrix.py::test_a_fork_has_the_adapter_*[[]prompt]",
    "tests/process/test_live_changes_*.py::test_a_change_that_a_process_*[[]two engines]",
    "tests/process/test_live_changes_*.py::test_workers_of_an_engine_*[[][ps]*]",
    "tests/process/test_start_errors.py::test_the_real_error_comes_once_*[[]AsyncLLM]",
    "tests/process/test_start_errors.py::test_an_end_without_a_message_*[[]Exits-*]",
    "tests/process/test_kv_connector_keys.py::test_one_thing_is_different[[][ad]*]",
    "tests/process/test_deaths.py::test_a_frontend_that_cannot_clean_up_*[[]hanging]",
    "tests/process/test_same_errors.py::test_an_executor_that_fails_outside_*[[]apart]",
    "tests/process/test_plugin_faults.py::test_arguments_that_are_wrong_*[[]break-*",
    "tests/builtin_plugins/server/test_stored_responses.py::test_a_response_goes_on_*[[]memory]",
    "tests/builtin_plugins/server/test_messages.py::test_the_budget_*[[]False-False]",
    "tests/builtin_plugins/server/test_messages.py::test_the_budget_*[[]True-True]",
    "tests/builtin_plugins/server/test_body_costs.py::test_twice_the_size_*[[]/[tip]*]",
    "tests/builtin_plugins/server/test_body_costs.py::test_twice_the_size_*[[]/v1/completions]",
    "tests/builtin_plugins/server/test_operations.py::test_a_signal_while_the_model_*[[]2]",
    "tests/api/test_batch_files.py::*::test_what_there_is_no_room_for_waits[[]max_waiting = 2-2]",
    "tests/test_fault_messages.py::test_faults_have_*[[][aelot]*-raising]",
    "tests/test_fault_messages.py::test_faults_have_*[[]communicators-raising]",
    "tests/test_equality_real.py::test_fp32_tokens_do_not_depend_*[[]preempting]",
    "tests/test_equality_real.py::test_fp32_tokens_are_those_*[[]joining and leaving]",
    "tests/test_adapters.py::test_a_changing_batch_*[[]Counting*]",
    "tests/test_compatibility.py::test_a_frozen_wheel_runs[[]contract_1-False]",
    "tests/test_compatibility.py::test_frozen_wheels_of_every_kind_*[[]models]",
    "tests/test_stranger_step_part.py::*::test_a_fault_ends_the_requests_*[[]False]",
    "tests/process/test_matrix.py::test_a_row[[]40]",
    "tests/process/test_composition.py::test_drafts_change_nothing[[]an engine process]",
    "tests/test_equality_real.py::test_drafts_change_no_fp32_token[[]in one batch]",
    "tests/test_stacks.py::test_a_stack_answers[[]creative]",
    "tests/plugins/toolkit/test_branches.py::test_candidates_are_those_*[[]config1]",
    "tests/plugins/toolkit/test_branches.py::test_an_abort_ends_all_branches[[]False]",
    # API, journals, simulation and replicas.
    "tests/deployment/journal/test_replayed_schedules.py::test_random_schedules[[]range(40, *",
    "tests/deployment/journal/test_replayed_schedules.py::test_engines_of_*[[]in process-stores]",
    "tests/deployment/simulation/test_fleet.py::Test*::test_*[[]two_choices]",
    # core and boundary: of formats, schedules and faults that are much alike, some always run.
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]None-[!d]*",
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]2-[bdl]*",
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]2-chunks-of-64]",
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]2-preempting-*",
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]2-priority]",
    "tests/core/worker/test_equality_*.py::test_batched_equals_alone[[]2-shortest-first]",
    "tests/core/worker/test_equality_scripted.py::test_drafts_change_nothing[[][ltw]*",
    "tests/core/worker/test_equality_grammars.py::test_drafts_change_nothing[[]defaults]",
    "tests/core/worker/test_processor_faults.py::test_31_of_32_*[[]one-*-[!r]*",
    "tests/core/worker/test_processor_faults.py::test_31_of_32_*[[]all-*-[!r]*",
    "tests/core/worker/test_states_run_out.py::test_random_schedules[[][!0]*",
    "tests/core/worker/test_states_run_out.py::test_tokens_are_the_same[[][!f]*-False]",
    "tests/core/worker/test_states_in_engine.py::test_tokens_are_*[[]hybrid-small-blocks]",
    "tests/core/worker/test_states_in_engine.py::test_tokens_are_*[[]states-chunks]",
    "tests/core/worker/test_device_syncs.py::test_a_step_waits_once_*[[]chunks-of-sliding-windows]",
    "tests/core/worker/test_observe.py::test_drafts_change_nothing[[]room]",
    "tests/core/engine/test_several_ranks.py::test_*[[][23]]",
    "tests/core/engine/test_scheduling_in_engine.py::test_a_client_cannot_jump_*[[]fair]",
    "tests/core/engine/test_scheduling_in_engine.py::test_a_client_cannot_jump_*[[]short*",
    "tests/core/engine/test_scheduling_in_engine.py::*test_a_swap_that_fails_*[[]uniproc-*",
    "tests/core/engine/test_scheduling_in_engine.py::*test_a_swap_that_fails_*[[]fair-*",
    "tests/core/engine/test_window_groups.py::test_the_same_tokens[[][ue]*",
    "tests/core/engine/test_weight_updates.py::test_an_updated_engine_is_*[[]folder]",
    "tests/core/engine/test_weight_updates.py::test_few_bits_follow[[]int8]",
    "tests/core/engine/test_failed_close.py::test_a_policy_*[[]Policy-ValueError-own process]",
    "tests/deployment/process/engine/test_launch_limits.py::test_the_child_*[[]nothing]",
    "tests/deployment/process/engine/test_launch_limits.py::test_the_child_*[[]half of the first]",
    "tests/deployment/process/engine/test_launch_parents.py::test_child_ends_when_*[[]alone]",
    "tests/deployment/process/engine/test_launch_parents.py::test_plain_script[[]async]",
    "tests/core/frontend/test_calls_in_reasoning.py::test_a_call_ends_the_reasoning[[]*-2-True]",
    "tests/core/frontend/test_calls_in_reasoning.py::test_a_call_ends_the_reasoning[[]*-1-False]",
    "tests/core/frontend/test_given_outputs.py::test_text_reasoning_and_calls_*[[]2]",
    "tests/core/frontend/test_structured_answers.py::test_calls_that_are_required[[]strict1-[eg]*",
    "tests/core/frontend/test_structured_answers.py::test_calls_that_are_required[[]strict1-hu*",
    "tests/core/frontend/test_structured_answers.py::test_the_answer_after_*[[]900-[!t]*",
    "tests/core/frontend/test_structured_answers.py::test_an_answer_without_*[[][gs]*",
    "tests/core/frontend/test_structured_answers.py::test_what_the_model_wants_*[[][gs]*",
    "tests/core/frontend/test_statistics_in_engine.py::test_sinks_get_the_trace_*[[]own process]",
    "tests/core/frontend/test_output_parsing.py::test_the_parts_of_an_output[[]*-1]",
    "tests/core/frontend/test_output_parsing.py::test_calls_after_the_first_one_*[[]*-1]",
    "tests/core/frontend/test_structured_answers.py::test_a_form_of_the_*[[]hermes-[cgl]*",
    "tests/host/boundary/test_consequences.py::test_a_built_in_is_*[[]KeyboardInterrupt-*",
    "tests/host/boundary/test_consequences.py::test_a_built_in_is_*[[]writes-[!l]*",
    "tests/kernels/test_kernel_paths.py::test_each_path_passes_the_suite*",
    # features, kernels, toolkit, typed, plugins, benchmarks
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::TestHead::test_alone",
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::TestHead::test_drafts",
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::TestHead::test_forgets",
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::TestHead::test_memory",
    "tests/builtin_plugins/step_parts/adapters/test_oracle.py::test_logprobs_*[[]*-rslora]",
    "tests/builtin_plugins/step_parts/adapters/test_oracle.py::test_logprobs_*[[]*-one_layer]",
    "tests/kernels/test_logits_kernels.py::test_a*[[]avx2[]-]*",
    "tests/kernels/test_logits_kernels.py::test_a*[[]avx512[]-]*",
    # tests/plugins/testing: what samples of the kit show, and components that are like others.
    "tests/plugins/testing/test_scripted_parts.py::*::test_memory",
    "tests/plugins/testing/test_scripted_parts.py::test_batched_equals_alone[[][bcnr]*]",
    "tests/plugins/testing/test_text_conform.py::Test[GS]*::test_threads",
    "tests/plugins/testing/test_kit_catches.py::test_correct_components_pass[[][BCD]*-*]",
    "tests/plugins/testing/test_scheduling_conform.py::Test*Weight::*",
    "tests/plugins/testing/test_scheduling_conform.py::TestTinyScheduler::*",
    "tests/plugins/testing/test_scheduling_conform.py::TestPolicyWithArguments::*",
    "tests/plugins/testing/test_communicators_conform.py::TestTorchCommunicator::test_[!crs]*",
)


_TIMING: tuple[str, ...] = (
    # tests/builtin_plugins: what drafts cost, and calls that end at a time limit of a suite.
    "tests/builtin_plugins/test_*.py::Test*::test_speed",
    "tests/builtin_plugins/test_multiproc_suite.py::*::test_timeout",
    # features, kernels, toolkit, typed, plugins, benchmarks
    "tests/builtin_plugins/step_parts/speculation/test_hidden_states.py::TestHead::test_speed",
    # tests/plugins/testing: costs of components, and leases and time-outs of what is correct.
    "tests/plugins/testing/test_*.py::Test*::test_speed",
    "tests/plugins/testing/test_output_parsers_*.py::Test*::test_linear",
    "tests/plugins/testing/test_kv_connectors_conform.py::TestStoresInTime::*",
    "tests/plugins/testing/*::Test*Peer*::test_leases",
    "tests/plugins/testing/*::Test*Peer*::test_offers",
    "tests/plugins/testing/*::Test*Peer*::test_waits",
)


class Selection:
    """A pytest plugin that deselects the tests of other runs, and counts them."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options of the run."""
        self._all = bool(config.getoption("all"))
        self._timing = bool(config.getoption("timing"))
        self._seed = config.getoption("shuffle")
        self._left_out = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out tests; order the files at random if there is a seed."""
        chosen = [item for item in items if self._is_chosen(item)]
        if not self._all and not self._timing:
            chosen = list(_without_products(chosen))
        kept_items = set(chosen)
        left_out = [item for item in items if item not in kept_items]
        self._left_out = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        if self._seed is not None:
            files = [list(group) for _, group in groupby(chosen, key=lambda item: item.path)]
            random.Random(self._seed).shuffle(files)
            chosen = [item for file in files for item in file]
        items[:] = chosen

    def _is_chosen(self, item: pytest.Item) -> bool:
        if _is(item, "timing", _TIMING):
            return self._timing
        return not self._timing and (self._all or not _is(item, "nightly", _NIGHTLY + LEFT_OUT))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the count to the process that prints it."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self._left_out
            output["not_forked"] = dict(STARTS.not_forked)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the counts of a worker; each of them collects all tests."""
        output = getattr(node, "workeroutput", {})
        self._left_out = output.get("left_out", self._left_out)
        STARTS.not_forked.update(output.get("not_forked", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests this run left out, and what made starts slow."""
        if self._left_out and not self._all:
            terminalreporter.write_line(f"{self._left_out} tests run only with scripts/test --all")
        for names, count in STARTS.not_forked.most_common():
            if count >= _MANY_STARTS:
                terminalreporter.write_line(
                    f"{count} engine processes were started, not forked: {names} changed"
                )


def _is(item: pytest.Item, marker: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a test has a marker, or its name matches a pattern."""
    if item.get_closest_marker(marker):
        return True
    name = str(item.nodeid)
    matches = _compile(patterns, name.partition("::")[0])
    return matches is not None and matches(name) is not None


@cache
def _compile(patterns: tuple[str, ...], path: str) -> Callable[[str], re.Match[str] | None] | None:
    """Return a function that matches names of tests of a file, or None if no pattern can.

    The whole suite has 25,000 names and 200 patterns.
    """
    expressions = [
        translate(pattern) for pattern in patterns if fnmatchcase(path, pattern.partition("::")[0])
    ]
    return re.compile("|".join(expressions)).match if expressions else None


def _without_products(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests, but only some combinations of several `parametrize` decorators.

    Each set of values of a decorator is in one of them at least. All their combinations run with
    `--all`.
    """
    for _, group in groupby(items, key=lambda item: (item.parent, getattr(item, "function", item))):
        tests = list(group)
        marks = [mark for mark in tests[0].iter_markers("parametrize") if mark.args]
        if len(marks) < 2:
            yield from tests
            continue
        axes = [_names(mark.args[0]) for mark in marks]
        yield from _covering({test: _values(test, axes) for test in tests})


def _names(argument: str | Sequence[str]) -> Sequence[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else argument


def _values(item: Any, axes: Sequence[Sequence[str]]) -> set[tuple[int, ...]]:
    """Return the values of a test on each axis: the identities of its parameters."""
    params = item.callspec.params
    return {
        (number, *(id(params.get(name)) for name in names)) for number, names in enumerate(axes)
    }


def _covering(values: Mapping[pytest.Item, set[tuple[int, ...]]]) -> Iterator[pytest.Item]:
    """Yield few tests, in their order, that have all the values."""
    missing = set().union(*values.values())
    chosen = set[pytest.Item]()
    while missing:
        best = max(values, key=lambda item: len(values[item] & missing))
        missing -= values[best]
        chosen.add(best)
    yield from (item for item in values if item in chosen)


def changed_pages() -> set[str]:
    """Return the paths of the pages changed since the merge base with `main`.

    All pages are new where there is no `main` to compare with.
    """
    try:
        base = _git("merge-base", "main", "HEAD").strip()
        changed = _git("diff", "--name-only", base, "--", "*.md")
        new = _git("ls-files", "--others", "--exclude-standard", "--", "*.md")
    except (OSError, subprocess.CalledProcessError):
        return {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    return {*changed.splitlines(), *new.splitlines()}


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
