"""The checks of a frontend half that reads prompts with media."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hardpoint.host.boundary.parts.hooks import selecting_fields, selects
from hardpoint.plugins import (
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    RequestError,
    SamplingParams,
)
from hardpoint.plugins.requests import MultiModalFeature
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.testing.reporting.calls import call
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule, short_repr

from .frontend import BytesReader

__all__ = ["PLACED", "MediaPrompt", "check_media", "check_taken", "prompt_of"]

PLACED = Rule(
    "placed media: read_prompt refuses by a RequestError, or gives tokens that features cover",
    "return the prompt with one of `media_tokens` at all positions of each item, and a feature of "
    "each in the order of their positions, named by a hash of its content; change nothing",
)

MediaPrompt = tuple[Sequence[int], Mapping[str, Sequence[Any]]]
"""Token ids with placeholders, and items by modality."""

_KEY = "multi_modal_data"


class _Placed(NamedTuple):
    """Token ids that a half has read, and features that cover some of them."""

    token_ids: Sequence[int]
    features: Sequence[MultiModalFeature]


def prompt_of(prompt: MediaPrompt) -> dict[str, Any]:
    """Return a prompt with media as programs give it."""
    token_ids, media = prompt
    return {"prompt_token_ids": token_ids, _KEY: media}


def check_media(
    half: FrontendHalf, prompts: Sequence[MediaPrompt], vocab_size: int
) -> list[EngineCoreRequest]:
    """Check how a half reads media; return the requests with media that the prompts become.

    Args:
        half: to check.
        prompts: prompts of the suite.
        vocab_size: vocabulary size of the model.

    Raises:
        Violation: the half breaks a rule.
    """
    reads = type(half).read_prompt is not FrontendHalf.read_prompt and _KEY in half.prompt_keys
    _check_tokens(half.media_tokens, vocab_size, reads)
    if bool(half.media_tokens) != bool(prompts):
        tokens = short_repr(half.media_tokens)
        raise PLACED.violation(
            f"media_tokens are {tokens}, and the suite has {len(prompts)} prompts in `media`"
        )
    contents: dict[str, Any] = {}
    requests = []
    for number, (token_ids, media) in enumerate(prompts):
        placed = _placed(half, token_ids, media)
        _check_placed(half, placed, media, vocab_size)
        for feature in placed.features:
            data = snapshot(feature.data)
            if contents.setdefault(feature.identifier, data) != data:
                raise PLACED.violation(
                    f"items of different data have the identifier {feature.identifier!r}"
                )
        _check_refusals(half, token_ids, media)
        if placed.features:
            requests.append(_request(f"r{number}", placed))
    return requests


def _check_tokens(tokens: Any, vocab_size: int, reads: bool) -> None:
    if not isinstance(tokens, Mapping) or not all(
        isinstance(name, str) and ids and all(_is_token(token, vocab_size) for token in ids)
        for name, ids in tokens.items()
    ):
        raise PLACED.violation(
            f"media_tokens are {short_repr(tokens)}, expected token ids by modality"
        )
    if bool(tokens) and not reads:
        shown = short_repr(tokens)
        raise PLACED.violation(
            f"media_tokens are {shown}, and there is no read_prompt of {_KEY!r}, or no such key in "
            f"prompt_keys"
        )


def _is_token(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _placed(
    half: FrontendHalf, token_ids: Sequence[int], media: Mapping[str, Sequence[Any]]
) -> _Placed:
    """Return a prompt with its media placed: the same each time, and nothing given changes."""
    placements = []
    for _ in range(2):
        prompt = prompt_of((list(token_ids), copy.deepcopy(dict(media))))
        before = snapshot(prompt)
        answer = _answer(half, prompt)
        if isinstance(answer, str):
            raise PLACED.violation(f"read_prompt() refused a prompt of the suite: {answer}")
        if snapshot(prompt) != before:
            raise PLACED.violation("read_prompt() mutated its input")
        if not isinstance(answer, GivenPrompt) or not isinstance(answer.token_ids, Sequence):
            raise PLACED.violation(
                f"read_prompt() returned {short_repr(answer)}, expected a GivenPrompt with token "
                f"ids"
            )
        placements.append(_Placed(answer.token_ids, answer.fields.get("features", ())))
    first, second = placements
    if snapshot(first) != snapshot(second):
        raise PLACED.violation(
            f"read_prompt() gave {short_repr(first)}, and for an equal prompt {short_repr(second)}"
        )
    return first


def _answer(half: FrontendHalf, prompt: Mapping[str, Any]) -> Any:
    def read_prompt() -> Any:
        try:
            return half.read_prompt(prompt, BytesReader())
        except RequestError as refused:
            return str(refused)

    return call(PLACED, read_prompt)


def _check_placed(
    half: FrontendHalf,
    placed: _Placed,
    media: Mapping[str, Sequence[Any]],
    vocab_size: int,
) -> None:
    ids, end = placed.token_ids, 0
    if wrong := [token for token in ids if not _is_token(token, vocab_size)]:
        raise PLACED.violation(
            f"read_prompt() gave the token {short_repr(wrong[0])}, expected token ids in "
            f"0..{vocab_size - 1}"
        )
    expected = sorted(name for name, items in media.items() for _ in items)
    if (modalities := sorted(feature.modality for feature in placed.features)) != expected:
        raise PLACED.violation(
            f"read_prompt() gave features of {modalities} for items of {expected}"
        )
    for index, feature in enumerate(placed.features):
        if not (isinstance(feature.identifier, str) and feature.identifier):
            raise PLACED.violation(
                f"features[{index}] has the identifier {short_repr(feature.identifier)}"
            )
        if feature.length < 1 or feature.offset < end or feature.end > len(ids):
            raise PLACED.violation(
                f"features[{index}] covers {feature.offset} to {feature.end} of a prompt of "
                f"{len(ids)} tokens, after a span that ends at {end}"
            )
        _check_covered(half, ids, index, feature)
        end = feature.end


def _check_covered(
    half: FrontendHalf, ids: Sequence[int], index: int, feature: MultiModalFeature
) -> None:
    media_ids = half.media_tokens.get(feature.modality, ())
    covered = set(ids[feature.offset : feature.end])
    if foreign := sorted(covered - set(media_ids)):
        raise PLACED.violation(
            f"features[{index}] covers the token {foreign[0]}, which is none of media_tokens "
            f"{short_repr(media_ids)}"
        )


def _check_refusals(
    half: FrontendHalf, token_ids: Sequence[int], media: Mapping[str, Sequence[Any]]
) -> None:
    unknown = {**media, "smell": [b"x"]}
    if not any(media.values()):
        _check_refusal(half, "with media of an unknown modality", token_ids, unknown)
        return
    fewer = {name: list(items)[1:] for name, items in media.items()}
    more = {name: [*items, *items[:1]] for name, items in media.items()}
    nothing = {name: [object() for _ in items] for name, items in media.items()}
    cases = [
        ("with an item more than placeholders", more),
        ("with items that are no media", nothing),
        ("with media of an unknown modality", unknown),
    ]
    if any(fewer.values()):  # without media no token is a placeholder
        cases.insert(0, ("with an item less than placeholders", fewer))
    for case, content in cases:
        _check_refusal(half, case, token_ids, content)


def _check_refusal(half: FrontendHalf, case: str, token_ids: Sequence[int], media: Any) -> None:
    answer = _answer(half, prompt_of((list(token_ids), media)))
    if not isinstance(answer, str):
        raise PLACED.violation(
            f"read_prompt() of a prompt {case} returned {short_repr(answer)}, expected a "
            f"RequestError"
        )


def _request(request_id: str, placed: _Placed) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(placed.token_ids),
        params=SamplingParams(),
        features=list(placed.features),
    )


def check_taken(request: EngineCoreRequest, frontend: FrontendHalf, engine: EngineHalf) -> None:
    """Check that both halves take a request with placed media.

    Raises:
        Violation: one refuses it, or the engine's half does not use it.
    """
    fix = "let both halves expect the same tokens and data"
    if not (selects(engine, request) and call(PLACED, engine.uses, request)):
        name = "for_fields has no field of" if selecting_fields(engine) else "uses() is False for"
        raise PLACED.violation(f"{name} a request with placed media", fix)
    for name, takes, arguments in (
        ("prepare", frontend.prepare, (request, None)),
        ("check", engine.check, (request,)),
    ):
        try:
            takes(*arguments)
        except RequestError as refused:
            raise PLACED.violation(
                f"{name}() rejected the result of read_prompt(): {refused}", fix
            ) from refused
