"""Averaging of sparse gradients, such as those of embeddings: only the rows that were used are gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.communicator import Communicator
from unisono.gradients.weights import ErrorContext, Weights, check_skipped
from unisono.utils.parameters import Named

__all__ = ["average_sparse", "sparse_parameters"]

_NONE = -1
_DENSE = -2
"""Codes sent instead of a row count: there is no gradient, or the gradient is dense."""


def sparse_parameters(model: torch.nn.Module) -> set[int]:
    """Return the `id` of each parameter that will have a sparse gradient."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}


def average_sparse(
    named: Named,
    comm: Communicator,
    weights: Weights,
    arrived: Sequence[bool] | None = None,
    lacking: Sequence[str] | None = None,
) -> list[int]:
    """Replace each `p.grad` with the mean over all ranks; a rank without a gradient contributes no rows.

    If a gradient is dense on some rank, because a dense layer shares the parameter, it becomes dense on all ranks. If
    no rank has received a gradient for a parameter, its p.grad remains unchanged. A rank without data contributes
    nothing, even if it has a p.grad.

    Args:
        named: The parameters, with their names.
        comm: Communicator of the ranks whose gradients are averaged.
        weights: The ranks' weights in this step.
        arrived: For each parameter, whether this rank has received a gradient; None to check p.grad instead.
        lacking: Names of the parameters for which this rank received no gradient; None if ranks may have gradients for
            different parameters.

    Returns:
        The indices in `named` of the parameters that were averaged.

    Raises:
        MismatchError: A rank lacks a gradient that other ranks have.

    Cost: one all_gather of the row counts; for each sparse gradient, one all_gather of its rows and one of their
    indices, so that each rank receives all ranks' rows; for each dense gradient, one all_reduce.
    """
    factor = weights.factor / comm.size
    parameters = [parameter for _, parameter in named]
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    grads = [parameter.grad if weights.here else None for parameter in parameters]
    with ErrorContext(f"averaging the sparse gradients of {', '.join(repr(name) for name, _ in named)}"):
        arrived = [p.grad is not None for p in parameters] if arrived is None else arrived
        gathered = comm.all_gather_object((list(map(_rows, grads)), list(arrived), lacking))
        if lacking is not None:
            check_skipped([name for name, _ in named], [names for _, _, names in gathered], weights.active, comm)
        averaged = [i for i in range(len(parameters)) if any(here[i] for _, here, _ in gathered)]
        for index in averaged:
            parameter = parameters[index]
            counts = [rows[index] for rows, _, _ in gathered]
            if _DENSE in counts:
                parameter.grad = _dense_mean(parameter, grads[index], comm, factor)
            elif max(counts) >= 0:
                parameter.grad = _sparse_mean(parameter, grads[index], comm, factor, [max(0, n) for n in counts])
        return averaged


def _rows(grad: torch.Tensor | None) -> int:
    """Return the number of rows to send, or, if there is no sparse gradient, `_NONE` or `_DENSE`."""
    if grad is None:
        return _NONE
    return int(grad.indices().shape[1]) if grad.is_sparse else _DENSE


def _dense_mean(parameter: torch.Tensor, grad: torch.Tensor | None, comm: Communicator, factor: float) -> torch.Tensor:
    mean = torch.zeros_like(parameter) if grad is None or not factor else grad.to_dense().mul(factor)
    comm.all_reduce(mean)
    # Copy the mean into the existing p.grad only now: the caller may own that memory, so the reduction must not use it.
    return mean if grad is None or grad.layout != torch.strided else grad.copy_(mean)


def _sparse_mean(
    parameter: torch.Tensor, grad: torch.Tensor | None, comm: Communicator, factor: float, counts: list[int]
) -> torch.Tensor:
    shape = parameter.shape[1:]
    device = parameter.device
    indices = torch.empty(0, dtype=torch.int64, device=device) if grad is None else grad.indices()[0]
    values = parameter.new_empty((0, *shape)) if grad is None else grad.values()
    all_indices = [torch.empty(n, dtype=torch.int64, device=device) for n in counts]
    all_values = [parameter.new_empty((n, *shape)) for n in counts]
    comm.all_gather(all_indices, indices.contiguous())
    comm.all_gather(all_values, values.mul(factor) if factor else torch.zeros_like(values))
    places = torch.cat(all_indices)[None]
    rows = torch.cat(all_values)
    return torch.sparse_coo_tensor(places, rows, parameter.shape, check_invariants=False).coalesce()
