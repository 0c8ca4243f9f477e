"""Strategies of the messages between frontend and engine, with every one of their fields."""

from __future__ import annotations

from hypothesis import strategies as st

from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    ReasoningMarkers,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
)
from hardpoint.plugins.params import PoolingParams, RepetitionDetection
from hardpoint.plugins.requests import (
    LoRARequest,
    MultiModalFeature,
    PartArray,
    ResumedOutputs,
    Retention,
    TokenLogprobs,
    WeightRun,
)
from hardpoint.plugins.requests.engine_state import EngineLoad, KVCacheChanges
from hardpoint.plugins.requests.stats import KVTierStats, PrefixCacheStats
from hardpoint.plugins.structured import AnyTextFormat, StructuralTag, StructuredOutputs

TEXT = st.text(max_size=8)
TOKENS = st.lists(st.integers(0, 2**31), max_size=20)
FLOATS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = {}


def whole(cls, **fields):
    """A strategy of a struct that names every one of its fields."""
    FIELDS[cls] = fields
    return st.builds(cls, **fields)


MAYBE_TEXT = st.none() | TEXT
HEADERS = st.none() | st.dictionaries(TEXT, TEXT, max_size=2)
TABLE = st.none() | st.dictionaries(TEXT, PLAIN, max_size=3)
COUNT = st.integers(0, 2**40)
PARAMS = whole(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 4),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 99),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 99),
    min_tokens=st.integers(0, 9),
    stop=TEXT.filter(bool) | st.lists(TEXT.filter(bool), max_size=2),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(-1, 9),
    logprob_token_ids=st.none() | TOKENS.filter(bool),
    prompt_logprobs=st.none() | st.integers(-1, 9),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    bad_words=st.lists(TEXT.filter(bool), max_size=2),
    allowed_token_ids=st.none() | TOKENS.filter(bool),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    detokenize=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
    repetition_detection=st.none()
    | whole(
        RepetitionDetection,
        max_pattern=st.integers(1, 99),
        min_pattern=st.integers(1, 99),
        min_count=st.integers(2, 9),
    ),
    thinking_token_budget=st.none() | st.integers(0, 99),
    routed_experts=st.booleans(),
    skip_reading_prefix_cache=st.booleans(),
    include=st.lists(TEXT.filter(bool), max_size=2),
    reasoning_parser=st.none() | TEXT.filter(bool),
    tool_parser=st.none() | TEXT.filter(bool),
    speculator=st.none() | TEXT.filter(bool),
    structured=st.none()
    | whole(
        StructuredOutputs,
        json=st.none() | st.dictionaries(TEXT, PLAIN, max_size=2),
        json_object=st.booleans(),
        regex=st.none() | TEXT.filter(bool),
        grammar=st.none() | TEXT.filter(bool),
        choice=st.none() | st.lists(TEXT.filter(bool), min_size=1, max_size=2),
        structural_tag=st.none() | st.just(StructuralTag(format=AnyTextFormat())),
        backend=st.none() | TEXT.filter(bool),
        lenient=st.booleans(),
    ),
    logits_processors=st.just([]),  # callables do not travel
    plugin_args=st.dictionaries(TEXT, PLAIN, max_size=2),
)
POOLING = whole(
    PoolingParams,
    task=st.sampled_from(["embed", "token_embed", "classify", "score"]),
    dimensions=st.none() | st.integers(1, 99),
    normalize=st.none() | st.booleans(),
    pooler=st.none() | TEXT.filter(bool),
    use_activation=st.none() | st.booleans(),
    plugin_args=st.dictionaries(TEXT, PLAIN, max_size=2),
)
LORAS = whole(
    LoRARequest,
    name=TEXT,
    id=st.integers(1, 9),
    path=TEXT,
    content_hash=TEXT,
    scale=st.floats(-100, 100),
)
FEATURES = whole(
    MultiModalFeature,
    identifier=TEXT,
    offset=st.integers(0, 9),
    length=st.integers(1, 9),
    modality=TEXT,
    sees_itself=st.booleans(),
    data=st.none() | TEXT,
)
MARKERS = st.lists(TOKENS.map(tuple), max_size=2).map(tuple)
MEMBERS = st.builds(
    EngineCoreRequest,
    request_id=TEXT,
    prompt_token_ids=TOKENS,
    params=PARAMS,
    lora=st.none() | LORAS,
    leader=MAYBE_TEXT,
)
REQUESTS = whole(
    EngineCoreRequest,
    request_id=TEXT,
    prompt_token_ids=TOKENS,
    params=PARAMS,
    eos_token_ids=TOKENS,
    plugin_args=st.dictionaries(TEXT, st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2),
    arrival_time=FLOATS,
    priority=st.integers(-9, 9),
    child_index=st.integers(0, 9),
    client_index=st.integers(0, 9),
    tags=st.dictionaries(TEXT, TEXT, max_size=2),
    timeout=st.none() | FLOATS,
    cache_salt=MAYBE_TEXT,
    lora=st.none() | LORAS,
    features=st.lists(FEATURES, max_size=2),
    retention=st.none() | whole(Retention, session=TEXT, seconds=FLOATS),
    second_type_start=st.none() | COUNT,
    kv_transfer_params=TABLE,
    external_req_id=MAYBE_TEXT,
    data_parallel_rank=st.none() | st.integers(0, 9),
    trace_headers=HEADERS,
    resumable=st.booleans(),
    reasoning_ended=st.none() | st.booleans(),
    reasoning_markers=st.none()
    | whole(
        ReasoningMarkers,
        start=MARKERS,
        end=MARKERS,
        begins_open=st.booleans(),
        message_prefix=TOKENS.map(tuple),
        content_prefix=TOKENS.map(tuple),
        calls=TOKENS.map(tuple),
        boundaries=TOKENS.map(tuple),
        blanks=st.none() | TOKENS.map(tuple),
    ),
    pooling_params=st.none() | POOLING,
    prompt_embeds=PLAIN,
    prompt_is_token_ids=st.none() | st.lists(st.booleans(), max_size=9),
    reasoning_parser_kwargs=TABLE,
    is_admitted=st.booleans(),
    generation=st.integers(0, 1 << 20),
    members=st.dictionaries(TEXT, st.lists(MEMBERS, max_size=2), max_size=2),
    leader=MAYBE_TEXT,
    resumed=st.none()
    | whole(
        ResumedOutputs,
        output_token_ids=TOKENS,
        observed_logprobs=st.none() | st.lists(FLOATS, max_size=3),
        num_prompt_logprobs=st.integers(0, 2**20),
        num_routed_positions=st.integers(0, 2**20),
        num_resumes=st.integers(1, 9),
        part_figures=st.none() | st.dictionaries(TEXT, st.dictionaries(TEXT, COUNT), max_size=2),
        weight_runs=st.none()
        | st.lists(whole(WeightRun, start=COUNT, version=TEXT, kv_version=TEXT), max_size=2),
    ),
)
LOGPROBS = whole(
    TokenLogprobs,
    token_ids=TOKENS,
    logprobs=st.lists(FLOATS, max_size=3),
    rank=st.integers(1, 9),
)
EVENTS = whole(EngineCoreEvent, type=st.sampled_from(EngineCoreEventType), timestamp=FLOATS)
PREFILL = whole(
    PrefillStats, num_prompt_tokens=COUNT, num_cached_tokens=COUNT, num_external_tokens=COUNT
)
OUTPUTS = whole(
    EngineCoreOutput,
    request_id=TEXT,
    new_token_ids=TOKENS,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.integers(0, 99)
    | MAYBE_TEXT
    | st.fixed_dictionaries({"plugin": TEXT, "reason": TEXT}, optional={"stop_reason": TEXT}),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=2),
    error=MAYBE_TEXT,
    faulty_plugin=MAYBE_TEXT,
    events=st.lists(EVENTS, max_size=2),
    num_cached_tokens=st.none() | COUNT,
    kv_transfer_params=TABLE,
    error_kind=MAYBE_TEXT,
    pooling_output=PLAIN,
    num_nans_in_logits=COUNT,
    num_resumes=COUNT,
    prefill_stats=st.none() | PREFILL,
    routed_experts=PLAIN,
    trace_headers=HEADERS,
    part_figures=st.none() | st.dictionaries(TEXT, st.dictionaries(TEXT, COUNT), max_size=2),
    part_arrays=st.none()
    | st.dictionaries(
        TEXT,
        st.dictionaries(TEXT, st.lists(whole(PartArray, positions=PLAIN, values=PLAIN))),
        max_size=2,
    ),
    observed_logprobs=st.none() | st.lists(FLOATS, max_size=3),
    weight_runs=st.none()
    | st.lists(whole(WeightRun, start=COUNT, version=TEXT, kv_version=TEXT), max_size=2),
)
CACHE_STATS = whole(PrefixCacheStats, requests=COUNT, queried_tokens=COUNT, hit_tokens=COUNT)
TIER_STATS = whole(
    KVTierStats,
    hits=COUNT,
    misses=COUNT,
    loaded_blocks=COUNT,
    loaded_bytes=COUNT,
    load_seconds=FLOATS,
    stored_blocks=COUNT,
    stored_bytes=COUNT,
    store_seconds=FLOATS,
    dropped_blocks=COUNT,
    failures=COUNT,
    used_bytes=st.none() | COUNT,
)
ENGINE_STATS = st.builds(
    SchedulerStats,
    num_running=COUNT,
    num_waiting=COUNT,
    kv_cache_usage=st.floats(0, 1),
    prefix_cache=CACHE_STATS,
)
STATS = whole(
    SchedulerStats,
    num_running=COUNT,
    num_waiting=COUNT,
    kv_cache_usage=st.floats(0, 1),
    prefix_cache=CACHE_STATS,
    num_preemptions=COUNT,
    num_drafts=COUNT,
    num_accepted_drafts=COUNT,
    num_deferred=COUNT,
    num_verified_drafts=COUNT,
    num_accepted_by_position=st.lists(COUNT, max_size=3),
    external_prefix_cache=st.none() | CACHE_STATS,
    kv_tiers=st.dictionaries(TEXT, TIER_STATS, max_size=2),
    step_cost_error=st.none() | st.floats(0, 8),
    num_waits_for_results=st.dictionaries(TEXT, COUNT, max_size=2),
    num_without_overlap=st.dictionaries(TEXT, COUNT, max_size=2),
    num_requests_by_adapter=st.dictionaries(TEXT, COUNT, max_size=2),
    num_waiting_by_adapter=st.dictionaries(TEXT, COUNT, max_size=2),
    num_adapter_slots=COUNT,
    weight_version=MAYBE_TEXT,
    num_retained_blocks=COUNT,
    num_retained_hits=COUNT,
    num_retained_evictions=COUNT,
    engines=st.dictionaries(COUNT, ENGINE_STATS, max_size=2),
)
LOADS = whole(
    EngineLoad,
    num_running=COUNT,
    num_waiting=COUNT,
    kv_cache_usage=FLOATS,
    num_steps=COUNT,
    adapters=st.lists(TEXT, max_size=2),
    last_request=st.none() | TEXT,
    is_leaving=st.booleans(),
)
CACHE_CHANGES = whole(
    KVCacheChanges,
    first=COUNT,
    last=st.integers(-1, 1 << 40),
    cleared=st.booleans(),
    stored=st.sets(st.binary(min_size=8, max_size=8), max_size=4),
    removed=st.sets(st.binary(min_size=8, max_size=8), max_size=4),
)
BATCHES = whole(
    EngineCoreOutputs,
    outputs=st.lists(OUTPUTS, max_size=4),
    timestamp=FLOATS.filter(bool),
    finished_requests=st.none() | st.sets(TEXT, max_size=3),
    engine_index=COUNT,
    scheduler_stats=st.none() | STATS,
    load=st.none() | LOADS,
    cache_changes=st.none() | CACHE_CHANGES,
    start_wave=st.none() | COUNT,
    wave_complete=st.none() | COUNT,
)
