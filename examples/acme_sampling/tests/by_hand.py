"""Helpers to test a processor without an engine."""

import torch

from hardpoint.plugins import LogitsContext, LogitsRequest, PrepareContext, SamplingParams
from hardpoint.testing import load_ops


class Rows:
    """Some requests' rows."""

    def __init__(self, processor, *requests):
        self.name = processor.name
        self.requests = requests
        self.version = 1
        for request in requests:
            request.state[self.name] = processor.start(request)

    def __len__(self):
        return len(self.requests)

    def arguments(self):
        return [request.arguments[self.name] for request in self.requests]

    def states(self):
        return [request.state[self.name] for request in self.requests]

    def tensor(self, name):
        return torch.tensor([[getattr(arguments, name)] for arguments in self.arguments()])


def build(cls, name, vocab_size=100):
    context = LogitsContext(
        name=name,
        options=cls.Options(),
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        max_num_seqs=8,
        ops=load_ops(torch.float32),
    )
    return cls(context)


def request_of(processor, prompt=(), output=(), *, seed=0, child_index=0, **arguments):
    return LogitsRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        params=SamplingParams(seed=seed),
        stop_token_ids=[],
        child_index=child_index,
        arguments={processor.name: processor.Arguments(**arguments)},
    )


class Letters:
    """A tokenizer: a letter is its own code."""

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def prepare(cls, arguments, *, tokenizer=None, stop=(), options=None, vocab_size=100):
    context = PrepareContext(
        options=options or cls.Options(),
        params=SamplingParams(),
        prompt_token_ids=[1],
        stop_token_ids=list(stop),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )
    return cls.prepare(arguments, context)
