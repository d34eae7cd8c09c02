"""Transport between ranks on one host through shared memory, without helper threads or copies into the kernel."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unisono.collectives.native_calls import NativeCalls, NativeTransport, Programs, check_builds, known_dtypes
from unisono.core.call import Fingerprint
from unisono.core.control import ControlPlane, raise_mismatch
from unisono.core.group import Group
from unisono.core.transport import FastPath, Mailbox, Options
from unisono.core.types import Message, Work
from unisono.errors import ClosedError, UnavailableError
from unisono.host.native import core_build, native
from unisono.host.network import why_no_shm
from unisono.host.processors import cores
from unisono.transports.shm.mailbox import ShmMailbox
from unisono.transports.shm.messages import ShmMessages
from unisono.transports.shm.segment import PAGE_BYTES, map_shared, neighbours

if TYPE_CHECKING:
    from unisono._native import Core

__all__ = ["TRANSPORT", "ShmFastPath", "ShmTransport"]


class ShmTransport(NativeTransport):
    """One group's transport: shared memory with counters, two staging buffers per rank, and rings for messages.

    Collectives run in the native core. Reductions for which the core has no kernel are run by algorithms that exchange
    messages. Each call is completed by the thread that waits for it. Memory: 2 MiB per rank and 256 KiB per ordered
    pair of ranks, regardless of message lengths, allocated on first touch and freed when the last process exits.

    Args:
        group, control, options: Arguments of `connect`.
        background: Whether each rank has a spare processor, besides those for torch's threads.
    """

    calls: ShmFastPath
    latency_s: float = 10e-6
    second_per_byte: float = 2e-10

    def __init__(self, group: Group, control: ControlPlane, options: Options, *, background: bool) -> None:
        self.group = group
        self._control = control
        self._options = options
        self.background = background
        module = native()
        assert module is not None
        rank = group.rank
        size = group.size
        # `map_shared` uses the first page to prove that the ranks share a host.
        nbytes = PAGE_BYTES + module.Core.nbytes(size)
        memory = map_shared(group, control, "memory", nbytes, options.timeout_s, mmap.mmap)
        # With more ranks than processors, a waiting rank yields immediately instead of spinning. Keep the core and this
        # object out of reference cycles, because the memory remains mapped as long as the core exists.
        core = module.Core(memoryview(memory)[PAGE_BYTES:], rank, size, size > cores(), known_dtypes())
        programs = Programs(module, rank, size, self.latency_s, self.second_per_byte)
        self.calls = ShmFastPath(core, group, control, options.timeout_s, programs)
        self.fast_path: FastPath | None = self.calls
        self._messages = self.calls.messages
        self._allocations = 0

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> ShmTransport:
        # Join the group without a failure callback: at first, the membership serves only to exchange values. The
        # communicator joins again, with a callback.
        control.join(group)
        spare = cores() >= group.size * (torch.get_num_threads() + 1)
        mine = why_no_shm(), core_build(), spare
        obstacles, builds, spares = zip(*control.exchange(group, "surroundings", mine, options.timeout_s), strict=True)
        for rank, obstacle in enumerate(obstacles):
            if obstacle is not None:
                raise UnavailableError(f"rank {rank}: {obstacle}")
        check_builds("shm", builds)
        return cls(group, control, options, background=all(spares))

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout_s: float) -> tuple[tuple[int, ...], ...]:
        return neighbours(group, control, timeout_s)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor in new symmetric memory, in which all_reduce works in place, without copies.

        Collective, with the same shape and dtype on every rank. Each call creates its own anonymous file, with one
        equal slice per rank; tensors at the same offset of every slice are reduced together. The file is unmapped when
        the last tensor in it is freed.
        """
        core = self.calls.core
        self._allocations += 1
        core.expect_symmetric_memory()
        count = math.prod(shape)
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            name = f"segment {self._allocations}"
            memory = map_shared(self.group, self._control, name, stride * self.size, self._options.timeout_s, _mapped)
            rows = memory.view(self.size, stride)
            owner: Any = (ctypes.c_ubyte * stride).from_address(rows[self.rank].data_ptr())
            tensor = torch.frombuffer(owner, dtype=torch.uint8)
        owner.memory = memory
        core.add_segment(self._allocations, rows.data_ptr(), stride)
        # `owner` lives as long as the tensor and its views, so its finalizer runs when the last of them is freed.
        weakref.finalize(owner, _remove, weakref.ref(self), self._allocations).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def split(self, group: Group) -> ShmTransport:
        # Keep the parent's `background`: a subgroup cannot tell whether ranks outside it need the processors.
        return ShmTransport(group, self._control, self._options, background=self.background)

    def reconfigure(self, group: Group) -> ShmTransport:
        # Connect anew, because new ranks may have a different build of the native core, or fewer processors.
        return self.connect(group, self._control, self._options)

    def mailbox(self, group: Group) -> Mailbox:
        return ShmMailbox(group, self._control, self._options.timeout_s)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        return self._messages.post(batch, self._options.timeout_s)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self._messages.holds(peer, tag)

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        if self._messages.broken is None:
            self.calls.core.leave()

    def close(self) -> None:
        self.leave()
        self.abort(ClosedError("the communicator is closed"))

    def abort(self, cause: BaseException) -> None:
        if self._messages.broken is None:
            self._messages.abort(cause)


TRANSPORT = ShmTransport


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a file with torch, because Python's mmap would keep a descriptor open, and descriptors are limited."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _remove(transport: weakref.ref[ShmTransport], number: int) -> None:
    """Remove a segment whose last tensor has been freed. Tensors may outlive the group, but must not keep it alive."""
    found = transport()
    if found is not None:
        found.calls.core.remove_segment(number)


class ShmFastPath(NativeCalls):
    """One group's native calls in shared memory.

    Args:
        core: The native core.
        group, control, timeout_s: The ranks, their control plane, and their time limit in seconds.
        programs: The steps of each algorithm, in the native core's format.
    """

    core: Core

    def __init__(self, core: Core, group: Group, control: ControlPlane, timeout_s: float, programs: Programs) -> None:
        self.messages: ShmMessages = ShmMessages(group.rank, core)
        super().__init__(core, group.rank, group.size, programs, self.messages)
        self._group = group
        self._control = control
        self._timeout_s = timeout_s

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Implement `FastPath`."""
        topic = f"mismatch in round {self.core.round}"
        raise_mismatch(self._control, self._group, topic, fingerprint, self._timeout_s)

    def _cause(self) -> BaseException | None:
        return self.messages.broken
