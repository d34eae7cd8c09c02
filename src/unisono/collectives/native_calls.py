"""Collectives in a native core: each collective is one native call, on single tensors or lists in any layout."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import xxhash

from unisono.collectives.algorithms import ALGORITHMS, find
from unisono.collectives.algorithms.hosts import EVEN, across_hosts
from unisono.collectives.executor import Schedule, ScratchPool, encoded
from unisono.collectives.selection import Needs, cheapest, serves
from unisono.core.call import Call, Fingerprint, hash_of
from unisono.core.collective import FAMILIES, Collective
from unisono.core.failure import connection_error, left_error
from unisono.core.numbers import Status
from unisono.core.staging import ACCELERATORS
from unisono.core.tensors import as_flat, copy_back
from unisono.core.transport import Transport
from unisono.core.types import MAX_TAG, PointToPoint, ReduceOp, Work
from unisono.core.work import Deferred, missing_ranks_error
from unisono.errors import CommError, UnavailableError
from unisono.host.native import NativeCore

if TYPE_CHECKING:
    from unisono._native import Core, Outcome, Program, TcpCore

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "MessageEnds",
    "NativeCalls",
    "NativeTransport",
    "Programs",
    "check_builds",
    "known_dtypes",
    "memory_of",
]

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}
"""Numbers of dtypes, the same on all ranks. The native core's constructor receives `known_dtypes()` in this order."""

_OPS = (str, ReduceOp)
_SHORT_BYTES = 64 << 10
"""Traffic per host up to which the number of rounds of an all_reduce matters more than the traffic."""


class Programs:
    """Cache of algorithms' steps in the native core's format.

    Args:
        module: The native core.
        rank, size: This rank, and the number of ranks.
        latency_s, second_per_byte: Latency of a message in seconds, and seconds per byte.
        hosts: Each host's ranks, if messages between hosts cost more than others; empty if they don't.

    Attributes:
        ops, families: The core's numbers for reduce operations and for collectives, by name.
        default: Empty program, with which the core chooses the steps itself.
    """

    def __init__(
        self,
        module: NativeCore,
        rank: int,
        size: int,
        latency_s: float,
        second_per_byte: float,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._module = module
        self._hosts = hosts
        self.ops: dict[str, int] = module.REDUCE_OPS
        self.families: dict[str, int] = module.COLLECTIVES
        self._names = {number: name for name, number in self.families.items()}
        self._rounded = {self.ops[op] for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)}
        self._rank = rank
        self._size = size
        self._cost = latency_s, second_per_byte
        self._scratch = ScratchPool()
        self._made: dict[tuple[Schedule, str], Program] = {}
        self._known: dict[tuple[int, int, int, str], Program | None] = {}
        self.default: Program = module.Program([], 0, size, 0)

    def cheapest(self, number: int, op: int, dtype: int, root: int, nbytes: int) -> Program:
        """Return the steps of the cheapest algorithm for calls of up to `nbytes`.

        Args:
            number, op, dtype, root: The core's numbers for the collective, operation and dtype, and the root or -1.
            nbytes: Size of the whole message in bytes.
        """
        if self._hosts and (program := self._across_hosts(self._names[number], max(0, root), nbytes)) is not None:
            return program
        inexact = bool(dtype) and (DTYPES[dtype - 1].is_floating_point or DTYPES[dtype - 1].is_complex)
        needs = Needs(
            self._names[number], self._size, inexact and op in self._rounded, balanced=False, rotated=root > 0
        )
        return self._made_of(needs, root, cheapest(needs, nbytes, *self._cost))

    def _across_hosts(self, collective: str, root: int, nbytes: int) -> Program | None:
        """Return the steps of an algorithm for several hosts, with ranks numbered host by host, the root first."""
        hosts = sorted(self._hosts, key=lambda ranks: root not in ranks)
        order = [rank for ranks in hosts for rank in sorted(ranks, key=lambda rank: rank != root)]
        sizes = tuple(map(len, hosts))
        short = nbytes * (len(hosts) - 1) <= _SHORT_BYTES
        found = across_hosts(collective, order.index(self._rank), sizes, short=short)
        if found is None:
            return None
        chunks, steps = found
        # The core numbers the ranks' parts starting with the root's, also in an all_gather that is half of a rooted
        # call.
        parts = [(rank - root) % self._size for rank in order] if collective in EVEN else ()
        number = xxhash.xxh3_64_intdigest(f"hosts {sizes} {chunks}".encode())
        return self._module.Program(encoded(steps, order, parts), chunks, self._size, number)

    def named(self, number: int, op: int, root: int, label: str) -> Program | None:
        """Return the steps of the algorithm with this name, or None if the call must use the general path."""
        key = number, op, root, label
        if type(label) is not str:
            return None
        if key not in self._known:
            needs = Needs(self._names[number], self._size, op in self._rounded, balanced=False, rotated=root > 0)
            known = label.partition(":")[0] in ALGORITHMS[needs.collective]
            fits = known and serves(label, needs, uneven=True)
            self._known[key] = self._made_of(needs, root, label) if fits else None
        return self._known[key]

    def _made_of(self, needs: Needs, root: int, label: str) -> Program:
        algorithm = find(needs.collective, label)
        return self.of(Schedule(algorithm, self._rank, self._size, max(0, root), 0, self._scratch), label)

    def of(self, schedule: Schedule, label: str) -> Program:
        """Return the steps of a schedule, whose algorithm is named `label`."""
        if (schedule, label) not in self._made:
            number = xxhash.xxh3_64_intdigest(label.encode())
            self._made[schedule, label] = self._module.Program(schedule.numbers(), schedule.chunks, self._size, number)
        return self._made[schedule, label]


class MessageEnds(Protocol):
    """Interface to those messages of a rank that are moved by Python instead of the native core.

    Attributes:
        lock: Lock to hold while moving bytes.
        idle: Whether Python has no message in flight, so that the core may move the next message.
        held: Whether the core is moving a message now.
    """

    lock: threading.RLock
    idle: bool
    held: bool

    def has_read(self, peer: int, tag: int) -> bool:
        """Return whether Python may already have read the next message with this tag, at least in part."""
        ...


class NativeCalls(ABC):
    """Native collectives for one group. Refuses calls that the core does not support; these use the general path.

    Args:
        core: The native core.
        rank, size: This rank, and the number of ranks.
        programs: The steps of each algorithm, as the native core reads them.
        messages: Messages that Python moves, with which the core's messages must not interfere; None if the core moves
            no messages.
    """

    def __init__(
        self, core: Core | TcpCore, rank: int, size: int, programs: Programs, messages: MessageEnds | None = None
    ) -> None:
        self.core = core
        self._rank = rank
        self._size = size
        self._programs = programs
        self._ops = programs.ops
        self._families = programs.families
        self._messages = messages

    # -- calls with the caller's arguments -----------------------------------------------------------
    def try_collective(
        self,
        collective: Collective,
        output: Any,
        input: Any,
        op: Any,
        root: Any,
        algorithm: str | None,
        deadline: float,
    ) -> Status:
        """Implement `FastPath`."""
        if collective.root is not None and not (type(root) is int and 0 <= root < self._size):
            return Status.UNSUPPORTED
        number = self._families[collective.family]
        operation = 0
        root = -1 if root is None else root
        if collective.reduces:
            operation = self._ops.get(op, 0) if type(op) in _OPS else 0
            if not operation:
                return Status.UNSUPPORTED
        programs = self._programs
        steps = programs.default if algorithm is None else programs.named(number, operation, root, algorithm)
        if steps is None:
            return Status.UNSUPPORTED
        if not collective.moves:
            return self._ended(self.core.call(number, self._ops["bor"], 0, root, 0, 0, 0, 0, deadline, steps))
        sides = self._single if collective.packed or collective.in_place else self._lists
        return sides(collective, output, input, number, operation, root, steps, deadline)

    def _single(
        self,
        collective: Collective,
        output: Any,
        input: Any,
        number: int,
        operation: int,
        root: int,
        steps: Program,
        deadline: float,
    ) -> Status:
        # In a broadcast, the root only reads its tensor; in a reduce, every other rank only reads its tensor.
        written = root < 0 or (self._rank == root) == (collective.root == "dst")
        target = as_flat(output, collective.output, written=written)
        address = 0
        count = 0
        if target is None:
            return Status.UNSUPPORTED
        if collective.packed:
            source = as_flat(input, collective.input)
            if source is None or source.dtype is not target.dtype:
                return Status.UNSUPPORTED
            # Check that each rank's part consists of whole rows, because the core only checks the lengths of parts.
            if collective.pairwise and not (
                input.dim() and output.dim() and input.shape[0] % self._size == 0 == output.shape[0] % self._size
            ):
                return Status.UNSUPPORTED
            address = source.data_ptr()
            count = source.numel()
        dtype = DTYPE_CODES[target.dtype]
        into = target.data_ptr()
        written_count = target.numel()
        failure = self.core.call(number, operation, dtype, root, into, written_count, address, count, deadline, steps)
        if target is not output and written and failure is None:
            copy_back(output, target)
        return Status.OK if failure is None else self._ended(failure)

    def _lists(
        self,
        collective: Collective,
        output: Any,
        input: Any,
        number: int,
        operation: int,
        root: int,
        steps: Program,
        deadline: float,
    ) -> Status:
        dtype = None
        flats = list[tuple[list[torch.Tensor], Sequence[torch.Tensor]]]()
        for given, many, name, written in (
            (output, collective.gathers, collective.output, True),
            (input, collective.scatters, collective.input, False),
        ):
            tensors = (given,) if not many else () if given is None and collective.root is not None else given
            if type(tensors) not in (tuple, list):
                return Status.UNSUPPORTED
            flat: list[torch.Tensor] = []
            for index, tensor in enumerate(tensors):
                found = as_flat(tensor, name, index if many else None, written=written)
                if found is None or (dtype is not None and found.dtype is not dtype):
                    return Status.UNSUPPORTED
                dtype = found.dtype
                flat.append(found)
            flats.append((flat, tensors))
        if dtype is None:
            return Status.UNSUPPORTED
        code = DTYPE_CODES[dtype]
        (targets, outputs), (sources, _) = flats
        memory = *memory_of(targets), *memory_of(sources)
        failure = self.core.call_lists(number, operation, code, root, *memory, True, deadline, steps)
        if failure is None:
            for tensor, result in zip(outputs, targets, strict=True):
                if result is not tensor:
                    copy_back(tensor, result)
        return self._ended(failure)

    # -- blocking messages ---------------------------------------------------------------------------
    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Implement `FastPath`. Returns True only while no other messages are in flight."""
        return (
            self._messages is not None
            and self._messages.idle
            and type(peer) is int
            and 0 <= peer < self._size
            and peer != self._rank
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and isinstance(tensor, torch.Tensor)
        )

    def try_message(self, name: str, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> Status:
        """Implement `FastPath`. Refuses a receive if the next message does not match it."""
        messages = self._messages
        receives = name == "recv"
        flat = as_flat(tensor, "tensor", written=receives)
        if flat is None or messages is None:
            return Status.UNSUPPORTED
        move = self.core.receive if receives else self.core.send
        with messages.lock:
            # Check again: another thread may have begun a message since `takes` was called.
            if not messages.idle or (receives and messages.has_read(peer, tag)):
                return Status.UNSUPPORTED
            messages.held = True
            try:
                failure = move(peer, tag, DTYPE_CODES[flat.dtype], flat.data_ptr(), flat.numel(), deadline)
            finally:
                messages.held = False
        if receives and flat is not tensor and failure is None:
            copy_back(tensor, flat)
        return self._ended(failure)

    # -- calls of the general path -------------------------------------------------------------------
    def _codes_of(self, call: Call) -> tuple[int, int]:
        """Return the core's numbers for a call's operation and dtype; each is 0 if the call has none."""
        tensors = call.inputs or call.outputs
        op = ReduceOp.AVG if call.average else call.op
        return 0 if op is None else self._ops[op], DTYPE_CODES[tensors[0].dtype] if tensors else 0

    def carries(self, call: Call) -> bool:
        """Return whether `carry` supports a call. Any algorithm will do, but a reduction needs a kernel in the core."""
        if not (call.steps is None or isinstance(call.steps, Schedule)):
            return False
        return call.op is None or not call.inputs or bool(self.core.has_kernel(*self._codes_of(call)))

    def carry(self, call: Call, deadline: float) -> None:
        """Run a call that takes the general path, with its `steps`, or with the core's own steps if `steps` is None."""
        number = self._families[call.name]
        codes = self._codes_of(call)
        root = -1 if call.root is None else call.root
        memory = *memory_of(call.outputs), *memory_of(call.inputs)
        if call.steps is None:
            failure = self.core.call_lists(number, *codes, root, *memory, False, deadline, self._programs.default)
        else:
            assert isinstance(call.steps, Schedule)
            program = self._programs.of(call.steps, call.fingerprint.algorithm or "")
            lengths = list(call.lengths)
            failure = self.core.call_program(program, number, *codes, root, *memory, lengths, deadline)
        self.check(failure, call.fingerprint)

    def compare(self, fingerprint: Fingerprint, deadline: float, *, shapes: bool = False) -> None:
        """Compare all ranks' calls in separate rounds that carry no data; return when all are known to match."""
        counts = [*fingerprint.sends, *fingerprint.receives]
        digest = hash_of(fingerprint.compared(shapes=shapes)[1:])
        self.check(self.core.compare(digest, counts, deadline), fingerprint)

    def check(self, failure: Outcome | None, fingerprint: Fingerprint) -> None:
        """Raise the error of a call that took the general path and failed. Do nothing if the call succeeded."""
        ended = self._ended(failure)
        if ended is Status.MISMATCH:
            self.mismatch(fingerprint)
        if ended is Status.UNSUPPORTED:
            raise RuntimeError(f"the native core refused the tensors of a {fingerprint.operation}")

    # -- outcomes ------------------------------------------------------------------------------------
    @abstractmethod
    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Implement `FastPath`."""

    @abstractmethod
    def _cause(self) -> BaseException | None:
        """Return the error that ended the waits, or None."""

    def _late(self, waited_s: float, missing: int) -> CommError:
        """Return the error for a call whose wait for a rank timed out."""
        return missing_ranks_error(waited_s, [missing])

    def abort(self) -> None:
        """End every current and later wait. May be called from any thread."""
        self.core.abort()

    def _ended(self, failure: Outcome | None) -> Status:
        """Return the status of a call that ended, or raise its error."""
        if failure is None:
            return Status.OK
        status = failure.status
        missing = failure.missing
        if status in (Status.UNSUPPORTED, Status.MISMATCH):
            return Status(status)
        if status == Status.TIMEOUT:
            raise self._late(failure.waited_s, missing)
        if status == Status.PEER_LEFT:
            raise left_error(missing)
        if status == Status.PEER_LOST:
            raise connection_error(missing)
        if status == Status.ABORTED and (cause := self._cause()) is not None:
            raise cause
        raise RuntimeError(f"the native core ended a call with status {status}")


class NativeTransport(Transport):
    """Transport whose collectives run in a native core, on contiguous memory, with any algorithm."""

    native: frozenset[str] = frozenset(FAMILIES)
    any_source = checks = True
    devices: frozenset[str] = ACCELERATORS | {"cpu"}
    host_staged = ACCELERATORS
    calls: NativeCalls

    def supports(self, call: Call) -> bool:
        return not call.lengths and self.calls.carries(call)

    def compare(self, call: Call, deadline: float) -> None:
        """Compare all ranks' calls in a separate round if the core cannot run the call, or if it is in a backward pass.

        The core itself compares all other calls, in their first round.
        """
        if call.fingerprint.adjoint_of is not None or not self.calls.carries(call):
            self.calls.compare(call.fingerprint, deadline)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if not self.calls.carries(call):
            return super().run(call, over)
        return Deferred(partial(self.calls.carry, call), call.timeout)


def check_builds(backend: str, builds: Sequence[str]) -> None:
    """Raise an error unless all ranks have the same build of the native core.

    Args:
        backend: Name of the backend that needs the core.
        builds: Identifier of each rank's build; empty for a rank without a core.

    Raises:
        UnavailableError: A rank has no native core.
        CommError: Ranks have different builds of the native core.
    """
    if "" in builds:
        raise UnavailableError(
            f"backend {backend!r} needs unisono's native core, which rank {builds.index('')} has not: install a wheel, "
            "or a C++ compiler before unisono; or use backend 'gloo'"
        )
    if len(set(builds)) > 1:
        quoted = ", ".join(f"{build} on rank {rank}" for rank, build in enumerate(builds))
        raise CommError(f"ranks have different builds of unisono's native core: {quoted}. Install the same for all")


def known_dtypes() -> list[tuple[str, int]]:
    """Return the names of all dtypes and their sizes in bytes, in the order of `DTYPE_CODES`."""
    return [(str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in DTYPES]


def memory_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return tensors' addresses and element counts. Uses a loop: comprehensions are function calls in Python 3.11."""
    addresses = []
    counts = []
    for tensor in tensors:
        addresses.append(tensor.data_ptr())
        counts.append(tensor.numel())
    return addresses, counts
