"""The rules for models."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

WEIGHTS = Rule(
    "weights: load_weights needs the tensors of weight_shapes, all of them and no others",
    "list the name and the shape of each tensor of the checkpoint that load_weights uses; it gets "
    "them one by one, in any order and in any floating dtype",
)
PACKED = Rule(
    "packed: load_packed with the result of packed_weights gives the same model as load_weights",
    "return every tensor that load_weights has made, by name; raise KeyError or ValueError for one "
    "that is missing",
)
SPECS = Rule(
    "specs: kv_specs has one KVSpec per attention layer, always the same",
    "return a list of KVSpec, known from the configuration before the weights are loaded",
)
ATTEND = Rule(
    "attend: forward calls attend once per layer of kv_specs, with tensors of its spec",
    "pass q [tokens, num_heads, head_size], and k and v [tokens, num_kv_heads, head_size], in the "
    "context's dtype; let kv_specs state the same",
)
STATES = Rule(
    "states: state_specs has the tensors of each layer with a state, always the same",
    "return a list with a tuple of TensorSpec per layer, known before the weights are loaded",
)
RECUR = Rule(
    "recur: forward calls recur once per layer of state_specs, with an advance that returns an "
    "output per token and the states of the specs",
    "pass inputs [tokens, ...], and return the outputs [tokens, ...] and one tensor [seqs, ...] "
    "per TensorSpec",
)
SHAPES = Rule(
    "shapes: hidden states [tokens, hidden], logits [rows, vocab_size]",
    "return one row of a constant width per token, and one logit per token id of config.vocab_size",
)
BATCH = Rule(
    "batch: a sequence's hidden states depend on its own tokens alone",
    "compute each token from its id, its position and the results of attend and recur; batches mix "
    "sequences, and a prompt may come in parts: advance continues from its states, each sequence "
    "from its own",
)
POSITIONS = Rule(
    "positions: a token's position is the one in batch.positions",
    "use batch.positions for the rotary or learned embedding of positions; set uses_positions = "
    "False of the suite for a model without any",
)
SKIPS = Rule(
    "skips: a token that skips a layer keeps its residual stream, and writes keys and values",
    "compute q, k and v of all tokens in each layer, and leave out the MLP of tokens in "
    "hooks.skips alone; after the first batch.num_layers layers, continue with the last norm",
)
STATE = Rule(
    "state: forward keeps nothing for the next step",
    "keep keys and values in the cache, through attend, states in the result of advance, and "
    "nothing of a step in the model",
)
