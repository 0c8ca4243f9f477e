"""The rules for models with images in their prompts."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

FORMAT = Rule(
    "media format: media_format has tokens of the vocabulary, and describes the encoder's inputs",
    "return a MediaFormat with all of its attributes, made of the configuration and the files "
    "alone: the frontend, the engine and each worker make their own",
)
PROCESS = Rule(
    "process: an image of any size becomes the same uint8 numbers of item_shape each time",
    "resize each image in the program that `processor` names, and take no part of the result from "
    "anything but the image and `processor_settings`",
)
IDENTIFIERS = Rule(
    "identifiers: equal images have one, other images another",
    "hash the content of the image and `settings`; MediaFormat.identifier does",
)
ENCODE = Rule(
    "encode: encode_media gives [tokens, hidden_size] of each item, alone as among others",
    "compute each item from its own numbers, and keep nothing of it",
)
EMBEDDED = Rule(
    "embedded: the result of hooks.embedded enters the first layer instead of the embedded tokens",
    "call context.hooks.embedded with the embedded tokens, where it is set, and continue with its "
    "result; Embedding.changed of hardpoint.toolkit.layers does",
)
MEDIA = "; ".join(rule.text for rule in (FORMAT, PROCESS, IDENTIFIERS, ENCODE, EMBEDDED))
