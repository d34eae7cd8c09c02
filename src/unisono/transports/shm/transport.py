"""Transport between ranks of one host in shared memory: no copy into the kernel, no helper thread."""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unisono.collectives.native_calls import NativeTransport
from unisono.core.call import Fingerprint
from unisono.core.control import ControlPlane, raise_mismatch
from unisono.core.group import Group
from unisono.core.transport import Mailbox, Options
from unisono.core.types import Message, Work
from unisono.errors import ClosedError, CommError, UnavailableError
from unisono.host.native import native
from unisono.host.network import why_no_shm
from unisono.host.processors import cores
from unisono.transports.shm.barrier import SharedBarrier
from unisono.transports.shm.mailbox import ShmMailbox
from unisono.transports.shm.p2p_ring import MessageRings
from unisono.transports.shm.segment import PAGE_BYTES, map_shared, neighbours, words_of

if TYPE_CHECKING:
    from unisono.core.control import ControlPlane
from unisono.collectives.native_calls import NativeCalls, Programs, known_dtypes

__all__ = ["TRANSPORT", "ShmFastPath", "ShmTransport", "SymmetricMemory"]

_STAGE_BYTES = 1 << 20
_INFOS = 64
_INFO = struct.Struct("<?15s")
"""Entry of a rank in the first page: whether there is a spare core, and the build of the
native core, if any."""


class ShmTransport(NativeTransport):
    """Transport in shared memory of one group: a barrier, two staging buffers per rank, and rings for messages.

    Collectives are those of the native core. Without it, or without a kernel for the reduction, they are put together
    from messages. Memory of p ranks: 2 MiB for each rank and 256 KiB for each ordered pair, allocated on first
    touch, and freed with the last process; messages of any length pass through it.
    The waiting thread itself completes a call; there is no helper thread. `background` is set if each rank, when they
    connected, had a core beside those of torch's threads.
    """

    latency_s = 10e-6
    second_per_byte = 2e-10

    def __init__(self, group: Group, control: ControlPlane, options: Options, *, spare: bool) -> None:
        self.group = group
        self._control = control
        self._options = options
        module = native()
        size = group.size
        barrier = -(-(_INFOS + _INFO.size * size) // PAGE_BYTES) * PAGE_BYTES
        stages = barrier + -(-SharedBarrier.nbytes(size) // PAGE_BYTES) * PAGE_BYTES
        rings = stages + size * 2 * _STAGE_BYTES

        def mapped(descriptor: int, nbytes: int) -> mmap.mmap:
            memory = mmap.mmap(descriptor, nbytes)
            build = "" if module is None else module.BUILD
            _INFO.pack_into(memory, _INFOS + _INFO.size * group.rank, spare, build.encode()[:15])
            return memory

        steps = rings + MessageRings.nbytes(size)
        memory = map_shared(group, control, "memory", steps + MessageRings.nbytes(size), options.timeout_s, mapped)
        infos = [_INFO.unpack_from(memory, _INFOS + _INFO.size * rank) for rank in range(size)]
        self.background = all(spares for spares, _ in infos)
        with torch.inference_mode(mode=False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        words = words_of(memoryview(memory)[barrier:stages])
        self._barrier = SharedBarrier(words, data.data_ptr() + barrier, group.rank, size)
        queues = memoryview(memory)[rings:steps]
        if module is not None and _all_native([build for _, build in infos], group):
            begin = data.data_ptr()
            where = begin + barrier, begin + stages, begin + rings, begin + steps
            # Memory is unmapped when its last user is freed, so no reference cycle may contain this object.
            differ = _weak_method(self._raise_mismatch)
            cost = self.latency_s, self.second_per_byte
            self.fast_path = self.calls = calls = ShmFastPath(
                module, self._barrier, *where, _STAGE_BYTES, size > cores(), cost, queues, differ
            )
            self._rings = calls.rings
            self._symmetric = SymmetricMemory(group, control, options.timeout_s, calls.core)
        else:
            self._rings = MessageRings(self._barrier, queues, None)
            self.native = frozenset()
            self.checks = False
            # The same bits as with the core.
            self.balanced = True
        self._memory = memory

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> ShmTransport:
        obstacle = why_no_shm()
        if obstacle is not None:
            raise UnavailableError(obstacle)
        # The communicator reports failures; only members of the group can share memory.
        control.join(group)
        return cls(group, control, options, spare=cores() >= group.size * (torch.get_num_threads() + 1))

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout_s: float) -> tuple[tuple[int, ...], ...]:
        return neighbours(group, control, timeout_s)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return super().empty(shape, dtype) if self.calls is None else self._symmetric.empty(shape, dtype)

    def split(self, group: Group) -> ShmTransport:
        # The part does not know whether ranks outside it compute, too.
        return ShmTransport(group, self._control, self._options, spare=self.background)

    def mailbox(self, group: Group) -> Mailbox:
        return ShmMailbox(group, self._control, self._options.timeout_s)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        return self._rings.post(batch, self._options.timeout_s)

    def iprobe(self, peer: int, tag: int) -> bool:
        def here() -> bool:
            return self._rings.holds(peer, tag)

        found = here()
        if not found:
            self._barrier.check(here, lambda: [peer])
        return found

    def _raise_mismatch(self, mine: Fingerprint) -> NoReturn:
        """Raise the error of ranks with different signatures, quoting the call of each. All ranks raise it."""
        topic = f"mismatch in round {self._barrier.round}"
        raise_mismatch(self._control, self.group, topic, mine, self._options.timeout_s)

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        if self._barrier.broken is None:
            self._barrier.leave()

    def close(self) -> None:
        self.leave()
        self.abort(ClosedError("the communicator is closed"))

    def abort(self, cause: BaseException) -> None:
        if self._barrier.broken is None:
            self._barrier.broken = cause
            if self.calls is not None:
                self.calls.abort()
        for work in () if self._rings.idle else self._rings.pending():
            work.complete(cause)


def _all_native(builds: Sequence[bytes], group: Group) -> bool:
    """Return whether every rank has the native core; all of them, or none, use it."""
    found = {build.rstrip(b"\0").decode() for build in builds}
    if len(found - {""}) > 1:
        quoted = ", ".join(f"{build.rstrip(bytes(1)).decode() or 'none'} on rank {r}" for r, build in enumerate(builds))
        raise CommError(
            f"ranks have different builds of unisono's native core: {quoted}. Install the same build for all ranks"
        )
    without = [rank for rank, build in enumerate(builds) if not build.strip(b"\0")]
    having = set(range(group.size)) - set(without)
    if without and having and group.rank == min(having):
        text = f"rank {without[0]} has no native core, so no rank uses it, and short calls take longer"
        warnings.warn(text, stacklevel=2)
    return not without


def _weak_method(method: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return a function that calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> NoReturn:
        found = reference()
        if found is not None:
            found(*args)
        raise ClosedError("the communicator is closed")

    return call


TRANSPORT = ShmTransport


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a file by torch: Python's mmap holds a descriptor while it lives, and a process has few of these."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _remove(memory: weakref.ref[SymmetricMemory], number: int) -> None:
    """Remove a segment after its last tensor. The tensor may outlive the group, and must not keep it alive."""
    found = memory()
    if found is not None:
        found._core.remove_segment(number)


class SymmetricMemory:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` creates its own anonymous file, with one equal slice per rank; tensors at the same offset of
    every slice are reduced together. It is unmapped when the last tensor in it is freed.

    Args:
        group, control, timeout_s: The ranks that share the memory, their control plane, and their time limit.
        core: The native core, which reduces in place there.
    """

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float, core: Any) -> None:
        self._group = group
        self._control = control
        self._timeout_s = timeout_s
        self._core = core
        self._allocations = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed memory on this rank. Collective: the same shape and dtype on every rank."""
        self._allocations += 1
        self._core.expect_symmetric_memory()
        count = math.prod(shape)
        rank = self._group.rank
        size = self._group.size
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            name = f"segment {self._allocations}"
            memory = map_shared(self._group, self._control, name, stride * size, self._timeout_s, _mapped)
            rows = memory.view(size, stride)
            owner: Any = (ctypes.c_ubyte * stride).from_address(rows[rank].data_ptr())
            tensor = torch.frombuffer(owner, dtype=torch.uint8)
        owner.memory = memory
        self._core.add_segment(self._allocations, rows.data_ptr(), stride)
        # Only a tensor and its views keep their source alive.
        weakref.finalize(owner, partial(_remove, weakref.ref(self), self._allocations)).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))


class ShmFastPath(NativeCalls):
    """Native calls of one group in shared memory.

    Args:
        module: The native core.
        barrier: The counters that the core shares with Python.
        words, stages, rings, steps: Addresses of the counters, of two staging buffers per rank, of the rings of
            messages, and of those of algorithms' steps.
        stage_bytes: The length of a staging buffer.
        oversubscribed: Whether there are more ranks than processors: then a wait yields immediately.
        cost: Latency and seconds per byte of a message.
        queues: The memory of the rings.
        mismatch: Raises the error of ranks with different calls.
    """

    def __init__(
        self,
        module: Any,
        barrier: SharedBarrier,
        words: int,
        stages: int,
        rings: int,
        steps: int,
        stage_bytes: int,
        oversubscribed: bool,
        cost: tuple[float, float],
        queues: memoryview,
        mismatch: Callable[[Fingerprint], NoReturn],
    ) -> None:
        rank = barrier.rank
        size = barrier.size
        core = module.Core(words, stages, rings, steps, stage_bytes, rank, size, oversubscribed, known_dtypes())
        self.rings = MessageRings(barrier, queues, core)
        super().__init__(core, rank, size, Programs(module, rank, size, *cost), self.rings)
        self._barrier = barrier
        self._mismatch = mismatch

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """As of `FastPath`."""
        self._mismatch(fingerprint)

    def _cause(self) -> BaseException | None:
        return self._barrier.broken
