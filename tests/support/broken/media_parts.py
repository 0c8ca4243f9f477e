"""Step parts that place and encode media with one mistake each, and the correct one."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from hardpoint.plugins import (
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    RequestError,
    SamplingParams,
    StepPart,
    WorkerHalf,
)
from hardpoint.plugins.requests import MultiModalFeature
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.toolkit.encoder_cache import EncoderCacheManager
from support.samples import Sample

PLACE, LENGTH, ROOM = 1, 3, 8
"""The token of images, how many of them an image has, and tokens of a step and of the cache."""


def number_as_data(number):
    return np.array([number], np.uint8)


class GoodPlaces(FrontendHalf):
    """Images are numbers."""

    prompt_keys = ("multi_modal_data",)
    media_tokens = {"image": (PLACE,)}

    def read_prompt(self, prompt, reader):
        token_ids, media = prompt["prompt_token_ids"], prompt["multi_modal_data"]
        if others := media.keys() - {"image"}:
            raise RequestError(f"multi_modal_data: {min(others)!r}: expected image")
        images = self.checked(token_ids, media.get("image", ()))
        ids, features = [], []
        for token in token_ids:
            if token == PLACE:
                image = images[len(features)]
                features.append(self.feature(len(features), image, len(ids)))
                ids += self.covered()
            else:
                ids.append(token)
        return GivenPrompt(token_ids=ids, fields={"features": features})

    def checked(self, token_ids, images):
        if len(images) != list(token_ids).count(PLACE):
            raise RequestError(f"multi_modal_data.image: got {len(images)} images")
        if not all(isinstance(image, int) for image in images):
            raise RequestError("multi_modal_data.image: expected numbers")
        return images

    def feature(self, index, image, offset):
        name, data = self.named(index, image), number_as_data(image)
        return MultiModalFeature(name, offset, LENGTH, data=data)

    def named(self, index, image):
        return f"x{image}"

    def covered(self):
        return [PLACE] * LENGTH


class GoodCacheHalf(EngineHalf):
    """Sends the embeddings that workers lack."""

    every_plan = True
    max_encoder_tokens = ROOM

    def __init__(self, context):
        self.encoder_cache = self.cache()
        self.kept, self.sent = {}, set()

    def cache(self):
        return EncoderCacheManager(ROOM)

    def uses(self, request):
        return bool(request.features)

    def check(self, request):
        self.kept[request.request_id] = request.features

    def refused(self, request_id):
        self.kept.pop(request_id, None)

    def ended(self, request_id):
        self.kept.pop(request_id, None)

    def begin(self, plan):
        freed, computed = list(plan.freed_encoder_inputs), plan.num_computed_tokens()
        self.sent.difference_update(freed)
        items, spans = {}, {}
        for name in plan.num_scheduled_tokens.keys() & self.kept.keys():
            for feature in self.kept[name]:
                if computed[name] <= feature.offset:
                    first = feature.offset - computed[name]
                    spans.setdefault(name, []).append((first, feature.identifier))
                    if feature.identifier not in self.sent:
                        items[feature.identifier] = int(feature.data[0])
        self.sent |= items.keys()
        return pickle.dumps((freed, items, spans)) if freed or spans else None

    def lost(self, plan):
        self.sent.clear()

    def weights_changed(self):
        self.sent.clear()


class GoodEncodesHalf(WorkerHalf):
    """Embeddings are numbers times the weight of the model."""

    encodes = True

    def __init__(self, context):
        self.model, self.embeddings, self.spans = context.loaded, {}, {}

    def begin(self, plan, data):
        freed, items, self.spans = pickle.loads(data)
        for identifier in freed:
            self.embeddings.pop(identifier, None)
        for identifier, number in items.items():
            self.embeddings[identifier] = number * self.model.weight + 1.0

    def embedded(self, embedded, rows):
        changed = embedded.clone()
        for name, start in zip(rows.request_ids, rows.starts, strict=False):
            for first, identifier in self.spans.get(name, ()):
                place = start + first
                changed[place : place + LENGTH] = self.embeddings[identifier]
        return changed

    def weights_changed(self):
        self.embeddings.clear()


class GoodMedia(Sample, StepPart, contract=1):
    places, half, encodes = GoodPlaces, GoodCacheHalf, GoodEncodesHalf

    @classmethod
    def request_fields(cls, config):
        return ("features",)

    def frontend_half(self, context):
        return self.places()

    def engine_half(self, context):
        return self.half(context)

    def worker_half(self, context):
        return self.encodes(context)


def requests(suite):
    """Return a strategy for requests with up to two images, few of them different."""

    def request(images):
        ids, features = [5], []
        for image in images:
            features.append(
                MultiModalFeature(f"x{image}", len(ids), LENGTH, data=number_as_data(image))
            )
            ids += [PLACE] * LENGTH + [6]
        return EngineCoreRequest(
            request_id="",
            prompt_token_ids=ids,
            params=SamplingParams(),
            eos_token_ids=[256],
            features=features,
        )

    return st.builds(request, st.lists(st.integers(1, 4), max_size=2))


def change_weights(suite, loaded):
    loaded.weight += 1


SUITE = {
    "media": [([5, PLACE, 6, PLACE], {"image": [1, 2]}), ([PLACE], {"image": [2]})],
    "requests": requests,
    "loaded": lambda _suite: SimpleNamespace(weight=1),
    "change_weights": change_weights,
}
"""Attributes of suites of these parts."""


def part_of(**halves):
    """Return a part with one half replaced, named like that half."""
    ((_, half),) = halves.items()
    name = half.__name__.strip("_")
    return type(name, (GoodMedia,), {**halves, "__module__": __name__})


def places(name, **methods):
    return part_of(places=type(name, (GoodPlaces,), methods))


def half(name, **methods):
    return part_of(half=type(name, (GoodCacheHalf,), methods))


def cache(name, **methods):
    made = type(name, (EncoderCacheManager,), methods)
    return half(name, cache=lambda self: made(ROOM))


def encodes(name, **methods):
    return part_of(encodes=type(name, (GoodEncodesHalf,), methods))


# Placed media


def _as_list(self, prompt, reader):
    return GoodPlaces.read_prompt(self, prompt, reader).token_ids


def _without_last(self, prompt, reader):
    result = GoodPlaces.read_prompt(self, prompt, reader)
    return dataclasses.replace(result, fields={"features": result.fields["features"][:-1]})


def _pops(self, prompt, reader):
    result = GoodPlaces.read_prompt(self, prompt, reader)
    prompt["multi_modal_data"]["image"].pop()
    return result


def _any_modality(self, prompt, reader):
    media = {"image": prompt["multi_modal_data"].get("image", ())}
    return GoodPlaces.read_prompt(self, {**prompt, "multi_modal_data": media}, reader)


def _any_number(self, token_ids, images):
    return [*images, *[1] * len(token_ids)]


def _any_item(self, token_ids, images):
    return [int(image) for image in GoodPlaces.checked(self, token_ids, images)]


def _numbers_alone(self, token_ids, images):
    if len(images) != list(token_ids).count(PLACE):
        raise RequestError("another number of images")
    return [image + 0 for image in images]


def _counted(self, index, image):
    self.count = getattr(self, "count", 0) + 1
    return f"x{image} {self.count}"


def _from_the_end(self, index, image, offset):
    feature = GoodPlaces.feature(self, index, image, offset)
    return MultiModalFeature(feature.identifier, offset + 9, LENGTH, data=feature.data)


GivesTokens = places("GivesTokens", read_prompt=_as_list)
LeavesOneOut = places("LeavesOneOut", read_prompt=_without_last)
TakesItems = places("TakesItems", read_prompt=_pops)
TakesSmells = places("TakesSmells", read_prompt=_any_modality)
TakesAnyNumber = places("TakesAnyNumber", checked=_any_number)
AddsItems = places("AddsItems", checked=_numbers_alone)
NamesByIndex = places("NamesByIndex", named=lambda self, index, image: f"x{index}")
NamesNothing = places("NamesNothing", named=lambda self, index, image: "")
CountsItems = places("CountsItems", named=_counted)
CoversOthers = places("CoversOthers", covered=lambda self: [PLACE, 7, PLACE])
TokenBeyond = places("TokenBeyond", covered=lambda self: [PLACE] * LENGTH + [300])
PastTheEnd = places("PastTheEnd", feature=_from_the_end)
TokensAlone = places("TokensAlone", read_prompt=FrontendHalf.read_prompt)
TokensWithoutKey = places("TokensWithoutKey", prompt_keys=("letters",))
TokensOfNothing = places("TokensOfNothing", media_tokens={"image": ()})


def _refuses(self, request):
    raise RequestError("not these")


RefusesPlaced = half("RefusesPlaced", check=_refuses)
UsesNoMedia = half("UsesNoMedia", uses=lambda self, request: False)


# The encoder cache


def _frees_all(self):
    EncoderCacheManager.take_freed(self)
    return list(self._entries)


def _frees_again(self):
    self.all_freed = [*getattr(self, "all_freed", ()), *EncoderCacheManager.take_freed(self)]
    return self.all_freed


def _raises(self, request, index):
    raise KeyError(index)


NoLimit = half("NoLimit", max_encoder_tokens=0)
NoCache = half("NoCache", cache=lambda self: None)
CacheAsDict = half("CacheAsDict", cache=lambda self: {})
NobodyEncodes = encodes("NobodyEncodes", encodes=False)
FreesHeld = cache("FreesHeld", take_freed=_frees_all)
FreesAgain = cache("FreesAgain", take_freed=_frees_again)
FreesNone = cache("FreesNone", take_freed=lambda self: None)
HoldsAll = cache("HoldsAll", holds=lambda self, request, index: True)
HoldsNothing = cache("HoldsNothing", holds=lambda self, request, index: False)
HoldsOne = cache("HoldsOne", holds=lambda self, request, index: 1)
HasNoRoom = half("HasNoRoom", cache=lambda self: EncoderCacheManager(2))
AllocateRaises = cache("AllocateRaises", allocate=_raises)


# Other weights


def _fails(self):
    raise RuntimeError("no weights")


BelievesSent = half("BelievesSent", weights_changed=lambda self: None)
WeightsRaise = half("WeightsRaise", weights_changed=_fails)
KeepsEmbeddings = part_of(
    encodes=type("KeepsEmbeddings", (GoodEncodesHalf,), {"weights_changed": lambda self: None})
)
KeepsEmbeddings.half = type("Believes", (GoodCacheHalf,), {"weights_changed": lambda self: None})
