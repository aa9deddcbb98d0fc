"""SGLang's CPU kernels for NGRAM in torch, for machines without the compiled ones.

`end_to_end.py` puts this file into the path of SGLang's processes as ``sgl_kernel``, and `attend` into its
list of plugins. Everything else of that package is missing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


def __getattr__(name: str) -> Any:
    """Any other kernel: importing it is harmless, calling it is not."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not compiled here")

    return missing


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, width: int
) -> None:
    """Write each row's places start to end of the table of cache places."""
    spans = zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
    found = torch.cat([table[row, first:last] for row, first, last in spans])
    out[: len(found)] = found


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, places: Tensor, width: int
) -> None:
    """Write the next cache places into each row of the table, from start to end."""
    done = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = places[done : done + last - first].to(table.dtype)
        done += last - first


def fill_accept_out_cache_loc_cpu(accepted: Tensor, places: Tensor, out: Tensor) -> None:
    """Write the cache places of the accepted nodes, whose indices are not -1."""
    found = places[accepted[accepted >= 0].long()]
    out[: len(found)] = found


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, out: Tensor, width: int) -> None:
    """Write each row's last accepted token; ``lengths`` includes it."""
    out[: len(lengths)] = (
        tokens.view(-1, width).gather(1, lengths.long()[:, None] - 1).flatten().to(out.dtype)
    )


def copy_all_layer_kv_cache_cpu(buffers: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy rows within each layer's buffer, given by its address and bytes per row."""
    for buffer, stride in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(buffer + stride * place, stride) for place in source.tolist()]
        for place, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(buffer + stride * place, row, stride)


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    count: int,
    nodes: int,
) -> None:
    """Write each node's position, first child and next sibling, from the mask of its ancestors."""
    above = mask[: count * nodes * nodes].reshape(count, nodes, nodes).bool().tril(-1)
    positions.copy_((above.sum(-1) + lengths[:, None]).reshape(-1))
    index.copy_(torch.arange(count * nodes).reshape(count, nodes))
    order = torch.arange(nodes)
    parents = torch.where(above.any(-1), (above * order).amax(-1), -1).tolist()
    for row in range(count):
        child, sibling, first = [-1] * nodes, [-1] * nodes, dict[int, int]()
        for node in reversed(range(nodes)):
            child[node] = first.get(node, -1)
            parent = parents[row][node]
            if parent >= 0:
                sibling[node], first[parent] = first.get(parent, -1), node
        next_token[row], next_sibling[row] = torch.tensor(child), torch.tensor(sibling)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's tokens down each tree."""
    tokens, best = candidates.tolist(), target_predict.tolist()
    child, sibling, index = retrive_next_token.tolist(), retrive_next_sibling.tolist(), retrive_index.tolist()
    for row in range(len(tokens)):
        node, path = 0, [0]
        while True:
            one = child[row][node]
            while one >= 0 and tokens[row][one] != best[row][node]:
                one = sibling[row][one]
            if one < 0:
                break
            node = one
            path.append(node)
        for depth, node in enumerate(path):
            accept_index[row, depth] = index[row][node]
            predicts[index[row][node]] = best[row][node]
        accept_token_num[row] = len(path) - 1


def attend() -> None:
    """Let SGLang's backend in plain torch, which has no trees, attend under a tree's mask."""
    from sglang.srt.layers.attention.torch_native_backend import KVWriteLoc, TorchNativeAttnBackend

    plain = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        if not batch.forward_mode.is_target_verify():
            return plain(self, q, k, v, layer, batch, save_kv_cache)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        count, nodes = len(batch.seq_lens), batch.spec_info.draft_token_num
        queries = q.view(count, nodes, layer.tp_q_head_num, -1)
        trees = batch.spec_info.custom_mask[: count * nodes * nodes].reshape(count, nodes, nodes).bool()
        rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        found = []
        for row, (request, length) in enumerate(rows):
            places = self.req_to_token_pool.req_to_token[request, :length].long()
            places = torch.cat([places, batch.out_cache_loc.view(count, nodes)[row].long()])
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries[row].transpose(0, 1)[None],
                keys[places].transpose(0, 1)[None],
                values[places].transpose(0, 1)[None],
                attn_mask=torch.cat([torch.ones(nodes, length, dtype=torch.bool), trees[row]], dim=1),
                scale=layer.scaling,
                enable_gqa=True,
            )
            found.append(attended[0].transpose(0, 1).reshape(nodes, -1))
        return torch.cat(found)

    TorchNativeAttnBackend.forward_extend = forward_extend
