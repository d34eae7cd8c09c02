"""Part of `GradientAverager`: logical shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.gradients.averager_passes import AveragerPasses

__all__ = ["AveragerShards"]


class AveragerShards(AveragerPasses):
    """Base of `GradientAverager`: its logical shards."""

    @property
    def shards(self) -> range:
        """The numbers of this rank's logical shards; one for each rank, without the argument of this name."""
        return range(self.rank, self.rank + 1) if self._shards is None else self._shards.local

    @contextmanager
    def shard(self, number: int) -> Iterator[None]:
        """Return a context for the backward passes of one logical shard: `with averager.shard(number):`.

        Each rank runs each of its `shards` once a step, in any order. When the last one ends, each `p.grad` is the
        mean over all shards: their sum in one balanced binary tree over the shards, in which the first half is the
        longer one, each addition rounded in the parameter's dtype. So the bits depend neither on the number of ranks
        nor on the backend, if what each shard computes does not either: torch's version, kernels and number of
        threads, and the shape of its batch.

        Args:
            number: The shard, one of `shards`; the same data has the same number on any number of ranks.

        Raises:
            ValueError: The shard is not one of this rank, or was run in this step already.
            RuntimeError: From `backward()`: it runs outside of a shard.

        Cost: no overlap with the backward pass; up to log2(s) + 1 copies of the gradients for s shards a rank. One
        all_reduce of the gradients if the number of ranks is a power of two or the number of shards, else an
        all_gather of up to 2 log2(s) gradients from each rank.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(3, 1, bias=False)
            ...     torch.nn.init.ones_(model.weight)
            ...     averager = un.GradientAverager(model, comm, shards=4)
            ...     for number in averager.shards:
            ...         x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
            ...         with averager.shard(number):
            ...             model(x).square().mean().backward()
            ...     return model.weight.grad.tolist()
            >>> un.launch(program, 1, "thread")[0] == un.launch(program, 4, "thread")[3]
            True
        """
        if self._shards is None:
            raise RuntimeError("this averager has no logical shards; create it with shards=their number")
        with self._shards.shard(number):
            yield
        if not self._shards.unfinished:
            self._steps[-1] += 1
            if self._sync_buffers:
                self._share_buffers()

    def _refuse_shards(self, what: str) -> None:
        if self._shards is not None:
            raise RuntimeError(f"an averager with logical shards has no {what}")
