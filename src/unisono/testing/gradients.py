"""Checks for code that averages gradients or broadcasts parameters: plain functions that run on each rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.communicator import Communicator

__all__ = ["Averager", "check_averages", "check_shares"]

Averager = Callable[[torch.nn.Module, Communicator], object]
"""Function called like `unisono.average_gradients` and `unisono.broadcast_parameters`."""


class _Odd(torch.nn.Module):
    """A module with a buffer and parameters of several shapes, dtypes and strides, one unused and one frozen."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        shapes = ((3, 5), (1,), (2, 0), (), (7,))
        self.many = torch.nn.ParameterList([torch.nn.Parameter(torch.full(s, 1.0 + rank)) for s in shapes])
        self.turned = torch.nn.Parameter(torch.full((4, 3), 1.0 + rank).t())
        self.wide = torch.nn.Parameter(torch.full((6,), 1.0 + rank, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.full((2,), 1.0 + rank))
        self.frozen = torch.nn.Parameter(torch.full((2,), 1.0 + rank), requires_grad=False)
        self.register_buffer("counter", torch.tensor([rank + 1]))


def check_averages(average: Averager, comm: Communicator) -> None:
    """Check that every gradient becomes the mean over ranks, and that parameters remain unchanged. Collective.

    Args:
        average: Function that averages a model's gradients in place, such as `unisono.average_gradients`.
        comm: Communicator of the ranks whose gradients are averaged.

    Raises: AssertionError otherwise.

    Example:
        >>> _ = un.launch(lambda comm: check_averages(un.average_gradients, comm), 2, "thread")
    """
    model = _Odd(comm.rank).to(comm.device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    used = {name: p for name, p in model.named_parameters() if p.requires_grad and name != "unused"}
    # Rank r's gradient is r + 1 in each element.
    sum(p.double().sum() * (comm.rank + 1) for p in used.values()).backward()  # type: ignore[union-attr]
    average(model, comm)
    mean = (comm.size + 1) / 2
    for name, parameter in used.items():
        assert parameter.grad is not None, f"{name} has lost its gradient"
        found = parameter.grad.unique().tolist()
        assert found in ([mean], []), f"the gradient of {name} is {found} on rank {comm.rank}, not the mean, {mean}"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name]), f"{name} has changed; only its gradient should"
        assert parameter.requires_grad or parameter.grad is None, f"{name} is frozen, and has got a gradient"


def check_shares(share: Averager, comm: Communicator) -> None:
    """Check that every parameter and buffer, even a frozen parameter, gets rank 0's values, in place. Collective.

    Args:
        share: Function that broadcasts rank 0's parameters and buffers, such as `unisono.broadcast_parameters`.
        comm: The ranks that take part.

    Raises: AssertionError otherwise.

    Example:
        >>> _ = un.launch(lambda comm: check_shares(un.broadcast_parameters, comm), 2, "thread")
    """
    model = _Odd(comm.rank).to(comm.device)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    share(model, comm)
    for name, tensor in model.state_dict().items():
        found = tensor.unique().tolist()
        assert found in ([1.0], []), f"{name} is {found} on rank {comm.rank}, not 1.0 as on rank 0"
        assert tensor.data_ptr() == places[name], f"{name} is in other memory than before"
