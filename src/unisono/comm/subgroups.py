"""Groups derived from a group: subgroups, duplicates, and replacements after ranks have died or joined."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, overload

from unisono import serialization
from unisono.comm.lifecycle import LifecycleMixin
from unisono.core.failure import raise_caused, to_cause
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import AbortedError, ClosedError, CommError, MismatchError
from unisono.wrappers.consistency import Checked

__all__ = ["SubgroupMixin"]


class SubgroupMixin(LifecycleMixin):
    """Creation of communicators: split and its variants, and rebuild."""

    _options: Options
    _splits: int
    _rebuilds: int

    @overload
    def split(self, color: int, key: int = ...) -> Self: ...
    @overload
    def split(self, color: int | None, key: int = ...) -> Self | None: ...
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Create a communicator for each color, of the ranks that passed it, in the order of their keys.

        Collective over this communicator. Equal keys keep the order of ranks. A rank with `color=None` joins
        none, and gets None. Subgroups can be used concurrently with each other and with their parent.

        Args:
            color: Number of the group to join; None joins none.
            key: Position among the ranks of the same color.

        Returns:
            The communicator of this rank's color; None if `color` is None.

        Raises:
            TypeError: `color` or `key` is not an int.

        Cost: two exchanges over the control plane; no torch group is registered.

        Example:
            >>> def program(comm):
            ...     half = comm.split(color=comm.rank % 2)
            ...     t = torch.tensor([comm.rank])
            ...     half.all_reduce(t)
            ...     return t.item()
            >>> un.launch(program, nprocs=4, backend="thread")
            [2, 4, 2, 4]
        """
        return self._split(color, key, self._check, self._options)

    def _split(self, color: int | None, key: int, check: Any, options: Options) -> Self | None:
        self._engine.enter("split")
        for name, value in (("color", color), ("key", key)):
            if not isinstance(value, int) and (value is not None or name == "key"):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        # It becomes a part of the name: True and 1 are one color.
        color = color if color is None else int(color)
        self._splits += 1
        group, timeout, ending = self._engine.group, self._options.timeout_s, self._engine.ending
        try:
            wishes = self._control.exchange(
                group, f"split #{self._splits}", (color, key, ending.dropped_parts()), timeout
            )
        except CommError as error:
            raise_caused(self._engine.report_failure(error, "split", self._splits), error)
        ending.release([wish[2] for wish in wishes])
        if color is None:
            return None
        ranks = sorted((r for r, wish in enumerate(wishes) if wish[0] == color), key=lambda r: (wishes[r][1], r))
        child = group.child(f"{self._splits}.{color}", ranks)
        # From now on the child group detects a lost rank, even before that rank has joined.
        self._control.join(child)
        try:
            part = self._alike(self._plain().split(child), check, options)
        except BaseException as error:
            self._control.report_failure(child, to_cause(error, child.rank, "split"))
            self._control.leave(child)
            if isinstance(error, CommError):
                error.locate(rank=child.rank, size=child.size, group=child.name, operation="split", call=self._splits)
            raise
        part._engine.set_parent(self._engine)
        self._parts = [ref for ref in self._parts if ref() is not None] + [weakref.ref(part)]
        return part

    def _alike(self, transport: Transport, check: Any, options: Options) -> Self:
        """Return a communicator like this one, on another transport."""
        make: Callable[..., Self] = type(self)
        return make(transport, self._control, options, check=check)

    def subgroup(self, ranks: Sequence[int]) -> Self | None:
        """Return a communicator of these ranks, in the order of the list; None on the other ranks.

        Collective over this communicator: every rank calls it, with the same list.

        Args:
            ranks: Different ranks of this communicator, at least one.

        Raises:
            MismatchError: Ranks passed different lists.
            ValueError: The list is empty, names a rank twice, or names one that does not exist.

        Cost: as `split`, and one exchange more.

        Example:
            >>> def program(comm):
            ...     part = comm.subgroup([2, 0])
            ...     return None if part is None else part.rank
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, None, 0]
        """
        self._engine.enter("subgroup")
        ranks = list(ranks)
        for index, rank in enumerate(ranks):
            self._check_rank(rank, f"ranks[{index}]")
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"ranks must be distinct, and at least one, not {ranks}")
        number, timeout = self._splits + 1, self._options.timeout_s
        try:
            lists = self._control.agree(self._engine.group, f"subgroup #{number}", tuple(ranks), timeout)
        except CommError as error:
            raise_caused(self._engine.report_failure(error, "subgroup", number), error)
        if lists is not None:
            quoted = "; ".join(f"rank {r}: {list(given)}" for r, given in enumerate(lists))
            differ = MismatchError(f"ranks gave different lists to subgroup: {quoted}")
            raise self._engine.with_context(differ, "subgroup", number)
        inside = self.rank in ranks
        return self._split(0 if inside else None, ranks.index(self.rank) if inside else 0, self._check, self._options)

    def dup(self, *, check: Any = None, deterministic: bool | None = None) -> Self:
        """Return a second communicator of the same ranks, for another thread or library. Collective.

        Args:
            check, deterministic: As for `init`; None is as this one was made. check="off" is for a library that has
                agreed with all ranks on what it is going to call.

        Example:
            >>> def program(comm):
            ...     with comm.dup() as second:
            ...         return second.rank == comm.rank
            >>> un.launch(program, nprocs=2, backend="thread")
            [True, True]
        """
        options = self._options if deterministic is None else replace(self._options, deterministic=deterministic)
        twin = self._split(0, self.rank, check or self._check, options)
        assert twin is not None
        return twin

    def _plain(self) -> Transport:
        """Return the transport without the check that `Communicator` adds: subgroups add their own."""
        transport = self._engine.transport
        return transport.inner if isinstance(transport, Checked) else transport

    # -- after a failure -----------------------------------------------------------------------
    def rebuild(self, *, grow: int = 0, timeout: Timeout | None = None) -> Self:
        """Return a new communicator of the remaining ranks, renumbered in their old order, and of newcomers.

        Collective over the live ranks: each calls it when a call has failed, or all at the same point of the
        program to admit newcomers. Ranks that have left, or die meanwhile, are not waited for. This
        communicator is unusable afterwards; its subgroups stay as they are. The new communicator closes
        the resources that the old one would have closed.

        Args:
            grow: Number of newcomers, by `unisono.join`, to wait for and admit; they get the last ranks.
            timeout: Time (the communicator's timeout if None) within which the others join. A live rank that has not
                joined by then (a stopped process, say) is excluded permanently, and gets `AbortedError` there.

        Raises:
            AbortedError: The other ranks continued without this rank.
            CommTimeoutError: Newcomers have not joined.
            MismatchError: Ranks passed different arguments.

        Cost: one exchange over the control plane, and the time to connect: some milliseconds on one host.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 1:
            ...         raise KeyError("this rank is gone")
            ...     try:
            ...         comm.barrier()
            ...     except un.CommError:
            ...         comm = comm.rebuild()
            ...     t = torch.ones(1)
            ...     comm.all_reduce(t)
            ...     return comm.rank, comm.size, t.item()
            >>> ends = un.launch(program, nprocs=3, backend="thread", on_failure="continue")
            >>> ends[0], ends[2]
            ((0, 2, 2.0), (1, 2, 2.0))
        """
        self._engine.own("rebuild")
        if self._engine.closed:
            raise ClosedError("the communicator is closed", rank=self.rank, size=self.size, operation="rebuild")
        if not isinstance(grow, int) or grow < 0:
            raise ValueError(f"grow must be a number of new ranks, not {grow!r}")
        deadline = time.monotonic() + resolve_timeout(timeout, self._options.timeout_s)
        made = self._attempt(grow, deadline)
        while made is None:
            made = self._attempt(grow, deadline)
        made._engine.replace(self._engine)
        made._before_close, self._before_close, self._successor = self._before_close, [], made
        self._control.leave(self._engine.group)
        return made

    def _attempt(self, grow: int, deadline: float) -> Self | None:
        """Return the new communicator; None if another rank was lost while it was created."""
        group = self._engine.group
        self._rebuilds += 1
        try:
            rebuilt = self._control.rebuild(
                group, self._rebuilds, _left(deadline), grow=grow, terms=self._terms() if grow else b""
            )
        except CommError as error:
            raise error.locate(rank=group.rank, size=group.size, operation="rebuild") from None
        # All ranks have joined, so no rank is in a call of the old communicator any more.
        self._engine.retire()
        members = rebuilt.members
        new = Group(rebuilt.name, members.index(group.members[group.rank]), members)
        try:
            return self._connected(new, deadline)
        except BaseException as error:
            self._control.report_failure(new, to_cause(error, new.rank, "rebuild"))
            self._control.leave(new)
            again = isinstance(error, CommError) and not isinstance(error, AbortedError | MismatchError)
            if not again or not _left(deadline):
                raise
            return None

    def _connected(self, new: Group, deadline: float) -> Self:
        self._control.join(new)
        transport = self._plain().reconfigure(new)
        try:
            made = self._alike(transport, self._check, self._options)
            self._control.exchange(new, "rebuilt", None, max(_left(deadline), 1.0))
        except BaseException as error:
            transport.abort(error)
            raise
        return made

    def _terms(self) -> bytes:
        """Return the terms that a newcomer needs."""
        options = self._options
        return serialization.encode(
            (options.backend, options.timeout_s, options.chunk_bytes, options.deterministic, self._check)
        )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
