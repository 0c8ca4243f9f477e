"""A small model that gets its own embeddings as prompts."""

from __future__ import annotations

import torch

from hardpoint.testing import write_scripted_model

from .builtins.checkpoint_harness import random_model

LENGTH = 96
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": LENGTH,
    "kv_cache": {"block_size": 8, "num_blocks": 80},
    "scheduler": {"max_num_seqs": 8},
    "attention": {"use": "native_cpu"},  # sums that do not depend on the other rows of a step
    "ops": {"use": "native_cpu"},
    "plugin": {"prompt_embeddings": {"enabled": True}},
}


class EmbeddedModel:
    """A random model, its folder, and prompts with its embeddings.

    Attributes:
        model: model of transformers.
        folder: its folder.
        table: embeddings as `inputs_embeds` has them, [vocab, hidden].
    """

    def __init__(self, folder, family="Llama", **fields):
        sizes = {"max_position_embeddings": LENGTH, "vocab_size": 257}
        self.model = random_model(family, **sizes | fields)
        self.folder = write_scripted_model(folder)  # for its tokenizer
        self.model.save_pretrained(folder)
        with torch.inference_mode():
            self.table = self.model.get_input_embeddings()(torch.arange(257)).clone()

    def settings(self, *tables):
        """Return the configuration of an engine, with tables that are merged into it."""
        merged = {"model": str(self.folder), **SETTINGS}
        for table in tables:
            for key, value in table.items():
                old = merged.get(key)
                merged[key] = old | value if isinstance(old, dict) else value
        return merged

    def embedded(self, ids):
        """Return a prompt of embeddings alone."""
        return {"prompt_embeds": self.table[ids]}

    def mixed(self, ids, is_id=lambda place: place % 3 == 1):
        """Return a prompt that has embeddings in place of some ids."""
        mask = [is_id(place) for place in range(len(ids))]
        missing = [token for token, known in zip(ids, mask, strict=True) if not known]
        return {
            "prompt_embeds": self.table[missing],
            "prompt_token_ids": [t if known else 0 for t, known in zip(ids, mask, strict=True)],
            "prompt_is_token_ids": mask,
        }

    def in_parts(self, ids):
        """Return ids, embeddings and ids again."""
        first, second = len(ids) // 3, 2 * len(ids) // 3
        return {"prompt_parts": [ids[:first], self.table[ids[first:second]], ids[second:]]}


def prompt_of(length, step=7):
    return [(step * place + 3 * length) % 251 for place in range(length)]
