"""Programs that tests of the simulation run."""

from __future__ import annotations

import torch

import unisono as un
from unisono.transports.sim import Link, SimNetwork

__all__ = ["FREE", "all_reduce"]


FREE = SimNetwork(Link(0.0, 0.0), request_s=0.0)


def all_reduce(comm: un.Communicator) -> float:
    t = torch.full((4,), float(comm.rank))
    comm.all_reduce(t)
    return t.sum().item()
