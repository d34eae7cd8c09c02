"""Program that forwards packets between the hosts of a `Network`, delays each packet, and drops some.

    python network_relay.py DELAY_S LOSS SEED NAMESPACE=ADDRESS ...

The program creates a TUN device in each namespace, and writes a byte to standard output once all devices exist. A
command on standard input is a pair of bytes: a host's index, and whether to connect the host. The program answers each
command with a byte, and exits at end of input. To start fast, it does not import unisono.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

__all__ = ["Relay", "enter", "main"]

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_PR_SET_TIMERSLACK = 29
_LARGEST = 1 << 16
# Maximum number of reads from one device before due packets are delivered.
_BATCH = 32
# Maximum number of delayed packets; larger than the number of full-size packets that a 1 Gbit/s link transfers in 100
# ms.
_ROOM = 10_000


class Relay:
    """The hosts' devices, and the delayed packets.

    Args:
        delay: Delay in seconds between the sender's device and the receiver's device.
        loss: Probability that a packet is lost.
        seed: Seed for the losses.
        hosts: Namespace of each host, by address.
    """

    def __init__(self, delay: float, loss: float, seed: int, hosts: dict[str, str]) -> None:
        self._delay = delay
        self._loss = loss
        self._drawn = random.Random(seed)
        self._devices = {_device(name): number for number, name in enumerate(hosts.values())}
        self._files = list(self._devices)
        self._routes = {ipaddress.ip_address(address).packed: number for number, address in enumerate(hosts)}
        self._connected = [True] * len(hosts)
        # Delayed packets: due time, source, destination and contents.
        self._waiting: deque[tuple[float, int, int, bytes]] = deque()

    def run(self) -> None:
        """Forward packets until standard input closes."""
        waiting = self._waiting
        files = [0, *self._files]
        while True:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select(files, [], [], pause)
            for file in ready:
                if file:
                    self._take(file)
                elif not self._obey():
                    return
            self._deliver()

    def _take(self, file: int) -> None:
        source = self._devices[file]
        due = time.monotonic() + self._delay
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = os.read(file, _LARGEST)
                target = self._routes.get(packet[16:20] if packet[0] >> 4 == 4 else packet[24:40])
                if target is None:
                    # Packets to other addresses, such as the kernel's multicast announcements, arrive at random times,
                    # so they must not consume random numbers.
                    continue
                lost = self._loss and self._drawn.random() < self._loss
                if not lost and len(self._waiting) < _ROOM:
                    self._waiting.append((due, source, target, packet))

    def _deliver(self) -> None:
        waiting = self._waiting
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, target, packet = waiting.popleft()
            if self._connected[source] and self._connected[target]:
                # Drop the packet if the device is down.
                with suppress(OSError):
                    os.write(self._files[target], packet)

    def _obey(self) -> bool:
        order = os.read(0, 2)
        if order:
            self._connected[order[0]] = bool(order[1])
            os.write(1, b".")
        return bool(order)


def enter(name: str) -> None:
    """Move the calling thread to the network namespace with this name, as returned by `Network.name`."""
    with Path("/run/netns", name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _device(namespace: str) -> int:
    """Move to a namespace, and return the file descriptor of a new TUN device in it."""
    enter(namespace)
    # Imported here, because only Linux has TUN devices, and Windows has no fcntl.
    import fcntl

    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return file


def main() -> None:
    """Run the program of this module."""
    delay, loss, seed, *hosts = sys.argv[1:]
    places = [host.partition("=") for host in hosts]
    relay = Relay(float(delay), float(loss), int(seed), {address: name for name, _, address in places})
    # Packets must wait only for their delay, not for a CPU or for coalesced timers.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    os.write(1, b".")
    relay.run()


if __name__ == "__main__":
    main()
