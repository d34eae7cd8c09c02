"""Settings of a measurement, validated before the first rank starts, and a parser for message sizes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch

from unisono.collectives.algorithms import ALGORITHMS
from unisono.core.collective import FAMILIES
from unisono.core.tensors import check_reducible, parse_op
from unisono.host.network import why_no_shm
from unisono.tools.bench.peers import PEERS
from unisono.tools.bench.workload import COLLECTIVES, Workload
from unisono.transports.hierarchical import transport_named

__all__ = ["Settings", "parse_sizes", "shown_size"]

_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_DTYPES = (*_FLOATS, "int8", "int16", "int32", "int64", "uint8", "bool")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for one run of the benchmark.

    Attributes:
        collective: One of `unisono.tools.bench.COLLECTIVES`.
        backend: Unisono's backend; "auto" means shared memory, or gloo if shared memory is not available.
        ranks: Number of ranks, all on this host.
        sizes: Message sizes in bytes, counted as in nccl-tests (see `Result.nbytes`).
        dtype, op: Name of the dtype, as in torch, and name of the reduction, as in `ReduceOp`.
        algorithm: The algorithm, as passed to the collective; if None, the collective chooses.
        registered: Whether unisono's tensors are allocated with `Communicator.empty`; peers always use ordinary
            tensors.
        cold: Whether each call uses memory that is not in the processor's caches.
        against: Names of the peers (other implementations) to measure in the same run.
        seconds: Approximate time per size, for all candidates together.
        least: Minimum number of samples of each candidate.

    Raises:
        ValueError: A setting is invalid; the message lists the valid settings.
        UnavailableError: A peer in `against` is not installed; the message says how to install it.

    Example:
        >>> Settings(sizes=(8, 1024), ranks=4).workload(1024).count
        256
    """

    collective: str = "all_reduce"
    backend: str = "auto"
    ranks: int = 2
    sizes: tuple[int, ...] = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str | None = None
    registered: bool = False
    cold: bool = False
    against: tuple[str, ...] = ()
    seconds: float = 2.0
    least: int = 9

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {self.collective!r}; known: {', '.join(COLLECTIVES)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(_DTYPES)}")
        op = parse_op(self.op)
        if FAMILIES[self.collective].reduces:
            check_reducible(op, self._dtype)
        known = ["native", *ALGORITHMS[self.collective].names()]
        if self.algorithm is not None and self.algorithm not in known:
            raise ValueError(f"unknown {self.collective} algorithm {self.algorithm!r}; known: {', '.join(known)}")
        if self.chosen_backend == "nccl":
            raise ValueError("the benchmark measures tensors in this host's memory only; use shm, gloo or thread")
        transport_named(self.chosen_backend)
        if len(set(self.against)) != len(self.against):
            raise ValueError(f"{', '.join(self.against)} names a peer twice")
        for name in self.against:
            obstacle = PEERS[name].obstacle(self.workload(self.sizes[0]))
            if obstacle is not None:
                raise ValueError(obstacle)
        if self.started_by_mpi and transport_named(self.chosen_backend).in_process:
            raise ValueError(
                f"MPI's ranks are processes, but those of backend {self.backend!r} threads; use backend shm"
            )

    def _check_numbers(self) -> None:
        for name, value in (("ranks", self.ranks), ("least", self.least)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes must be positive numbers of bytes, not {self.sizes}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be a positive number, not {self.seconds}")

    @property
    def chosen_backend(self) -> str:
        """The backend, with "auto" resolved for this host."""
        if self.backend != "auto":
            return self.backend
        return "shm" if why_no_shm() is None else "gloo"

    @property
    def started_by_mpi(self) -> bool:
        """Return whether mpirun must start the ranks, because a peer in `against` does not work otherwise."""
        return any(PEERS[name].needs_mpirun for name in self.against)

    @property
    def workloads(self) -> list[Workload]:
        """Return one workload per size, or a single workload for a barrier, which has no size."""
        sizes = self.sizes[:1] if self.collective == "barrier" else self.sizes
        return [self.workload(nbytes) for nbytes in sizes]

    def workload(self, nbytes: int) -> Workload:
        """Return the workload for one size."""
        return Workload.of_bytes(self.collective, self.ranks, nbytes, self._dtype, parse_op(self.op))

    @property
    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON-serializable values."""
        return asdict(self) | {"backend": self.chosen_backend}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes in bytes from a list such as "8,4K,1M", or a range such as "8:128M:*4" or "1M:4M:+1M".

    Raises:
        ValueError: The text is neither a list nor a range; the message shows the syntax.

    Example:
        >>> parse_sizes("8,4K,1M")
        (8, 4096, 1048576)
        >>> parse_sizes("8:2K:*4")
        (8, 32, 128, 512, 2048)
    """
    if ":" not in text:
        return tuple(_bytes(part) for part in text.split(","))
    parts = text.split(":")
    if len(parts) != 3 or parts[2][:1] not in ("*", "+"):
        raise ValueError(
            f"{text!r} is not a range of sizes; pass first:last:*factor or first:last:+step, as in 8:128M:*4"
        )
    size = _bytes(parts[0])
    last = _bytes(parts[1])
    step = _bytes(parts[2][1:])
    multiplies = parts[2][0] == "*"
    if multiplies and step < 2:
        raise ValueError(f"{text!r} never ends; the factor must be at least 2")
    sizes = []
    while size <= last:
        sizes.append(size)
        size = size * step if multiplies else size + step
    if not sizes:
        raise ValueError(f"{text!r} is empty; the first size must not be larger than the last")
    return tuple(sizes)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < 1:
        raise ValueError(
            f"{text!r} is not a size; pass a positive number of bytes, with K, M or G for 1024, 1024², 1024³"
        )
    return size


def shown_size(nbytes: int) -> str:
    """Format a size in its natural unit.

    Example:
        >>> shown_size(4096), shown_size(100 << 20), shown_size(1000)
        ('4 KiB', '100 MiB', '1000 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
