"""The processors keep every rule of IO processors: the conformance kit checks it."""

from acme_spans import Digest, Spans

from hardpoint.testing import IOProcessorSuite

pytest_plugins = ["hardpoint.testing"]


class TestSpans(IOProcessorSuite):
    processor = Spans
    options = {"size": 16, "overlap": 4, "spans": 40}
    samples = [
        {"text": "a short text"},
        {"text": "a text of several spans " * 8, "vectors": True},
        {"text": "the fox jumps over the lazy dog " * 3, "query": "a dog", "top_n": 2},
    ]
    refused = [
        {"text": ""},
        {"text": "many parts " * 100},
        {"text": "a", "query": "a query that is too long " * 20},
        {"text": "a", "top_n": 0},
    ]


class TestDigest(IOProcessorSuite):
    processor = Digest
    options = {"size": 16, "max_tokens": 8}
    samples = [{"text": "a short text"}, {"text": "the fox jumps over the lazy dog " * 5}]
    refused = [{"text": ""}, {"texts": ["a"]}]
