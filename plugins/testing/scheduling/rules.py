"""The rules that a scheduler keeps, as failure messages state them."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

LIMITS = Rule(
    "limits: no step exceeds SchedulerLimits",
    "check every number against its limit before scheduling tokens for a request",
)
PLAN = Rule(
    "plan: the fields of a SchedulerOutput agree with each other",
    "build every field of SchedulerOutput from one list of scheduled requests; a request that is "
    "preempted after it was scheduled leaves all of them",
)
BATCH = Rule(
    "batch: new requests come in full and once, cached ones while the worker has them, "
    "preempted and finished ones leave",
    "keep track of the requests that the worker holds",
)
POSITIONS = Rule(
    "positions: a request's tokens are computed in order and without gaps",
    "after a result, num_computed_tokens counts the tokens with valid keys and values: "
    "scheduled ones without rejected drafts",
)
KV_CONTENT = Rule(
    "KV content: each token attends to the keys and values of its own history",
    "share, free and reuse blocks as the KV cache manager does, and rewind tokens that were not "
    "computed",
)
BLOCKS = Rule(
    "blocks: each block is free or held, no request writes into another's blocks, none is leaked",
    "free a request's blocks exactly once, when it finishes or is preempted",
)
GROUPS = Rule(
    "groups: the last tokens of a request and of its members are in the same step",
    "schedule a request with all its members, or none of them; preempt and finish them together",
)
FINISH = Rule(
    "finish: each request finishes once, is reported to the workers once, and is then forgotten",
    "collect the ids finished since the last plan, put them into the next plan, start a new set",
)
TOKENS = Rule(
    "tokens: a request gets the same tokens as when it runs alone, bit for bit",
    "append exactly the tokens that update() gets for a request, and stop by its parameters",
)
OUTPUTS = Rule(
    "outputs: they go to the client that sent the request, and carry the requested fields",
    "group outputs by client_index, and drop the fields of tokens that are not delivered",
)
PROGRESS = Rule(
    "progress: once no new request arrives, every request finishes within the step bound",
    "advance at least one request in every step, and do not preempt the same victims for ever",
)
WAIT_REASON = Rule(
    "wait reason: every unfinished request without tokens has a reason, and no other request",
    "record the reason where the decision is made",
)
STEP_RECORD = Rule(
    "step record: it matches the plan",
    "build StepRecord from the plan itself",
)
COUNTS = Rule(
    "counts: num_unfinished_requests, has_requests and stats match the scheduler's state",
    "count the unfinished requests",
)
POLICY_CALLS = Rule(
    "policy calls: the policy is notified of every request and every token, once",
    "call added, scheduled, preempted and finished where these things happen",
)
ENCODER = Rule(
    "encoder inputs: encoded once while they are held, in time, within budget and cache",
    "schedule a feature with the first token that it covers, and report each freed feature once",
)
KV_TRANSFER = Rule(
    "KV transfer: loaded tokens count once they have arrived, and blocks stay until it is done",
    "follow ModelRunnerOutput.kv_loaded, kv_saved and invalid_block_ids",
)
RELEASES = Rule(
    "releases: a step ends where blocks of a request are released, and the worker gets the columns",
    "plan at most BlockReleases.num_before_next tokens, and put BlockReleases.starting_at on the "
    "plan",
)
EVICTION = Rule(
    "eviction: evict() returns the requested number of distinct candidates",
    "keep the candidates that released() adds, without the blocks of taken(), dropped() and "
    "evict()",
)
BLOCK_IDS = Rule(
    "block ids: evictions depend on the contents of blocks, not on their ids",
    "identify blocks by context.blocks.hash(), and let equal candidates go in the order "
    "of their release",
)
GRAMMAR = Rule(
    "grammars: no request runs before its grammar is ready, and the plan lists each one's row",
    "ask Gates.wait_reason before admission, and list exactly the requests that use a grammar",
)
PAUSE = Rule(
    "pause: held requests get no tokens during a pause, and all requests continue after it",
    "check the state that set_pause was given wherever a request gets tokens",
)
REJECTION = Rule(
    "rejection: requests that can never run are rejected at once, and all others are accepted",
    "check a request against the limits in add_request, and raise RequestError with the numbers",
)
