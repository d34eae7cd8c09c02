"""The `Communicator`: one interface over whatever moves bytes between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, final, overload

import torch

from unisono.calls.caller import ANYONE
from unisono.calls.objects import Objects
from unisono.control import Cause, Control
from unisono.engine import Engine
from unisono.errors import MismatchError
from unisono.group import Group
from unisono.hosts import host_identity
from unisono.transport import Options, Transport
from unisono.wrappers.check import Checked

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Check", "Communicator"]

Check = Literal["auto", "full", "off"]
_CLOSE_S = 1.0


@final
class Communicator(Objects):
    """A group of ranks that talk to each other: point-to-point, collectives, sub-groups, objects.

    Made by `unisono.init` or `unisono.launch`, by `from_group` from a torch process group that
    someone else owns, and by `split`, `subgroup` and `dup` from another one. Ranks in every call are
    ranks of this communicator. It belongs to the thread that first uses it. After a failure that
    may have left ranks apart (all but wrong arguments) it is broken: later calls raise the first
    cause at once.

    Args:
        transport: Connected, one a rank.
        control: This rank's handle to the control plane.
        options: As given to the transport.
        check: "auto" compares before each collective what every rank is about to do; "off" never.

    Attributes:
        rank, size: Who this is, of how many.
        backend: Name of the transport, such as "gloo".
        device: Where tensors live by default.
        hosts: For each host, the ranks on it.
    """

    def __init__(self, transport: Transport, control: Control, options: Options, *, check: Check = "auto") -> None:
        if check not in ("auto", "full", "off"):
            raise ValueError(f"check must be 'auto', 'full' or 'off', not {check!r}")
        self._check = check
        self._control, self._options = control, options
        self._owner = None
        self._splits = 0
        self._closers: list[Callable[[], None]] = []
        self._parts: list[weakref.ref[Communicator]] = []
        group = transport.group
        early: list[Cause] = []
        control.join(group, lambda cause: self._told(cause, early))
        self.hosts = self._introduce(transport, group)
        if check != "off" and not transport.checks:
            transport = Checked(transport, control)
        self._engine = Engine(transport, control, options)
        for cause in early:
            self._engine.on_failure(cause)

    def _told(self, cause: Cause, early: list[Cause]) -> None:
        engine = getattr(self, "_engine", None)
        if engine is None:
            early.append(cause)
        else:
            engine.on_failure(cause)

    def _introduce(self, transport: Transport, group: Group) -> tuple[tuple[int, ...], ...]:
        """Agree with the others on what all can do; which ranks share a host."""
        mine = (host_identity(), sorted(transport.native), transport.checks, self._options.chunk_bytes, self._check)
        cards = self._control.exchange(group, "introduction", mine, self._options.timeout_s)
        for rank, card in enumerate(cards):
            if card[2:] != cards[0][2:]:
                raise MismatchError(
                    f"rank 0 was made with (checks, chunk_bytes, check) = {tuple(cards[0][2:])}, "
                    f"rank {rank} with {tuple(card[2:])}; they must be equal",
                    rank=group.rank,
                    size=group.size,
                )
        common = set(cards[0][1]).intersection(*(card[1] for card in cards))
        transport.native = frozenset(common)
        names = [card[0] for card in cards]
        return tuple(tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names))

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        check: Check = "auto",
        chunk_bytes: int = 2 << 20,
    ) -> Communicator:
        """A communicator on a torch process group that someone else owns, and that is never destroyed by us.

        Collective over the group: every member calls it. The owner may go on using the group, at
        times when the communicator does not. Sub-groups are made without `dist.new_group`.

        Args:
            group: As `dist.init_process_group` or `dist.new_group` made it; None is the default group.
            timeout: Seconds for every operation, unless it says otherwise.
            check: As for `init`.
            chunk_bytes: As for `init`.
        """
        from unisono.transports._torch_adopt import adopt

        transport, control, options, release = adopt(group, timeout, chunk_bytes)
        comm = cls(transport, control, options, check=check)
        comm.on_close(release)
        return comm

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: str | int | None = None, **options: Any) -> Communicator:
        """`from_group` of one dimension of a torch `DeviceMesh`."""
        return cls.from_group(mesh.get_group(dim), **options)

    @property
    def backend(self) -> str:
        """Name of the transport: "thread", "gloo", ..."""
        return self._options.backend

    # -- groups --------------------------------------------------------------------------------
    @overload
    def split(self, color: int, key: int = ...) -> Communicator: ...
    @overload
    def split(self, color: int | None, key: int = ...) -> Communicator | None: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A new communicator for each color, of the ranks that gave it, in the order of their keys.

        Collective over this communicator. Equal keys keep the order of ranks. `color=None` joins
        none, and gets None. Parts work at the same time as each other and as their parent.

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
        return self._split(color, key, self._check)

    def _split(self, color: int | None, key: int, check: Check) -> Communicator | None:
        self._enter("split")
        for name, value in (("color", color), ("key", key)):
            if not isinstance(value, int) and (value is not None or name == "key"):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        self._splits += 1
        group, timeout = self._engine.group, self._options.timeout_s
        wishes = self._control.exchange(group, f"split {self._splits}", (color, key), timeout)
        if color is None:
            return None
        ranks = sorted((r for r, (c, _) in enumerate(wishes) if c == color), key=lambda r: (wishes[r][1], r))
        child = group.child(f"{self._splits}.{color}", ranks)
        part = Communicator(self._plain().split(child), self._control, self._options, check=check)
        self._parts = [ref for ref in self._parts if ref() is not None] + [weakref.ref(part)]
        return part

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of these ranks of this one, in the order given; None on the others.

        Collective over this communicator: every rank calls it, with the same list.
        """
        self._enter("subgroup")
        for index, rank in enumerate(ranks):
            self._check_rank(rank, f"ranks[{index}]")
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"ranks must be different from each other, and at least one, not {list(ranks)}")
        lists = self._control.agree(
            self._engine.group, f"subgroup {self._splits + 1}", tuple(ranks), self._options.timeout_s
        )
        if lists is not None:
            quoted = "; ".join(f"rank {r}: {list(given)}" for r, given in enumerate(lists))
            raise MismatchError(f"ranks gave different lists to subgroup: {quoted}", rank=self.rank, size=self.size)
        inside = self.rank in ranks
        return self.split(0 if inside else None, key=list(ranks).index(self.rank) if inside else 0)

    def dup(self, *, check: Check | None = None) -> Communicator:
        """A second communicator of the same ranks, for another thread or library. Collective.

        Args:
            check: As for `init`; None is as this one was made. "off" is for a library that has
                agreed with all ranks on what it is going to call.
        """
        twin = self._split(0, self.rank, check or self._check)
        assert twin is not None
        return twin

    @property
    def overlaps(self) -> bool:
        """Whether an asynchronous collective goes on while the caller computes, with no thread of ours for it."""
        return self._engine.transport.overlaps

    def _plain(self) -> Transport:
        """The transport without the check that `Communicator` puts on: parts put on their own."""
        transport = self._engine.transport
        return transport.inner if isinstance(transport, Checked) else transport

    # -- life ----------------------------------------------------------------------------------
    def hand_over(self) -> None:
        """Give the communicator up: the next thread that uses it owns it."""
        self._enter("hand_over")
        self._owner = None

    def share(self) -> None:
        """Let every thread use it from now on. The caller sees to it that no two are in a collective at once."""
        self._enter("share")
        self._owner = ANYONE

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that this backend reduces best (uninitialised). Collective: the same on every rank.

        It stays valid as long as a tensor on it lives, also after `close`.
        """
        self._enter("empty")
        return self._engine.transport.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    def abort(self, reason: str = "the program asked for it") -> None:
        """End every wait on every rank with `AbortedError`, and break the communicator. From any thread."""
        if not self._engine.closed:
            cause = Cause("AbortedError", self.rank, f"rank {self.rank} aborted the communicator: {reason}")
            self._engine.on_failure(self._control.fail(self._engine.group, cause))

    def close(self) -> None:
        """Let go of everything, also of the parts made of this one. Every rank calls it when it is done.

        Waits up to a second for the others, so that nothing in flight is cut off. Again is harmless.
        """
        if self._engine.closed:
            return
        self._close(_CLOSE_S)
        for closer in self._closers:
            closer()

    def _close(self, patience: float) -> None:
        self._engine.close(patience)
        for part in self._open_parts():
            part._close(0.0)

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for this rank learns why it does not come, also in the parts made of this one."""
        self._engine.failed(error, "the program")
        for part in self._open_parts():
            part._fail(error)

    def _open_parts(self) -> list[Communicator]:
        return [part for ref in self._parts if (part := ref()) is not None and not part._engine.closed]

    def on_close(self, action: Callable[[], None]) -> None:
        """Also do this at the end of `close`; for whoever made the communicator."""
        self._closers.append(action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator {self.backend} rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator lives in one process; make one in each rank by init or launch")
