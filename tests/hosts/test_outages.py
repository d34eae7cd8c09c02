"""Links that are away for a while, receivers that do not read, and hosts that vanish."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import CommError, PeerLostError
from unisono.testing.namespaced_ranks import HostRanks, Network, obstacle, send_signal

LINKS = [("tcp", False), ("shm+tcp", False), ("gloo", False), ("tcp", True), ("shm+tcp", True)]
LATE_S = 1.0
"""For ranks that share two cores with twenty others."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with a key and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "job.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=job"
    subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    certificate.chmod(0o600)
    return str(certificate)


def busy(comm: un.Communicator, outage_s: float, _over: str) -> float:
    """Return the longest time between the ends of two calls, which is that of the outage."""
    comm.barrier()
    send_signal()
    longest = 0.0
    last = time.monotonic()
    while True:
        comm.all_reduce(torch.ones(1000))
        longest = max(longest, time.monotonic() - last)
        last = time.monotonic()
        seen = torch.tensor([float(longest > 0.8 * outage_s)])
        comm.all_reduce(seen, "min")
        if seen.item():
            return longest
        time.sleep(0.05)


def idle(comm: un.Communicator, outage_s: float, over: str) -> float:
    """Return the time from the end of the outage to that of the first call."""
    comm.barrier()
    send_signal()
    while not Path(over).exists():
        time.sleep(0.02)
    began = time.monotonic()
    comm.all_reduce(torch.ones(1000))
    return outage_s + time.monotonic() - began


def through_an_outage(case: tuple[str, bool, Any], outage_s: float, certificate: str, over: Path) -> list[Any]:
    backend, tls, program = case
    variables = {"UNISONO_TLS": certificate} if tls else {}
    options = {"timeout": 300.0}
    with (
        Network(2, rate=None) as network,
        HostRanks(
            network,
            (1, 1),
            program,
            outage_s,
            str(over),
            backend=backend,
            options=lambda _: options,
            variables=variables,
        ) as ranks,
    ):
        ranks.wait_for_word()
        network.cut(1)
        time.sleep(outage_s)
        network.heal(1)
        over.touch()
        return ranks.results(3 * outage_s + 30.0)


@pytest.mark.soak
@pytest.mark.parametrize("outage_s", [1.0, 11.0, 30.0, 100.0])
def test_programs_go_on_after_an_outage(outage_s: float, job: str, tmp_path: Path) -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    cases = [(backend, tls, program) for backend, tls in LINKS for program in (busy, idle)]
    with ThreadPoolExecutor(len(cases)) as threads:
        running = [
            threads.submit(through_an_outage, case, outage_s, job, tmp_path / str(number))
            for number, case in enumerate(cases)
        ]
        found = {(case[0], case[1], case[2].__name__): each.result() for case, each in zip(cases, running, strict=True)}
    for case, times in found.items():
        for taken_s in times:
            assert isinstance(taken_s, float), (case, taken_s)
            assert taken_s < 2 * outage_s + LATE_S, (case, found)
    print({case: [round(taken, 1) for taken in times] for case, times in found.items()})


def in_calls(comm: un.Communicator) -> None:
    comm.barrier()
    send_signal()
    while True:
        comm.all_reduce(torch.ones(1000))


def between_calls(comm: un.Communicator) -> None:
    """Make no call before the communicator has failed."""
    comm.barrier()
    send_signal()
    while comm._engine.life.cause is None:
        time.sleep(0.02)
    comm.barrier()


def error_of(ranks: HostRanks, rank: int, since: float) -> tuple[CommError, float]:
    """Return the error of a rank, and when it came."""
    (error,) = ranks.results(40.0, [rank])
    assert isinstance(error, CommError), repr(error)
    return error, time.monotonic() - since


def silence_s(error: CommError, host: int) -> float:
    """Return for how long that host was not reachable, by the first line of an error."""
    away = rf"[Hh]ost 10\.77\.0\.{host + 1} not reachable since \d\d:\d\d:\d\d, for (\d+\.\d) s"
    found = re.search(away, str(error).splitlines()[0])
    assert found is not None, error
    return float(found[1])


@pytest.mark.soak
@pytest.mark.parametrize("program", [in_calls, between_calls])
@pytest.mark.parametrize("backend", ["tcp", "shm+tcp", "gloo"])
def test_the_timeout_ends_a_longer_outage(network: Network, backend: str, program: Any) -> None:
    options = {"timeout": 20.0}
    with HostRanks(network, (1, 1), program, backend=backend, options=lambda _: options) as ranks:
        ranks.wait_for_word()
        network.cut(1)
        since = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            for rank, wait in enumerate([threads.submit(error_of, ranks, rank, since) for rank in range(2)]):
                error, taken_s = wait.result()
                assert 19.5 < taken_s < 24.0, (rank, taken_s, error)
                assert abs(silence_s(error, 1 - rank) - taken_s) < 4.0, error


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_host_that_vanishes_is_lost_after_its_heartbeat(
    network: Network, lost: int, tls: bool, request: pytest.FixtureRequest
) -> None:
    variables = {"UNISONO_TLS": request.getfixturevalue("job")} if tls else {}
    options = {"timeout": 100.0, "heartbeat": 2.0}
    with HostRanks(
        network, (1, 1), between_calls, backend="tcp", options=lambda _: options, variables=variables
    ) as ranks:
        ranks.wait_for_word()
        network.cut(lost)
        ranks.kill(lost)
        error, taken_s = error_of(ranks, 1 - lost, time.monotonic())
    assert isinstance(error, PeerLostError)
    assert error.peer == lost
    # Far from the timeout of 100 s.
    assert taken_s < 20.0
    assert 0.9 < silence_s(error, lost) < 20.0


def one_reads_late(comm: un.Communicator, busy_s: float) -> list[float]:
    tensor = torch.full((1 << 18,), 1.0 + comm.rank)
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        time.sleep(busy_s)
        comm.recv(tensor, 0)
    comm.barrier()
    return tensor.unique().tolist()


@pytest.mark.soak
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("backend", ["tcp", "shm+tcp", "gloo"])
def test_a_receiver_may_compute_for_long(network: Network, backend: str, tls: bool, job: str) -> None:
    if tls and backend == "gloo":
        pytest.skip("gloo does not encrypt")
    variables = {"UNISONO_TLS": job} if tls else {}
    options = {"timeout": 300.0}
    with HostRanks(
        network, (1, 1), one_reads_late, 45.0, backend=backend, options=lambda _: options, variables=variables
    ) as ranks:
        assert ranks.results(60.0) == [[1.0], [1.0]]
