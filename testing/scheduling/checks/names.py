"""The rules that schedulers keep, in the words in which the kit says that one is broken."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.testing.suite import Violation


class BrokenRule(Violation):
    """A rule that a scheduler, or something that it asks, broke."""

    def __init__(self, rule: Rule, saw: str, do: str) -> None:
        """Keep the rule beside what was seen."""
        super().__init__(saw, do)
        self.rule = rule


@dataclass(frozen=True)
class Rule:
    """Something that always holds.

    Attributes:
        words: what holds, after a short name and a colon.
        do: what an author does about it, if there is nothing better to say.
    """

    words: str
    do: str

    def broken(self, saw: str, do: str | None = None) -> BrokenRule:
        """Return the finding, to be raised."""
        return BrokenRule(self, saw, do or self.do)


LIMITS = Rule(
    "limits: no step exceeds what SchedulerLimits allows",
    "hold every number against its limit before a request gets its tokens",
)
PLAN = Rule(
    "the plan: its parts agree with each other",
    "build every part of SchedulerOutput from one list of what was scheduled; whoever is "
    "preempted after it was scheduled leaves all of them",
)
BATCH = Rule(
    "the batch: new requests come in full and once, cached ones while the worker has them, "
    "preempted and ended ones leave",
    "keep track of what the worker was told",
)
POSITIONS = Rule(
    "positions: a request's tokens are computed in order and without a gap",
    "after a result, num_computed_tokens counts the tokens whose keys and values are right: "
    "scheduled ones without rejected drafts",
)
CONTENT = Rule(
    "content: each token sees the keys and values of its own history",
    "share, free and reuse blocks as the KV cache manager says, and rewind what was not computed",
)
POOL = Rule(
    "blocks: each is free or held, nobody writes into what others hold, and none is lost",
    "free a request's blocks exactly once, when it ends or is preempted",
)
FINISHED = Rule(
    "the end: each request ends once, is told once to the workers, and is then forgotten",
    "collect the ids that ended since the last plan, hand them out with the next, start afresh",
)
TOKENS = Rule(
    "tokens: a request gets the tokens that it would get alone, bit for bit",
    "append exactly what update is given for a request, and end where its parameters say",
)
OUTPUTS = Rule(
    "outputs: they go to the client that sent the request, and carry what it asked for",
    "group by client_index, and cut what belongs to tokens that are not delivered",
)
PROGRESS = Rule(
    "progress: once nothing new arrives, every request ends within the bound",
    "let somebody make progress in every step whose victims are not always the same",
)
WAITING = Rule(
    "why it waits: every live request without tokens has a reason, and nobody else",
    "note the reason where the decision is made",
)
RECORD = Rule(
    "the step record: it tells what the plan does",
    "make StepRecord from the plan itself",
)
BOOKS = Rule(
    "counts: num_unfinished_requests, has_requests and stats tell how it stands",
    "count what is live",
)
POLICY = Rule(
    "the policy: it is told of every request and every token, once",
    "call added, scheduled, preempted and finished where these things happen",
)
ENCODER = Rule(
    "encoder inputs: encoded once while they are held, in time, within budget and cache",
    "schedule a feature with the first token that it covers, and tell what was freed once",
)
TRANSFER = Rule(
    "KV transfer: what is loaded counts when it is there, and blocks stay until it is done",
    "follow ModelRunnerOutput.kv_loaded, kv_saved and invalid_block_ids",
)
EVICTION = Rule(
    "eviction: evict returns as many different candidates as it is asked for",
    "keep the candidates that released() told of, less those of taken() and evict()",
)
GRAMMAR = Rule(
    "grammars: nobody runs before its grammar is ready, and each place is told",
    "ask Grammars.ready before admission, and list exactly the requests that use one",
)
PAUSE = Rule(
    "pause: whom a pause holds gets no tokens, and after it everybody gets theirs",
    "look at the state that set_pause was given wherever a request gets tokens",
)
REFUSAL = Rule(
    "refusals: what could never run is refused at once, and everything else runs",
    "check a request against the limits in add_request, and raise RequestError with the numbers",
)
CRASH = Rule(
    "no crash: it raises what the contract says, and nothing else",
    "handle this case",
)
