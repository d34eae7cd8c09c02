"""Sparse gradients, of embeddings: what is gathered is the rows that were used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.communicator import Communicator
from unisono.gradients.weights import Weights

__all__ = ["average_sparse", "sparse_parameters"]


def sparse_parameters(model: torch.nn.Module) -> set[int]:
    """The `id` of each parameter whose gradient is going to be sparse."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}


def average_sparse(parameters: Sequence[torch.Tensor], comm: Communicator, weights: Weights) -> None:
    """Replace each `p.grad` by the mean over all ranks; a rank without one takes part with no rows.

    Cost: for each gradient one all_gather of its rows and their numbers; a rank receives all ranks' rows.
    """
    if not parameters:
        return
    factor = weights.factor / comm.size
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            grad = grad.to_sparse(1)
        rows = None if grad is None else grad.coalesce()
        shape, device = parameter.shape[1:], parameter.device
        indices = torch.empty(0, dtype=torch.int64, device=device) if rows is None else rows.indices()[0]
        values = parameter.new_empty((0, *shape)) if rows is None else rows.values()
        counts = comm.all_gather_object(-1 if rows is None else int(indices.numel()))
        if max(counts) < 0:
            continue
        all_indices = [torch.empty(max(0, n), dtype=torch.int64, device=device) for n in counts]
        all_values = [parameter.new_empty((max(0, n), *shape)) for n in counts]
        comm.all_gather(all_indices, indices.contiguous())
        comm.all_gather(all_values, values.mul(factor) if factor else torch.zeros_like(values))
        places, rows_there = torch.cat(all_indices)[None], torch.cat(all_values)
        mean = torch.sparse_coo_tensor(places, rows_there, parameter.shape, check_invariants=False)
        parameter.grad = mean.coalesce()
