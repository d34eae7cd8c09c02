"""`unisono watch` of plain torch programs whose ranks are on two hosts."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.testing.namespaced_ranks import Network

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if sys.argv[1] == "differs" and rank == 3:
    dist.broadcast(torch.ones(4), 3)
elif sys.argv[1] == "killed" and rank == 3:
    os.kill(os.getpid(), 9)
elif sys.argv[1] == "stopped" and rank == 3:
    time.sleep(1000)
dist.all_reduce(torch.ones(4))
dist.barrier()
dist.destroy_process_group()
os.write(1, b"right to the end\\n")
"""
_ports = itertools.count(29900)


@pytest.mark.soak
@pytest.mark.parametrize("check", ["after", "before"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", None),
        ("differs", r"MismatchError: rank \d of 4: ranks differ in operation"),
        ("killed", r"PeerLostError: .*rank 3 (was lost|has ended)"),
        ("stopped", r"CommTimeoutError: .*for rank 3 in all_reduce(.|\n)*its thread is at"),
    ],
)
def test_ranks_of_both_hosts_report_it(network: Network, tmp_path: Path, check: str, what: str, text: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    port = next(_ports)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
    agents = [
        network.start(
            host,
            *(sys.executable, "-m", "unisono", "watch", "--check", check, "--timeout", "5", "--", *torchrun),
            *("--node-rank", str(host), "--master-addr", network.addresses[0], "--master-port", str(port)),
            *("--monitor-interval", "0.1", str(tmp_path / "train.py"), what),
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(2)
    ]
    try:
        said = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()
    for agent, output in zip(agents, said, strict=True):
        if text is None:
            assert agent.returncode == 0, output
            assert output.count("right to the end") == 2
            assert "unisono watch" not in output
        else:
            assert agent.returncode != 0
            assert re.search(text, output), output
