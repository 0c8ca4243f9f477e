"""Models of images with one mistake each, and a right one."""

from __future__ import annotations

import itertools

import torch

from hardpoint.plugins.requests.media_format import MediaFormat
from support import square_images

from .models import HIDDEN, Tiny

TOKENS, SIDE = 3, 4


class Squares(MediaFormat):
    """Images cut or repeated to four by four pixels, three tokens each."""

    placeholder, placeholder_id, token_id = "<image>", 1, 2
    begin_ids, end_ids, num_tokens = (1,), (3,), TOKENS
    item_shape, settings = (SIDE, SIDE, 3), "squares 1"
    processor, processor_settings = square_images.__file__, {"side": SIDE}


class Seeing(Tiny):
    """Right: a matrix makes the embeddings of an image of its numbers."""

    hidden_size = HIDDEN

    @classmethod
    def media_format(cls, config, files):
        return Squares()

    def weight_shapes(self):
        return super().weight_shapes() | {"see.weight": (TOKENS * HIDDEN, 3 * SIDE**2)}

    def encode_media(self, modality, items):
        return [self.seen(item) for item in items]

    def seen(self, item):
        x = item.reshape(-1).to(self.context.dtype) / 255
        return (self.weights["see.weight"] @ x).view(TOKENS, HIDDEN)

    def embedded(self, batch):
        x, change = super().embedded(batch), self.context.hooks.embedded
        return x if change is None else change(x)


def with_format(name, **attributes):
    """Return a model with other attributes of its format."""
    media = type(name, (Squares,), attributes)
    media_format = classmethod(lambda cls, config, files: media())
    return type(name, (Seeing,), {"media_format": media_format, "__module__": __name__})


def with_mistake(name, mistake):
    """Return a model with a mistake in its program."""
    return with_format(name, processor_settings={"side": SIDE, "mistake": mistake})


_NUMBERS = itertools.count()

TokenBeyond = with_format("TokenBeyond", end_ids=(257,))
NoTokens = with_format("NoTokens", num_tokens=0)
OneTokenForAll = with_format("OneTokenForAll", token_id=3)
SeesItself = with_format("SeesItself", sees_itself=True)
NoSettings = with_format("NoSettings", settings="")
NoProgram = with_format("NoProgram", processor="")
GivesText = with_mistake("GivesText", "text")
KeepsSizes = with_mistake("KeepsSizes", "own size")
AddsNoise = with_mistake("AddsNoise", "noise")
NamedAlike = with_format("NamedAlike", identifier=lambda self, content_hash: "image")
NamedAnew = with_format("NamedAnew", identifier=lambda self, content_hash: f"{next(_NUMBERS)}")


class FormatAsMapping(Seeing):
    @classmethod
    def media_format(cls, config, files):
        return {"num_tokens": TOKENS}


class OtherSettings(Seeing):
    """Its second format has other settings."""

    made = 0

    @classmethod
    def media_format(cls, config, files):
        cls.made += 1
        media = Squares()
        media.settings = f"squares {cls.made}"
        return media


class Stacks(Seeing):
    def encode_media(self, modality, items):
        return torch.stack(super().encode_media(modality, items))


class OneRowEach(Seeing):
    def seen(self, item):
        return super().seen(item)[:1]


class MeanOfAll(Seeing):
    """Subtracts the mean of all items."""

    def encode_media(self, modality, items):
        embeddings = super().encode_media(modality, items)
        return [embedding - sum(embeddings) / (1 + len(embeddings)) for embedding in embeddings]


class ScalesItems(Seeing):
    """Mutates its inputs."""

    def seen(self, item):
        item //= 2
        return super().seen(item)


class SeesNothing(Seeing):
    def seen(self, item):
        return super().seen(torch.zeros_like(item)) + 1


class Overflows(Seeing):
    def seen(self, item):
        return super().seen(item) / 0


class EncodeRaises(Seeing):
    def encode_media(self, modality, items):
        raise KeyError(modality)


class IgnoresHook(Seeing):
    """Calls the hook and goes on with the tokens."""

    def embedded(self, batch):
        x = Tiny.embedded(self, batch)
        if self.context.hooks.embedded is not None:
            self.context.hooks.embedded(x)
        return x


class CallsNoHook(Seeing):
    def embedded(self, batch):
        return Tiny.embedded(self, batch)
