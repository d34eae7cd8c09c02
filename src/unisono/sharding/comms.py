"""The communicators of one sharded model, and their replacement after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.communicator import Communicator, engine_of
from unisono.errors import AbortedError, CommError, MismatchError, PeerLostError
from unisono.utils.replaceable_comms import ReplaceableComms

__all__ = ["LiveComms", "Mesh", "NotCopied", "ShardComms"]

Mesh = tuple[Communicator, Communicator]
"""Two communicators: `replicate`, for ranks with the same part, and `shard`, for ranks that together have one copy."""


T = TypeVar("T")


class NotCopied:
    """Base class of objects that communicate with other ranks, so that a copy of one would be out of step."""

    def __getstate__(self) -> Any:
        raise TypeError(
            "what is sharded communicates with other ranks, so it can be neither pickled nor copied. Save and load its "
            "state_dict(), or create a new one on all ranks"
        )


class LiveComms:
    """Communicators in use until a failed pass aborts them; new ones then replace them.

    Args:
        pairs: Replaceable communicator of all ranks; on a mesh, also the communicators of the replicas and of the
            shards.

    Attributes:
        data: The communicator of all ranks.
        shard: Communicator of the ranks with different parts; without a mesh, the same as `data`.
        replicate: Communicator of the ranks with the same part; None without a mesh.
        reported: Whether the communicators' failure has been raised on this rank, so that its caller knows.
    """

    def __init__(self, pairs: Sequence[ReplaceableComms]) -> None:
        self.data: Communicator = pairs[0].data
        self.shard: Communicator = pairs[-1].data
        self.replicate: Communicator | None = pairs[1].data if len(pairs) > 1 else None
        self.reported = False


class ShardComms:
    """A sharded model's communicators in use, and the base communicators from which they are recreated.

    A rank that fails mid-step aborts the communicators in use, so that no other rank waits for it; all ranks replace
    these communicators at the start of their next step. When a step is aborted, another rank may still be running the
    previous optimizer step, or constructing its optimizer. An optimizer's construction and steps therefore use `base`,
    which a failed pass does not abort.

    Args:
        comm: Communicator of the ranks that share the model. Construction is collective.
        mesh: Communicators of replicas and of shards. If None, all ranks have different parts.

    Attributes:
        live: The communicators in use.
        base, shard_base: Like `live.data` and `live.shard`, but never aborted by a failed pass.
        rank, size: Rank and size of `shard_base`.
        replica: This rank's index among the ranks with the same part; 0 without a mesh.

    Raises:
        ValueError, MismatchError: Raised on every rank if the mesh does not consist of the ranks of `comm`.
    """

    def __init__(self, comm: Communicator, mesh: Mesh | None = None) -> None:
        self._pairs: list[ReplaceableComms] = []
        self.move_to(comm, mesh)

    def move_to(self, comm: Communicator, mesh: Mesh | None = None) -> None:
        """Continue with the ranks of another communicator. Collective over the new communicator."""
        self.close()
        self._pairs = [ReplaceableComms(comm)]
        self.base: Communicator = self._pairs[0].base
        try:
            # Check the mesh before duplicating its communicators: `dup` is collective, so ranks whose groups do not
            # form a grid would wait for each other.
            _check_mesh(self.base, mesh)
        except BaseException:
            self.close()
            raise
        # `LiveComms` expects this order: replicas, then shards.
        self._pairs += map(ReplaceableComms, mesh or ())
        self.shard_base: Communicator = self._pairs[-1].base
        self.replica: int = 0 if mesh is None else mesh[0].rank
        self.rank: int = self.shard_base.rank
        self.size: int = self.shard_base.size
        self.live: LiveComms = LiveComms(self._pairs)

    def aborts(self) -> dict[str, Callable[[str], None]]:
        """Return the names of the groups in which a rank may wait for others, each with the function that aborts it."""
        return {name: abort for pair in self._pairs for name, abort in pair.aborts().items()}

    def abort(self, reason: str) -> None:
        """Abort the current step on all ranks, because of an error raised on this rank."""
        self.live.reported = True
        # Abort all groups, because another rank may wait for this rank in any of them.
        for pair in self._pairs:
            pair.abort(reason)

    def abort_all(self, reason: str) -> None:
        """Abort the current step and all later steps on all ranks."""
        for pair in self._pairs:
            pair.abort_all(reason)

    def fail_step(self, error: BaseException) -> None:
        """Abort everything on all ranks: an optimizer failed on this rank, and others may have updated their parts."""
        self.abort_all(
            f"optimizer.step() failed there: {type(error).__name__}: {error}. Ranks may have made different steps: "
            "load a checkpoint into new objects"
        )

    def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that uses the current communicators, and return its result.

        On a mesh, an error in one group aborts all groups, because ranks of other groups would wait for this rank. The
        error that started the abort is raised, with ranks numbered as in `data`, not as in the group.
        """
        try:
            return call(*args, **kwargs)
        except CommError as error:
            live = self.live
            # On a mesh, ranks outside the failed group do not know of the failure, so abort all groups.
            if live.replicate is not None:
                self.abort(f"{type(error).__name__}: {error}")
            # Read the cause after the abort, which has given `data` the failed group's error unless `data` itself had
            # failed.
            cause = live.data.exception()
            live.reported = cause is not None
            if live.replicate is not None and isinstance(error, AbortedError | PeerLostError) and cause is not None:
                raise cause from error
            raise

    def replace(self) -> None:
        """Replace the failed communicators in use. Collective."""
        for pair in self._pairs:
            pair.replace()
        # Assign `live` last: if a replacement fails, it keeps the failed communicators, and the next step tries again.
        self.live = LiveComms(self._pairs)

    def close(self) -> None:
        """Release all communicators. Idempotent."""
        for pair in self._pairs:
            pair.close()


_Place = tuple[str, int, int]
"""Name of a group, this rank's number in the group, and the group's size."""


def _check_mesh(comm: Communicator, mesh: object) -> None:
    """Raise on every rank unless the mesh's groups are the rows and columns of a grid of all ranks. Collective."""
    # If this rank's mesh is invalid, gather a description of it instead of raising: a rank that raised alone would
    # leave the other ranks waiting.
    gathered: list[tuple[_Place, _Place] | str | None] = comm.all_gather_object(_places_of(mesh))
    if all(each is None for each in gathered):
        return
    if None in gathered:
        other = next(rank for rank, each in enumerate(gathered) if each is not None)
        raise MismatchError(
            f"rank {gathered.index(None)} passed no mesh, and rank {other} did. All ranks must pass one",
            rank=comm.rank,
            size=comm.size,
            peer=gathered.index(None),
        )
    problem = _mesh_problem(gathered)
    if problem is not None:
        raise ValueError(f"{problem}. Pass mesh=(replicate, shard), two communicators that divide the ranks of comm")


def _places_of(mesh: object) -> tuple[_Place, _Place] | str | None:
    """Return this rank's positions in the groups of a mesh, or text that describes an invalid mesh."""
    if mesh is None:
        return None
    if isinstance(mesh, tuple | list) and len(mesh) == 2 and all(isinstance(comm, Communicator) for comm in mesh):
        replicate, shard = ((engine_of(c).group.name, c.rank, c.size) for c in mesh)
        return replicate, shard
    parts = ", ".join(type(part).__name__ for part in mesh) if isinstance(mesh, tuple | list) else type(mesh).__name__
    return f"({parts})"


def _mesh_problem(gathered: list[tuple[_Place, _Place] | str | None]) -> str | None:
    """Return the reason why the ranks' positions do not form a grid; None if they do."""
    places: dict[object, int] = {}
    groups: dict[object, tuple[str, int]] = {}
    for rank, each in enumerate(gathered):
        if each is None or isinstance(each, str):
            return f"mesh is {each} on rank {rank}"
        (row, replica, replicas), (column, part, parts) = each
        if replicas * parts != len(gathered):
            return f"mesh has {replicas} x {parts} ranks on rank {rank}, and comm has {len(gathered)} ranks"
        first = places.setdefault((replica, part), rank)
        if first != rank:
            return f"ranks {first} and {rank} have the same place ({replica}, {part}) in mesh"
        # Compare the groups' names as well as their sizes and ranks. Otherwise, groups that are not rows and columns of
        # one grid would be accepted.
        for kind, name in ((("shard", replica), column), (("replicate", part), row)):
            known, other = groups.setdefault(kind, (name, rank))
            if known != name:
                return (
                    f"ranks {other} and {rank} have the same rank in one group of mesh, and differ in the {kind[0]} one"
                )
    return None
