"""Hostile bytes on the control port of a job that runs: refused without an answer, and the job goes on."""

from __future__ import annotations

import socket
import struct
import threading
from random import Random

import pytest
import torch
from insides import control_of

import unisono as un
from unisono.control.sockets import HELLO_BYTES, Hello
from unisono.core.frames import FrameChannel, Kind
from unisono.testing import pool

_SOON_S = 10.0
_RESET = struct.pack("ii", 1, 0)


def random_bytes(peer: socket.socket, draw: Random) -> None:
    peer.sendall(draw.randbytes(draw.choice((1, 39, 40, 41, 500, 100_000))))


def half_a_hello(peer: socket.socket, draw: Random) -> None:
    peer.sendall(Hello(b"a guess", client=True).hello[: draw.randrange(HELLO_BYTES)])


def a_guess(peer: socket.socket, draw: Random) -> None:
    greeting = Hello(draw.randbytes(32), client=True)
    peer.sendall(greeting.hello)
    greeting.meet(peer.recv(HELLO_BYTES))
    peer.sendall(greeting.proof())


def a_huge_frame(peer: socket.socket, draw: Random) -> None:
    peer.sendall(Hello(b"a guess", client=True).hello + b"\xff" * 4 + draw.randbytes(200_000))


def a_browser(peer: socket.socket, draw: Random) -> None:
    peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)


def a_frame_without_a_proof(peer: socket.socket, draw: Random) -> None:
    peer.sendall(FrameChannel().encode(draw.choice([*Kind]), draw.randbytes(draw.choice((0, 60, 5000)))))


def a_reset(peer: socket.socket, draw: Random) -> None:
    half_a_hello(peer, draw)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


ATTACKS = (random_bytes, half_a_hello, a_guess, a_huge_frame, a_browser, a_frame_without_a_proof, a_reset)


def heard(peer: socket.socket) -> int:
    """Return the number of bytes received before the connection ends."""
    total = 0
    try:
        peer.settimeout(_SOON_S)
        peer.shutdown(socket.SHUT_WR)
        while more := peer.recv(4096):
            total += len(more)
    except OSError:
        return total
    return total


def attack(address: tuple[str, int], count: int, told: list[int]) -> None:
    draw = Random(0)
    for number in range(count):
        try:
            with socket.create_connection(address, _SOON_S) as peer:
                kind = ATTACKS[number % len(ATTACKS)]
                try:
                    kind(peer, draw)
                except OSError:
                    # It has hung up already.
                    continue
                if kind is not a_reset:
                    told.append(heard(peer))
        except OSError:
            told.append(-1)


def program(comm: un.Communicator, count: int) -> list[int]:
    told: list[int] = []
    idle: list[socket.socket] = []
    attacker = None
    if comm.rank == 1:
        address = control_of(comm).address
        # They say nothing, and stay.
        idle = [socket.create_connection(address, _SOON_S) for _ in range(50)]
        attacker = threading.Thread(target=attack, args=(address, count, told))
        attacker.start()
    going = torch.ones(1)
    while going.item():
        # Every call asks the control plane, and all ranks see when the attack is over.
        going.fill_(float(attacker is not None and attacker.is_alive()))
        comm.all_reduce(going)
        total = torch.full((100,), float(comm.rank + 1))
        comm.all_reduce(total)
        assert total.tolist() == [3.0] * 100
    for peer in idle:
        peer.close()
    return told


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_job_survives_hostile_connections(count: int) -> None:
    told = pool("gloo", 2).run(program, count, size=2)[1]
    assert len(told) >= count // 2
    # A guessed handshake gets the server's hello and proof, 72 bytes, of which `a_guess` itself reads the hello's 40.
    # Random bytes that start like a TLS record get the hello. Every other input gets nothing.
    assert set(told) <= {0, 32, 40, 72}, sorted(set(told))
