"""powersgd: a gradient matrix as the product of two narrow matrices.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.compression.codec import SteppedCodec, accumulation_dtype

__all__ = ["CODEC", "Powersgd"]


@dataclass(repr=False, eq=False)
class Powersgd(SteppedCodec):
    """Codec that approximates each matrix M as P Qᵗ, where P and Q have `rank` columns, and sends P and Q.

    A parameter's first dimension becomes the matrix's rows, and all other dimensions its columns. Parameters with fewer
    than two dimensions are sent uncompressed, and so are parameters that are no larger than P and Q together. Each step
    starts from the previous step's Q, so that successive steps are a power iteration. Use `error_feedback(powersgd())`.
    A NaN or an infinity makes its whole parameter NaN, on every rank; the next step restarts that parameter from new
    random columns.

    Results are bitwise equal on all ranks only if all ranks have the same torch version and processor type, and so the
    same linear algebra routines.

    Cost: two all_reduces, in float32 (float64 for float64 buckets): one for all uncompressed parameters and all P, and
    one for all Q.

    Args:
        rank: Number of columns of P and Q; at least 1.
        seed: Seed of the first Q; the same on all ranks.

    Raises:
        ValueError: `rank` is less than 1.

    Example:
        >>> def program(comm):
        ...     matrix = torch.outer(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(5)) * (comm.rank + 1)
        ...     flat = matrix.view(-1)
        ...     un.compression.powersgd(rank=1).average(flat, comm, [matrix.shape])
        ...     return flat.view(4, 5)[:, 0]
        >>> un.launch(program, 2, "thread")[0]
        tensor([1.5000, 3.0000, 4.5000, 6.0000])
    """

    name = "powersgd"
    rank: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")
        self._columns: list[torch.Tensor] = []

    def average(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        self.prepare(flat, comm, shapes, kept)
        if not flat.numel():
            return
        share = flat.to(accumulation_dtype(flat.dtype)) / comm.size
        plain, matrices = self._parts(share, shapes)
        right = self._starting_columns(matrices)
        left = [matrix @ columns for matrix, columns in zip(matrices, right, strict=True)]
        self._sum([*plain, *left], comm)
        left = [self._orthonormal(columns) for columns in left]
        right = [matrix.T @ columns for matrix, columns in zip(matrices, left, strict=True)]
        if kept is not None:
            self._write(kept, flat, shapes, left, right, comm.size)
        self._sum(right, comm)
        # `share` already contains the means of the parameters that are sent uncompressed, because `plain` consists of
        # views of `share`.
        self._write(flat, share, shapes, left, right)
        self._columns = right
        self._step = self._step + 1

    def _write(
        self,
        target: torch.Tensor,
        plain: torch.Tensor,
        shapes: Sequence[torch.Size],
        left: list[torch.Tensor],
        right: list[torch.Tensor],
        factor: int = 1,
    ) -> None:
        """Write the products of `left` and `right` to `target`'s matrices, and copy other parameters from `plain`."""
        target.copy_(plain)
        for into, rows, columns in zip(self._parts(target, shapes)[1], left, right, strict=True):
            into.copy_((rows @ columns.T).mul_(factor))

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        # P has orthonormal columns, so P Pᵗ M is an orthogonal projection of M, and the error is at most the norm of M.
        _, matrices = self._parts(flat.double(), shapes)
        return math.sqrt(sum(float(matrix.square().sum()) for matrix in matrices)) * (1 + 1e-5)

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        plain, matrices = self._parts(torch.empty(numel, device="meta"), shapes)
        sent = sum(part.numel() for part in plain)
        sent += sum(sum(matrix.shape) * self._width(matrix.shape) for matrix in matrices)
        return 2 * (size - 1) / size * max(itemsize, 4) * sent

    def reset(self) -> None:
        super().reset()
        self._columns = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "columns": [columns.clone() for columns in self._columns]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._columns = [columns.clone() for columns in state["columns"]]

    def _width(self, shape: Sequence[int]) -> int:
        return min(self.rank, *shape)

    def _parts(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the parameters sent uncompressed, and of the matrices sent as two factors."""
        plain = []
        matrices = []
        for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
            form = (shape[0] if shape else 1, math.prod(shape[1:]))
            if sum(form) * self._width(form) < part.numel():
                matrices.append(part.view(form))
            else:
                plain.append(part)
        return plain, matrices

    def _starting_columns(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the last step's Q, orthonormalized; columns that are 0 or not finite are replaced with random ones."""
        generator = self.generator()
        starting = []
        last: Sequence[torch.Tensor | None] = self._columns or [None] * len(matrices)
        if self._columns and [len(columns) for columns in self._columns] != [matrix.shape[1] for matrix in matrices]:
            raise ValueError(
                "this codec holds columns for other parameters; use one codec per bucket, created by clone()"
            )
        for matrix, columns in zip(matrices, last, strict=True):
            shape = (matrix.shape[1], self._width(matrix.shape))
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix)
            if columns is not None:
                usable = columns.isfinite().all(0) & columns.any(0)
                drawn = torch.where(usable, columns, drawn)
            starting.append(self._orthonormal(drawn))
        return starting

    @staticmethod
    def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
        """Return orthonormal columns that span `columns`; they have full rank even if `columns` does not."""
        orthonormal: torch.Tensor = torch.linalg.qr(columns).Q
        return orthonormal

    @staticmethod
    def _sum(tensors: list[torch.Tensor], comm: Communicator) -> None:
        """Sum the tensors over ranks in place, with a single all_reduce."""
        if not tensors:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        comm.all_reduce(together, algorithm="fewest_bytes")
        for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


CODEC = Powersgd
