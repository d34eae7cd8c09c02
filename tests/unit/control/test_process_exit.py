"""Ends of processes, and their reports by the control plane; forks, and torch's own groups."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from insides import cut
from waiting import is_refused, run_concurrently, wait_until

from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.control.torch_store import ControlStore
from unisono.core.failure import Cause
from unisono.core.group import Group
from unisono.errors import ClosedError, PeerLostError

SECRET = b"of the tests"
SOON = 10.0

Start = Callable[..., "subprocess.Popen[str]"]

RANK = """
    import os, sys
    from unisono.control.client import SocketControl
    from unisono.core.group import Group

    port, rank, size = map(int, sys.argv[1:])
    control = SocketControl(("127.0.0.1", port), b"of the tests", 10.0)
    group = Group.world(rank, size)
    control.join(group)
"""


def works(control: SocketControl) -> bool:
    control.set("works", b"yes")
    return control.get("works", SOON) == b"yes"


def test_clean_exit_is_no_failure(client: SocketControl, server: ControlServer) -> None:
    told: list[Cause] = []
    client._on_orphan = lambda: told.append(Cause("orphan", None, ""))
    client.join(Group.world(0, 2), told.append)
    closer = threading.Timer(0.0, server.close)
    closer.start()
    with pytest.raises(ClosedError, match=r"the control plane at 127.0.0.1:\d+ has ended"):
        client.exchange(Group.world(0, 2), "x", 1, SOON)
    closer.join()
    client.close()
    assert told == []


def test_close_with_a_timeout_waits_for_clients(server: ControlServer) -> None:
    control = SocketControl(server.address, SECRET, SOON)
    server.retire(SOON)
    assert works(control)
    assert server.stay()
    server.retire(SOON)
    control.close()
    assert wait_until(lambda: is_refused(server.address), SOON)
    assert not server.stay()


def test_death_of_the_server(start: Start) -> None:
    process = start(
        """
        import time
        from unisono.control.server import ControlServer
        server = ControlServer(b"of the tests")
        print(server.address[1], flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))
    orphaned = threading.Event()
    control = SocketControl(address, SECRET, SOON, on_orphan=orphaned.set)
    group, told = Group.world(0, 2), []
    control.join(group, told.append)
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(PeerLostError, match=f"rank 0 of 2: the control plane at 127.0.0.1:{address[1]} was lost"):
        control.exchange(group, "x", 1, SOON)
    assert orphaned.wait(SOON)
    assert [cause.kind for cause in told] == ["PeerLostError"]
    cause = control.first_cause(group)
    assert cause == told[0]
    assert control.report_failure(group, Cause("AbortedError", 0, "too late")) == cause
    with pytest.raises(PeerLostError):
        control.set("x", b"")
    control.close()


def test_killed_process_is_named_within_a_second(server: ControlServer, client: SocketControl, start: Start) -> None:
    victim = start(
        RANK
        + """
    print("joined", flush=True)
    control.exchange(group, "never ends", 1, 60.0)
    """,
        server.address[1],
        1,
        3,
    )
    group = Group.world(0, 3)
    client.join(group)
    third = SocketControl(server.address, SECRET, SOON)
    third.join(Group.world(2, 3))
    assert victim.stdout is not None
    assert victim.stdout.readline() == "joined\n"
    killed_at = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        victim.send_signal(signal.SIGKILL)

    killer = threading.Timer(0.05, kill)
    killer.start()
    with pytest.raises(PeerLostError, match="rank 1 was lost: its process ended") as caught:
        client.exchange(group, "never ends", 1, SOON)
    assert time.monotonic() - killed_at[0] < 1.0
    assert caught.value.peer == 1
    # A second death changes nothing: the first cause stays.
    cut(third)
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        client.exchange(group, "another", 1, SOON)
    third.close()


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("raise ValueError('no data')", "rank 1 failed: ValueError: no data"),
        ("", "rank 1 has left"),
        ("sys.exit(3)", "rank 1 has left"),
        ("os._exit(0)", "rank 1 was lost"),
    ],
)
def test_exit_of_a_process_is_reported(
    server: ControlServer, client: SocketControl, start: Start, ending: str, words: str
) -> None:
    client.join(Group.world(0, 2))
    process = start(f"{RANK}\n    {ending}", server.address[1], 1, 2)
    process.wait(SOON)
    with pytest.raises(PeerLostError, match=words):
        client.exchange(Group.world(0, 2), "x", 1, SOON)


def test_forked_client_is_closed(server: ControlServer, client: SocketControl, start: Start) -> None:
    client.join(Group.world(0, 2))
    process = start(
        RANK
        + """
    child = os.fork()
    if child == 0:
        try:
            control.set("x", b"")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        control.close()
        sys.stdin.read()
        os._exit(0)
    os.waitpid(child, 0)
    """,
        server.address[1],
        1,
        2,
    )
    assert process.stdout is not None
    assert "CommError this communicator belongs to process" in process.stdout.readline()
    # The child lives on, and yet the death of its parent is seen.
    process.kill()
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        client.exchange(Group.world(0, 2), "x", 1, SOON)


def test_handles_are_closed_although_another_thread_makes_more(start: Start) -> None:
    process = start(
        """
        import sys, threading
        from collections import deque
        from unisono.control.process_exit import close_all, close_at_exit

        class Handle:
            closed = 0

            def on_process_exit(self, error):
                self.closed += 1

        def make():
            made = deque(maxlen=20)
            while True:
                made.append(Handle())
                close_at_exit(made[-1])

        handles = [Handle() for _ in range(1000)]
        for handle in handles:
            close_at_exit(handle)
        sys.setswitchinterval(1e-6)
        threading.Thread(target=make, daemon=True).start()
        for _ in range(300):
            close_all()
        print({handle.closed for handle in handles})
        """
    )
    assert process.communicate(timeout=SOON) == ("{300}\n", "")


def test_store_drives_gloo(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def summed(rank: int) -> list[float]:
        control = SocketControl(server.address, SECRET, SOON)
        group = dist.ProcessGroupGloo(ControlStore(control, "gloo", 20.0), rank, 2, timedelta(seconds=20))
        tensor = torch.arange(4.0) * (rank + 1)
        group.allreduce([tensor]).wait()
        control.close()
        return tensor.tolist()

    assert run_concurrently(partial(summed, 0), partial(summed, 1)) == [[0.0, 3.0, 6.0, 9.0]] * 2
