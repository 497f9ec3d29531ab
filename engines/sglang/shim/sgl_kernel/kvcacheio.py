"""Copies between SGLang's device pool and host pool by torch. Both are in CPU memory."""

from collections.abc import Sequence

from torch import Tensor


def pages(slots: Tensor, page_size: int) -> Tensor:
    return slots.view(-1, page_size)[:, 0] // page_size


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copies rows of tokens in every layer, between pools of equal layout, in either direction."""
    src, dst = src_indices.cpu(), dst_indices.cpu()
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst] = source[src]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copies all layers of tokens from the device pool to the host pool. `dst_ptrs`: one tensor
    [page, layer, token, head, dim] for K and one for V, or one for both. `src_ptrs`: for each of
    these in order, a tensor [token, head, dim] of each layer.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    rows, to = src_indices.cpu(), pages(dst_indices.cpu(), page_size)
    for which, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[which * layers + layer]
            target[to, layer] = source[rows].view(len(to), page_size, *source.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of pages from the host pool to rows of tokens in the device pool."""
    at, rows = pages(src_indices.cpu(), page_size), dst_indices.cpu()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[rows] = source[at, layer_id].reshape(len(rows), *target.shape[1:])
