"""Algorithms for ranks on several hosts, used by transports that know their hosts. They are not in the registry.

All have the option `sizes`: the number of ranks on each host. The ranks on a host are consecutive. In a rooted
collective, rank 0 is the root. The algorithms in `EVEN` need equally many ranks on each host.
"""

from __future__ import annotations

from unisono.collectives.algorithms.algorithm import Algorithm, AlgorithmFile
from unisono.collectives.algorithms.hosts import all_gather, all_reduce, broadcast, reduce, reduce_scatter

__all__ = ["EVEN", "FILES", "across_hosts"]

EVEN: dict[str, AlgorithmFile] = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
FILES: dict[str, AlgorithmFile] = {"all_reduce": all_reduce, "broadcast": broadcast, "reduce": reduce, **EVEN}


def across_hosts(collective: str, sizes: tuple[int, ...], *, short: bool = False) -> Algorithm | None:
    """Return the algorithm for hosts with these numbers of ranks, or None if there is none.

    Args:
        collective: Name of the collective.
        sizes: Number of ranks on each host.
        short: Whether an all_reduce is so short that the number of rounds matters more than the traffic.

    Example:
        >>> algorithm = across_hosts("broadcast", (3, 1))
        >>> algorithm.cost(size=4, numel=100)
        Cost(rounds=3, messages=3, sent=300)
        >>> across_hosts("all_gather", (3, 1)) is None
        True
    """
    file = FILES.get(collective)
    if file is None or (collective in EVEN and len(set(sizes)) > 1):
        return None
    options: dict[str, object] = {"sizes": sizes}
    if collective == "all_reduce":
        options["short"] = int(short)
    return Algorithm(collective, "hosts", file, options)
