"""The gated delta rule over sequences of unequal lengths, and the short convolution before it.

As in "Gated Delta Networks" (arXiv:2412.06464): a state S [key size, value size] of a head becomes

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T

with each token; its output is S^T q. Sequences of one token are computed so; longer ones in
chunks of tokens that are computed at once ("Parallelizing Linear Transformers with the Delta Rule
over Sequence Length", arXiv:2406.06484). Sequences are side by side: nothing is padded but the last
chunk of each. Importing this module loads torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["gated_delta_rule", "short_convolution"]

_CHUNK = 64
_EPS = 1e-6  # of the norm of queries and keys

_IntArray = np.ndarray[Any, np.dtype[np.int64]]


def short_convolution(
    state: torch.Tensor, starts: _IntArray, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal convolution of each channel over each sequence, and the next state.

    Args:
        state: [seqs, size - 1, channels]; the inputs of the tokens before.
        starts: int [seqs + 1]; first token of each sequence, and the number of all tokens.
        x: [tokens, channels].
        weight: [channels, size]; the last column multiplies the token itself.

    Returns:
        Outputs [tokens, channels], and the state after the last token of each sequence.
    """
    seqs, before, channels = state.shape
    lengths = np.diff(starts)
    # Row r of `rows` is input r - before of its sequence.
    firsts = starts[:-1] + before * np.arange(seqs)
    input_rows = np.arange(starts[-1]) + before * (1 + np.repeat(np.arange(seqs), lengths))
    state_rows = (firsts[:, None] + np.arange(before)).reshape(-1)
    ends = firsts + lengths
    tails = (ends[:, None] + np.arange(before)).reshape(-1)
    rows = x.new_empty((len(x) + len(state_rows), channels))
    at = torch.from_numpy(input_rows).to(x.device)
    rows[at] = x
    rows[torch.from_numpy(state_rows).to(x.device)] = state.reshape(-1, channels)
    y = x * weight[:, before]
    for lag in range(1, before + 1):
        y += rows[at - lag] * weight[:, before - lag]
    return y, rows[torch.from_numpy(tails).to(x.device)].view(seqs, before, channels)


def gated_delta_rule(
    state: torch.Tensor,
    starts: _IntArray,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule, and the next states, in float32.

    Args:
        state: float32 [seqs, heads, key size, value size].
        starts: int [seqs + 1]; first token of each sequence, and the number of all tokens.
        q: [tokens, key heads, key size]; divided by its norm and the square root of its size. The
            number of key heads divides the number of heads; neighboring heads share one.
        k: like q; divided by its norm.
        v: [tokens, heads, value size].
        g: [tokens, heads]; logarithm of the decay, at most 0.
        beta: [tokens, heads]; weight of an update, 0 to 1.

    Returns:
        Outputs [tokens, heads, value size], and the states after the last token of each sequence.
    """
    shared = state.shape[1] // q.shape[1]
    q, k = (_normalized(x.float()).repeat_interleave(shared, 1) for x in (q, k))
    q, v, g, beta = q * q.shape[-1] ** -0.5, v.float(), g.float(), beta.float()
    lengths = np.diff(starts)
    single, several = (lengths == 1).nonzero()[0], (lengths > 1).nonzero()[0]
    if not len(several):
        return _one_token(state, q, k, v, g, beta)
    tokens = (q, k, v, g, beta)
    if not len(single):
        return _chunked(state, lengths, *tokens)
    output, after = torch.empty_like(v), torch.empty_like(state)
    parts = ((single, _one_token), (several, lambda s, *x: _chunked(s, lengths[several], *x)))
    for rows, function in parts:
        spans = [np.arange(starts[row], starts[row + 1]) for row in rows]
        at = torch.from_numpy(np.concatenate(spans)).to(v.device)
        index = torch.from_numpy(rows).to(v.device)
        output[at], after[index] = function(state[index], *(x[at] for x in tokens))
    return output, after


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _one_token(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state * g.exp()[..., None, None]
    held = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * ((v - held) * beta[..., None])[..., None, :]
    return (state * q[..., None]).sum(-2), state


def _chunked(
    state: torch.Tensor,
    lengths: _IntArray,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = -(-lengths // _CHUNK)  # chunks of each sequence
    firsts = np.concatenate(([0], counts.cumsum()))  # of each sequence, and the number of all
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    places = torch.from_numpy(np.repeat(firsts[:-1] * _CHUNK, lengths) + within).to(v.device)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """Return x as [chunks, heads, tokens of a chunk, ...], padded with zeros."""
        padded = x.new_zeros((int(firsts[-1]) * _CHUNK, *x.shape[1:]))
        padded[places] = x
        return padded.view(-1, _CHUNK, *x.shape[1:]).transpose(1, 2)

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=v.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_beta = k * beta[..., None]
    # Each token's update depends on the tokens before it in the chunk: a triangular system.
    system = (k_beta @ k.mT * decay).tril(-1)
    both = torch.cat((v * beta[..., None], k_beta * g.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    updates, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, q_decayed = q @ k.mT * decay, q * g.exp()[..., None]
    to_end = (g[..., -1:] - g).exp()[..., None]
    output, state = torch.empty_like(v), state.clone()
    for number in range(int(counts.max())):
        rows = (counts > number).nonzero()[0]
        at = torch.from_numpy(firsts[rows] + number).to(v.device)
        index = torch.from_numpy(rows).to(v.device)
        before = state[index]
        update = updates[at] - reads[at] @ before
        output[at] = q_decayed[at] @ before + scores[at] @ update
        decayed = before * g[at, :, -1].exp()[..., None, None]
        state[index] = decayed + (k[at] * to_end[at]).mT @ update
    return output.transpose(1, 2).flatten(0, 1)[places], state
