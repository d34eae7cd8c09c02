"""Random module graphs: whatever is used, shared or skipped, the mean is that of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import unisono as un
from unisono.testing import pool

WIDTH = 3

# A node: which earlier nodes it reads, what it does, and which of the parameters it uses (so that some are shared).
NODES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 20), min_size=1, max_size=3),
        st.sampled_from(["linear", "scale", "tanh", "skip"]),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


class Graph(nn.Module):
    """Nodes in a row, each made of the sum of some earlier ones; the last one is the result."""

    def __init__(self, nodes: list[tuple[list[int], str, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.nodes = nodes
        generator = torch.Generator().manual_seed(7)
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH, generator=generator, dtype=dtype) for _ in range(5))
        self.scales = nn.ParameterList(torch.randn(WIDTH, generator=generator, dtype=dtype) for _ in range(5))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        values = [x]
        for reads, kind, which in self.nodes:
            given = torch.stack([values[r % len(values)] for r in reads]).sum(0)
            if kind == "linear" or (kind == "skip" and not skip):
                given = torch.tanh(given @ self.matrices[which])
            elif kind == "scale":
                given = given * self.scales[which]
            elif kind == "tanh":
                given = torch.tanh(given)
            values.append(given)
        return values[-1]


def loss(model: nn.Module, x: torch.Tensor, skip: bool) -> torch.Tensor:
    out: torch.Tensor = model(x, skip).square().sum()
    # A graph may use no parameter at all.
    return out + 0.0 * x.sum()


def program(
    comm: un.Communicator,
    nodes: list[tuple[list[int], str, int]],
    xs: list[torch.Tensor],
    skips: list[bool],
    cap: float,
) -> list[torch.Tensor | None]:
    model = Graph(nodes, torch.float64)
    averager = un.GradientAverager(model, comm, bucket_cap_mb=cap, first_bucket_mb=cap / 2, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        loss(model, xs[comm.rank].requires_grad_(), skips[comm.rank]).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    averager.remove()
    return found


@pytest.mark.parametrize("size", [2, 3])
@given(
    nodes=NODES,
    skips=st.lists(st.booleans(), min_size=3, max_size=3),
    cap=st.sampled_from([0.00003, 0.0001, 0.0002, 1.0]),
    backend=st.sampled_from(["thread", "shm", "gloo"]),
)
@settings(max_examples=max(3, settings.default.max_examples // 4))
def test_gradients_of_any_graph_are_averaged(
    size: int, nodes: list[tuple[list[int], str, int]], skips: list[bool], cap: float, backend: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(2, WIDTH, generator=generator, dtype=torch.float64) for _ in range(size)]
    model = Graph(nodes, torch.float64)
    total = sum(
        (loss(model, x.clone().requires_grad_(), skip) for x, skip in zip(xs, skips, strict=False)), torch.zeros(())
    )
    (total / size).backward()
    for found in pool(backend, 3).run(program, nodes, xs, skips, cap, size=size):
        for mean, parameter in zip(found, model.parameters(), strict=True):
            assert (mean is None) == (parameter.grad is None)
            if mean is not None and parameter.grad is not None:
                scale = max(1.0, parameter.grad.abs().max().item())
                assert (mean - parameter.grad).abs().max().item() <= 1e-10 * scale
