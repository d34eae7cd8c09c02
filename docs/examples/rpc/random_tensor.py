"""The notes' program: two remote tensors, their sum here, gradients on their owners, one optimizer step there."""

from __future__ import annotations

import torch
from torch import optim

import unisono as un
from unisono import rpc


@rpc.expose
def random_tensor() -> torch.Tensor:
    return torch.rand((3, 3), requires_grad=True)


def run(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first tensor before and after the step, on rank 0."""
    rpc.init(comm, name=f"worker{comm.rank}")
    seen = None
    if comm.rank == 0:
        with rpc.autograd.context() as context:
            rref1 = rpc.remote("worker1", random_tensor)
            rref2 = rpc.remote("worker1", random_tensor)
            before = rref1.to_here().detach().clone()
            loss = rref1.to_here() + rref2.to_here()
            rpc.autograd.backward(context, [loss.sum()])
            optimizer = rpc.DistributedOptimizer(optim.SGD, [rref1, rref2], lr=0.05)
            optimizer.step(context)
            seen = before, rref1.to_here().detach().clone()
    rpc.shutdown()
    return seen


if __name__ == "__main__":
    before, after = un.launch(run, nprocs=2)[0]
    print("moved by", (after - before).mean().item())
