"""Parts that drafters of DFlash's kin have beside it, named as in their published files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.core import OutpaceError
from outpace.learned.layers import Layer, Store


class MarkovHead(nn.Module):
    """DSpark's head (arXiv 2607.05147): a bias of low rank on the logits after the tokens drawn before.

    It depends on the last of them alone ("vanilla"), on the block's output at the place too ("gated"), or on
    all of them and their places, through a recurrent state ("rnn").

    Args:
        config: an ``ExtendedConfig``.
        vocabulary: number of ids that may come before.
        drafted: number of ids that are drafted.
    """

    def __init__(self, config: Any, vocabulary: int, drafted: int) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.markov_rank
        self.kind: str = config.markov_kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, outputs: Tensor, paths: Tensor) -> Tensor:
        """The bias, [n, drafted ids], after paths of tokens [n, 1 + depth].

        Args:
            outputs: the block's, normalised, [n, 1 + depth, hidden size].
        """
        before = self.markov_w1(paths)
        latent = before[:, -1]
        if self.kind == "gated":
            gate: Tensor = self.gate_proj(torch.cat([outputs[:, -1], latent], dim=-1))
            latent = gate.sigmoid() * latent
        elif self.kind == "rnn":
            state = torch.zeros_like(latent)
            for place in range(paths.shape[1]):
                read = torch.cat([state, before[:, place], outputs[:, place]], dim=-1)
                gate, candidate, latent = self.joint_proj(read).chunk(3, dim=-1)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = latent.tanh()
        bias: Tensor = self.markov_w2(latent)
        return bias


class CandidateSelector(nn.Module):
    """DFlash 2's selector: the best tokens of each place, weighed by the token that comes before.

    Args:
        config: an ``ExtendedConfig``.
        vocabulary: number of ids.
    """

    def __init__(self, config: Any, vocabulary: int) -> None:
        super().__init__()
        self.candidates: int = config.candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        """Logits [n, vocabulary] of the candidates after tokens; minus infinity for other ids.

        Args:
            logits: of the place by itself, [n, vocabulary].
            outputs: the block's at that place, normalised, [n, hidden size].
            before: the tokens that come before it, [n].
        """
        best, ids = logits.topk(min(self.candidates, logits.shape[-1]), dim=-1)
        asked = self.predecessor_codebook[before] * self.hidden_projection(outputs)
        edges = (self.successor_codebook[ids] @ asked[..., None]).squeeze(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, best + edges.to(best))


class GroupedConvolution(nn.Module):
    """DFlash 2's convolutions over the rows of a block, before and after a part of a layer.

    A row's coefficients are the kernel's, plus what the row itself adds to those of each group of numbers.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        if group < 1 or size % group:
            raise OutpaceError(f"dflash: conv_group_size must divide the hidden size of {size}, not {group}")
        self._taps, self._group = taps, group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def coefficients(self, states: Tensor) -> Tensor:
        """What rows [B, width, size] add to the kernels, [2, taps, B, width, size]."""
        added: Tensor = self.kernel_projection(states)
        every: Tensor = added.unflatten(-1, (2, self._taps, -1)).repeat_interleave(self._group, dim=-1)
        return every.permute(2, 3, 0, 1, 4)

    def forward(self, states: Tensor, added: Tensor, side: int) -> Tensor:
        """Rows [B, width, size] with those before them in the block.

        Args:
            added: of ``coefficients``.
            side: 0 before the part of the layer, 1 after it.
        """
        width = states.shape[1]
        moved = (functional.pad(states, (0, 0, tap, 0))[:, :width] for tap in range(self._taps))
        taps = (kernel + own for kernel, own in zip(self.base_kernel[side], added[side], strict=True))
        return torch.stack([one * rows for one, rows in zip(taps, moved, strict=True)]).sum(dim=0)


class ConvolvedLayer(Layer):
    """A decoder layer with convolutions around its attention and its feed-forward part.

    Args:
        config: an ``ExtendedConfig``.
    """

    def __init__(self, config: Any, norms: bool) -> None:
        super().__init__(config, norms=norms)
        sizes = config.hidden_size, config.taps, config.group
        self.attention_conv, self.mlp_conv = GroupedConvolution(*sizes), GroupedConvolution(*sizes)

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, store: Store) -> Tensor:
        rows = self.input_layernorm(states)
        added = self.attention_conv.coefficients(rows)
        seen = self.self_attn(self.attention_conv(rows, added, 0), angles, mask, store)
        states = states + self.attention_conv(seen, added, 1)
        rows = self.post_attention_layernorm(states)
        added = self.mlp_conv.coefficients(rows)
        out: Tensor = states + self.mlp_conv(self.mlp(self.mlp_conv(rows, added, 0)), added, 1)
        return out
