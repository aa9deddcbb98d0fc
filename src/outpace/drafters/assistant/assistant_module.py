"""An assistant as a drafter runs it: over trees, for many sequences at once.

The target's keys and values are computed once more, from its states before the two layers that they belong
to, since a drafter is given states and no cache.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache import LayerShape, RowShape
from outpace.core import OutpaceError
from outpace.drafters.support.layer_cache import Forward
from outpace.learned.head import drafting_layer
from outpace.learned.published import config_of, find
from outpace.targets.base import TargetModel
from outpace.targets.cpu.linear import pack_drafter
from outpace.targets.inputs.config import family
from outpace.targets.weights.pretrained import read_model

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
_SLIDING = "sliding_attention"


class AssistantModule(nn.Module):
    """An assistant and its target.

    What a committed row reads is the target's last state and those before its layers, joined. A row's output
    has the same size: first what its children read, last what the head reads, and zeros between them.

    Args:
        stock: transformers' assistant, in the target's dtype and on its device.

    Attributes:
        tokens: tokens on a path by default.
        shapes: of the target's keys and values, by kind of layer.
    """

    def __init__(self, stock: Any, target: TargetModel) -> None:
        super().__init__()
        self.stock = stock
        self._target = target
        self._config = stock.config.get_text_config()
        self._layers = _producers(target, stock)
        _check_sizes(stock, target, self._layers)
        self.tokens = int(getattr(stock.generation_config, "num_assistant_tokens", None) or 4)
        hidden = target.hidden
        self.shapes = {
            kind: LayerShape(
                *[RowShape(_kv_heads(layer), layer.self_attn.head_dim, hidden.dtype, hidden.device)] * 2
            )
            for kind, (_, layer) in self._layers.items()
        }

    @classmethod
    def of(cls, given: Any, target: TargetModel) -> AssistantModule:
        """The given assistant, or the one in a folder, which may be a name on the hub.

        Raises:
            OutpaceError: it is not an assistant, it does not fit the target, or weights are missing.
        """
        if isinstance(given, AssistantModule):
            return given
        if given is None:
            raise OutpaceError("assistant: it needs path, the folder or hub name of an assistant")
        if isinstance(given, str | Path):
            given = _loaded(given, target)
        else:
            given = copy.deepcopy(given)  # the user's is not changed
            if getattr(given.config, "model_type", None) not in KINDS:
                raise OutpaceError(f"assistant: a {type(given).__name__} is none; give {' or '.join(KINDS)}")
        stock = given.to(device=target.hidden.device, dtype=target.hidden.dtype)
        stock.requires_grad_(False).eval()
        made = cls(stock, target)
        if target.hidden.device.type == "cpu":
            pack_drafter(stock.model)
        return made

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The target's last state, and the states before the layers whose keys and values are read."""
        return (-1, *(number for number, _ in self._layers.values()))

    def read(self, forward: Forward, tokens: Tensor, states: Tensor) -> Tensor:
        """Store the keys and values of committed rows; outputs of each sequence's last row, zeros elsewhere.

        Args:
            tokens: the token after each row's place, [S, width].
            states: the target's at ``layers_read``, joined, [S, width, ...].
        """
        parts = states.chunk(len(self.layers_read), dim=-1)
        seen = {
            kind: forward.store(place)(*self._keys(kind, parts[1 + place], forward.positions))
            for place, kind in enumerate(self._layers)
        }
        last = (forward.widths[:, None] - 1).clamp(min=0)
        made = self._run(
            seen,
            tokens.gather(1, last),
            parts[0].gather(1, last[..., None].expand(-1, -1, parts[0].shape[-1])),
            forward.positions.gather(1, last) + 1,
        )
        outputs = made.new_zeros(*tokens.shape, made.shape[-1])
        return outputs.scatter_(1, last[..., None].expand_as(made), made)

    def draft(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        """Outputs of rows of a draft, [S, width, ...].

        Args:
            tokens: [S, width].
            read: the outputs of their parents, [S, width, ...].
            depth: of the rows in the draft, at least 1.
        """
        seen = {}
        for place, (kind, shape) in enumerate(self.shapes.items()):
            keys, values = (
                read.new_zeros(len(tokens), rows.heads, tokens.shape[1], rows.size)
                for rows in (shape.keys, shape.values)
            )
            seen[kind] = forward.store(place)(keys, values)  # hidden below: they are not committed
        size = self._target.hidden.size
        return self._run(seen, tokens, read[..., :size], forward.positions + 1 - depth)

    def states(self, outputs: Tensor) -> Tensor:
        """What the head reads of rows of these outputs, [n, ...]."""
        return outputs[:, -self.stock.hidden_size :]

    def head(self, ids: Tensor | None) -> nn.Module:
        """The head: its inputs [n, hidden size] -> logits of the ids, [n, ids]; None for all of them.

        Raises:
            OutpaceError: it scores a few clusters of the vocabulary already.
        """
        whole: nn.Module = self.stock.lm_head
        if ids is None:
            return whole if self.stock.masked_embedding is None else _Clusters(self.stock)
        if self.stock.masked_embedding is not None:
            raise OutpaceError(
                "assistant: the head of this one scores a few clusters of the vocabulary already; leave "
                "draft_vocabulary and draft_text out"
            )
        return drafting_layer(self.stock.lm_head.weight.detach()[ids])

    def _run(
        self, seen: Mapping[str, tuple[Tensor, Tensor]], tokens: Tensor, before: Tensor, roots: Tensor
    ) -> Tensor:
        """Outputs of rows [S, width].

        Args:
            seen: kind of layer -> the target's keys and values, [S, heads, columns, size].
            before: what the rows before them gave, [S, width, hidden size].
            roots: position of each row's root, [S, width]; columns from there on are not committed.
        """
        embedded = self._target.embed(tokens).to(before)
        inputs = self.stock.pre_projection(torch.cat([embedded, before], dim=-1))
        masks = {}
        for kind, (keys, _) in seen.items():
            columns = torch.arange(keys.shape[2], device=roots.device)
            sees = columns < roots[..., None]
            if kind == _SLIDING:  # as transformers counts from the last committed place, inclusively
                sees = sees & (columns >= roots[..., None] - 1 - self._config.sliding_window)
            sees = sees | (~sees.any(-1, keepdim=True) & (columns == 0))  # so that a softmax is defined
            least = torch.finfo(inputs.dtype).min
            masks[kind] = inputs.new_zeros(sees.shape).masked_fill_(~sees, least)[:, None]
        states = self.stock.model(
            inputs_embeds=inputs,
            attention_mask=masks,
            position_ids=roots,
            shared_kv_states=dict(seen),
            use_cache=False,
            logits_to_keep=slice(None),  # of all rows
        ).last_hidden_state
        given = self.stock.post_projection(states)
        filler = given.new_zeros(*given.shape[:-1], given.shape[-1] * len(self._layers) - states.shape[-1])
        return torch.cat([given, filler, states], dim=-1)

    def _keys(self, kind: str, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's keys and values, [S, heads, width, size], from the states before their layer."""
        layer: Any = self._layers[kind][1]
        attention = layer.self_attn
        decoder = self._target.model.get_decoder()
        normed = layer.input_layernorm(states)
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        keys = attention.k_proj(normed).view(shape)
        values = keys if attention.v_proj is None else attention.v_proj(normed).view(shape)
        turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        keys = turn(attention.k_norm(keys), *decoder.rotary_emb(states, positions, kind), unsqueeze_dim=2)
        return keys.transpose(1, 2), attention.v_norm(values).transpose(1, 2)


class _Clusters(nn.Module):
    """A head that scores the tokens of a few clusters of the vocabulary."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self._embedder, self._head = stock.masked_embedding, stock.lm_head

    def forward(self, states: Tensor) -> Tensor:
        chosen: Tensor = self._embedder(states[:, None], self._head.weight)[:, 0]
        # Tokens of other clusters have one number below all others, which depends on the batch.
        return chosen.masked_fill(chosen == chosen.min(), -torch.inf)


def _loaded(path: str | Path, target: TargetModel) -> Any:
    """transformers' assistant from a folder or the hub, in the target's dtype."""
    place = find(path, "assistant")
    kind = config_of(place).get("model_type")
    if kind not in KINDS:
        raise OutpaceError(f"assistant: {place} has the model_type {kind!r}; it reads {' and '.join(KINDS)}")
    return read_model(str(place), "assistant", decodes=False, dtype=target.hidden.dtype)


def _producers(target: TargetModel, stock: Any) -> dict[str, tuple[int, Any]]:
    """Kind of layer -> number and layer of the target whose keys and values an assistant reads."""
    model = target.model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") and not target.has_encoder else None
    layers = getattr(decoder, "layers", ())
    found = {}
    for number, layer in enumerate(layers):
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "store_full_length_kv", False):
            found[attention.layer_type] = (number, layer)
    wanted = set(stock.config.get_text_config().layer_types)
    if not wanted <= found.keys() or not hasattr(decoder, "rotary_emb"):
        name = target.name if model is None else family(model)
        raise OutpaceError(
            f"assistant: it attends to keys and values that Gemma 4's layers share, and {name} has none of "
            f"kind {min(wanted - found.keys(), default='known here')}; give its own target, or use another "
            "drafter, as suffix"
        )
    for _, layer in found.values():
        if layer.self_attn.k_proj.weight.is_meta:
            raise OutpaceError(
                f"assistant: it needs the weights of {target.name}'s attention, which were released; load "
                "the model again, and do not release them"
            )
    return found


def _kv_heads(layer: Any) -> int:
    attention = layer.self_attn
    return int(attention.k_proj.out_features // attention.head_dim)


def _check_sizes(stock: Any, target: TargetModel, layers: Mapping[str, tuple[int, Any]]) -> None:
    """Compare an assistant's sizes with its target's."""
    own = stock.config
    pairs = {
        "backbone_hidden_size": (own.backbone_hidden_size, target.hidden.size),
        "vocab_size": (stock.vocab_size, target.vocabulary),
    }
    for layer in stock.model.layers:
        kind, attention = layer.self_attn.layer_type, layer.self_attn
        theirs = layers[kind][1]
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        pairs[f"head size of {kind}"] = (attention.head_dim, theirs.self_attn.head_dim)
        pairs[f"number of key-value heads of {kind}"] = (heads, _kv_heads(theirs))
    for what, (found, needed) in pairs.items():
        if found != needed:
            raise OutpaceError(
                f"assistant: its {what} is {found}, and {target.name} has {needed}; give the target that it "
                "was made for"
            )
    if stock.hidden_size > target.hidden.size * len(layers):
        raise OutpaceError(
            f"assistant: its hidden size, {stock.hidden_size}, is far above {target.name}'s; use another "
            "drafter, as suffix"
        )
