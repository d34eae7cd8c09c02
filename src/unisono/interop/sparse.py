"""The sum of sparse tensors, such as the gradients of an embedding."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator

__all__ = ["sum_sparse"]


def sum_sparse(comm: Communicator, tensor: torch.Tensor, op: str, timeout: float | None) -> None:
    """Make a sparse COO tensor the sum of all ranks' ones, in place. Blocking.

    Raises `ValueError` for another layout or operation.
    """
    if tensor.layout != torch.sparse_coo or op != "sum":
        raise ValueError(f"only sums of sparse_coo tensors are reduced, not {op} of {tensor.layout}; use to_dense()")
    mine = tensor.detach().coalesce()
    counts = torch.zeros(comm.size, dtype=torch.int64)
    comm.all_gather_single(counts, torch.tensor([mine.values().shape[0]]), timeout=timeout)
    places, values = mine.indices().contiguous(), mine.values().contiguous()
    all_places = [places.new_empty((places.shape[0], n)) for n in counts.tolist()]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in counts.tolist()]
    comm.all_gather(all_places, places, timeout=timeout)
    comm.all_gather(all_values, values, timeout=timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_places, 1), torch.cat(all_values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
