"""Where a prompt has embeddings, nothing sees a token id; each sees the ids that there are."""

from __future__ import annotations

import numpy as np
import pytest
from support.embedded import prompt_of
from support.plugins.prompt_ids import SEEN
from transformers import RepetitionPenaltyLogitsProcessor

from hardpoint import LLM, PoolingParams, RequestError, SamplingParams
from hardpoint.builtin_plugins.logits.penalties import TokenCounts
from hardpoint.builtin_plugins.speculators.ngram import NGram
from hardpoint.builtin_plugins.speculators.suffix import Suffix
from hardpoint.builtin_plugins.step_parts.kv_canary.chains import TokenChain
from hardpoint.plugins import DraftRequest, EngineCoreRequest, ReasoningMarkers
from hardpoint.plugins.model.logits_ops import LogitsOps
from hardpoint.plugins.requests import ids_after_embeddings
from hardpoint.plugins.step_part.speculator import SpeculatorContext

HERE = "support.plugins.prompt_ids"
ENABLED = ["Row", "First"]
IDS = prompt_of(9)
MASK = [place % 3 == 1 for place in range(9)]
KNOWN = [token if known else None for token, known in zip(IDS, MASK, strict=True)]
NONE = [None] * 9


@pytest.fixture(scope="module")
def llm(embedded):
    config = embedded.settings(
        {
            "plugins": {"enable": [f"{HERE}:{name}" for name in ENABLED]},
            "speculation": {"use": [f"{HERE}:Guesser"], "adaptive": False},
            "sampler": {"logprobs": "processed"},
        }
    )
    with LLM(config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_seen_yet():
    SEEN.clear()


def one(**fields):
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, **fields)


def logprobs(output):
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def forms(embedded):
    return [(embedded.embedded(IDS), NONE), (embedded.mixed(IDS), KNOWN)]


def test_plugins_of_rows_drafts_and_vectors_see_none(llm, embedded):
    params = SamplingParams(max_tokens=4, temperature=0.0, plugin_args={"row": {}})
    for prompt, ids in [*forms(embedded), (IDS, IDS)]:
        SEEN.clear()
        (output,) = llm.generate([prompt], params)
        (vector,) = llm.embed([prompt], PoolingParams(pooler="first"))
        assert {"prepare": [ids], "row": [ids], "speculator": [ids], "pooler": [ids]} == SEEN
        assert output.prompt_token_ids == vector.prompt_token_ids == ids


def test_a_processor_of_the_batch_gets_none_for_a_prompt_without_ids(embedded):
    config = embedded.settings({"plugins": {"enable": [f"{HERE}:Whole"]}})
    with LLM(config=config) as llm:
        llm.generate([prompt for prompt, _ in forms(embedded)] + [IDS], one())
    assert SEEN == {"batch": [None, KNOWN, IDS]}


def test_callables_of_three_parameters_get_none_for_a_prompt_without_ids(llm, embedded):
    def three(prompt_ids, output_ids, logits):
        prompt_ids_seen.append(prompt_ids)
        return logits

    def two(output_ids, logits):
        return logits

    prompt_ids_seen = []
    params = SamplingParams(max_tokens=1, temperature=0.0, logits_processors=[three, two])
    for prompt, _ in [*forms(embedded), (IDS, IDS)]:
        llm.generate(prompt, params)
    assert prompt_ids_seen == [None, KNOWN, IDS]


def test_processors_of_transformers_which_need_all_ids_are_refused(llm, embedded):
    call = RepetitionPenaltyLogitsProcessor(2.0)
    params = SamplingParams(max_tokens=2, temperature=0.0, logits_processors=[call])
    message = (
        r"^logits_processors\[0\]: a callable \(input_ids .* needs the ids of the whole prompt"
    )
    for prompt, _ in forms(embedded):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, params)
    assert llm.generate(IDS, params)[0].outputs[0].token_ids


def test_a_repetition_penalty_counts_the_ids_that_there_are(llm, embedded):
    plain = logprobs(llm.generate([IDS], one())[0])
    for prompt, ids in forms(embedded):
        by_penalty = logprobs(llm.generate([prompt], one(repetition_penalty=1.9))[0])
        moved = [token for token in plain if differs(plain, by_penalty, token)]
        assert set(moved) == {token for token in ids if token is not None}
    counts = TokenCounts([None, 5, None, 0], [7, 5])
    assert (counts.tokens.tolist(), counts.counts.tolist()) == ([5, 0, 7], [1.0, 0.0, 1.0])


def differs(first, other, token):
    """Whether a token's log-probability has another distance to token 1."""
    distances = first[token] - first[1], other[token] - other[1]
    return abs(distances[0] - distances[1]) > 1e-4


@pytest.mark.parametrize("cls", [NGram, Suffix])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4]),
        ([1, 2, 3, 4, None, 1, 2], []),
        ([None, 1, 2, 3, 4, 9, 1, 2], [3, 4]),
        ([0, 8, 8, None, None, 3, 0], []),
        ([5, None, 6, 5, None], []),
    ],
)
def test_drafts_come_from_what_follows_the_last_embedding(cls, prompt, expected):
    context = SpeculatorContext(
        name="s",
        options=cls.Options(),
        device=None,
        max_num_seqs=1,
        max_model_len=32,
        num_draft_tokens=2,
        vocab_size=16,
        hidden_size=4,
        ops=LogitsOps(),
    )
    speculator = cls(context)
    request = DraftRequest("r", prompt, [], SamplingParams(), cls.Arguments(), limit=2)
    request.state = speculator.start(request)
    (drafts,) = speculator.propose([request], 2)
    assert drafts[: len(expected)] == expected
    assert bool(drafts) == bool(expected)


def test_markers_are_not_found_across_an_embedding():
    markers = ReasoningMarkers(start=((7, 8),), end=((9,),))
    assert markers.is_open([1, 7, 8, None])
    assert not markers.is_open([1, 7, None, 8])
    assert not markers.is_open([None] * 3)
    assert markers.ended([7, 8, None, 9])
    assert ids_after_embeddings([1, None, 2, 3]) == [2, 3]
    assert ids_after_embeddings([1, 2]) == [1, 2]


def test_the_canary_tells_embeddings_apart():
    def sums(rows, mask=None):
        source = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[0] * 3,
            params=SamplingParams(),
            prompt_embeds=np.asarray(rows, dtype=np.float32),
            prompt_is_token_ids=mask,
        )
        chain = TokenChain(source, 8, 1)
        chain.append(source.prompt_token_ids)
        return chain.entries().tolist()

    first, same, other = sums([[1], [2], [3]]), sums([[1], [2], [3]]), sums([[1], [2], [4]])
    assert first == same
    assert first[:2] == other[:2]
    assert first[2] != other[2]
    mixed = sums([[1], [3]], [False, True, False])
    assert mixed[0] == first[0]
    assert mixed[1] != first[1]
