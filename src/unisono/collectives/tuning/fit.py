"""Fits a machine's cost constants to measured calls by least squares of the relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.collectives.algorithms import find
from unisono.collectives.tuning.cost_table import CostTable, LinkCost
from unisono.collectives.tuning.prediction import Machine, predicted

__all__ = ["Cell", "Fit", "fit"]


_ROUNDS = 3
"""Number of iterations. The fit is repeated because the bottleneck link or rank depends on the constants."""


class Cell(NamedTuple):
    """One measured call.

    Attributes:
        collective, algorithm: The algorithm, with its options.
        size: Number of ranks.
        nbytes: Size of the message in bytes.
        seconds: Measured time.
    """

    collective: str
    algorithm: str
    size: int
    nbytes: int
    seconds: float


class Fit(NamedTuple):
    """Fitted constants.

    Attributes:
        link: Latency, and seconds per byte.
        gamma: Seconds to reduce one received byte.
        overhead: CPU seconds per message.
    """

    link: LinkCost
    gamma: float
    overhead: float


def fit(cells: Sequence[Cell], cores: int = 0) -> Fit:
    """Return the non-negative constants that best predict measured calls.

    Args:
        cells: Calls with several sizes and algorithms, some of which send several messages per round.
        cores: Number of cores that the ranks of a host shared; 0 if each rank had its own core.

    Example:
        >>> fit([Cell("broadcast", "binomial", 2, n, 1e-5 + n * 1e-9) for n in (8, 65536, 1048576)]).link.beta < 1.01e-9
        True
    """
    constants: tuple[float, ...] = (10e-6, 1e-9, 0.1e-9, 0.0)
    for _ in range(_ROUNDS):
        constants = _solved([_coefficients(cell, constants, cores) for cell in cells], cells)
    alpha, beta, gamma, overhead = constants
    return Fit(LinkCost(alpha, beta), gamma, overhead)


def _solved(rows: Sequence[Sequence[float]], cells: Sequence[Cell]) -> tuple[float, ...]:
    """Return the non-negative constants whose products with `rows` are closest to the measured seconds."""
    weighted = torch.tensor(rows, dtype=torch.float64)
    weighted /= torch.tensor([[cell.seconds] for cell in cells], dtype=torch.float64)
    kept = [column for column in range(4) if weighted[:, column].any()]
    solution = torch.zeros(4, dtype=torch.float64)
    while kept:
        # Scale the columns to similar magnitudes, so that the matrix's rank is determined correctly.
        scales = weighted[:, kept].norm(dim=0)
        answer = torch.linalg.lstsq(weighted[:, kept] / scales, torch.ones(len(cells), 1, dtype=torch.float64)).solution
        if not (answer < 0).any():
            solution[kept] = answer[:, 0] / scales
            break
        del kept[int(answer.argmin())]
    return tuple(solution.tolist())


def _coefficients(cell: Cell, constants: Sequence[float], cores: int) -> list[float]:
    """Return the derivatives of a predicted time with respect to alpha, beta, gamma and overhead.

    A predicted time is piecewise linear in the constants, so near `constants` it equals the sum of each constant times
    its derivative.
    """
    algorithm = find(cell.collective, cell.algorithm)

    def seconds(alpha: float, beta: float, gamma: float, overhead: float) -> float:
        link = LinkCost(alpha, beta)
        machine = Machine(CostTable(link, link, gamma, overhead, cores=cores), cell.size)
        return predicted(algorithm, cell.size, cell.nbytes, machine)

    found = list[float]()
    here = seconds(*constants)
    for place, smallest in enumerate((1e-9, 1e-13, 1e-13, 1e-9)):
        step = max(1e-3 * constants[place], smallest)
        moved = [constant + step * (place == number) for number, constant in enumerate(constants)]
        found.append((seconds(*moved) - here) / step)
    return found
