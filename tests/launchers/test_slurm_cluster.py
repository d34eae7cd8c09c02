"""The recipe for Slurm on a real slurmctld, with a slurmd on each of two hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from doctor_helpers import ALONE
from launcher_helpers import SCRIPT, expect
from recipe_helpers import FILES

from unisono.testing.namespaced_ranks import Network, obstacle

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

CONFIG = """
ClusterName=test
SlurmctldHost=node1({0})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr={0} CPUs=8
NodeName=node2 NodeAddr={1} CPUs=8
PartitionName=all Nodes=node1,node2 Default=YES
"""

# Rank 3 is killed; each other one writes when it noticed, as seconds since then.
DIES = """
import os, signal, time
import torch
import unisono as un

with un.init() as comm:
    try:
        for step in range(10_000):
            comm.all_reduce(torch.ones(100))
            if (comm.rank, step) == (3, 50):
                open("killed", "w").write(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
    except un.errors.PeerLostError:
        late = time.time() - float(open("killed").read())
        open(f"noticed{comm.rank}", "w").write(f"{comm.backend} {late}")
        raise
"""


class Cluster:
    """A controller on the first host, and a node on each."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(CONFIG.format(*network.addresses, folder=folder))
        names = [f"{address} node{number + 1}" for number, address in enumerate(network.addresses)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command line that runs these words on a node, which has a name, and knows those of all nodes."""
        lines = f'mount --bind {self.folder}/hosts /etc/hosts; hostname node{host + 1}; exec "$@"'
        # A `slurmd` needs /sys/fs/cgroup, which is hidden where `ip netns exec` runs a program.
        network = f"--net=/run/netns/{self.network.name(host)}"
        return ["nsenter", network, *ALONE, "sh", "-ec", lines, "sh", *words]

    def start(self, host: int, *words: str) -> None:
        """Start a daemon. It ends with the network."""
        environment = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        with (self.folder / f"{words[0]}{host}.log").open("w") as log:
            self.daemons.append(subprocess.Popen(self.command(host, *words), env=environment, stdout=log, stderr=log))

    def up(self) -> None:
        files = (f"--{name}={self.folder}/munge.{name[:4]}" for name in ("pid-file", "log-file", "seed-file"))
        key, munge = f"--key-file={self.folder}/munge.key", f"--socket={self.folder}/munge.socket"
        self.start(0, "munged", "--foreground", "--force", key, munge, *files)
        expect((self.folder / "munge.socket").exists, "munged listens")
        self.start(0, "slurmctld", "-D")
        for host in range(2):
            self.start(host, "slurmd", "-D", "-N", f"node{host + 1}")
        expect(
            lambda: self.run(self.folder, "sinfo", "-h", "-o", "%D %t", ok=False) == "2 idle\n", "two idle nodes", 60
        )

    def run(self, folder: Path, *words: str, ok: bool = True) -> str:
        environment = {
            **os.environ,
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            self.command(0, *words),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not ok, done.stderr
        return done.stdout

    def job(self, folder: Path, *arguments: str) -> tuple[str, str]:
        """Run slurm.sh to its end; its state, and what it printed."""
        (folder / "slurm.sh").write_text(FILES["slurm.sh"])
        number = self.run(folder, "sbatch", "--parsable", "slurm.sh", *arguments).strip()
        expect(lambda: not self.run(folder, "squeue", "-h"), "the job ends", 180)
        state = re.search(r"JobState=(\w+)", self.run(folder, "scontrol", "show", "job", number))
        assert state is not None
        return state[1], (folder / f"train-{number}.out").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    reason = f"no {', '.join(missing)} on PATH" if missing else obstacle()
    if reason is not None:
        pytest.skip(reason)
    network = Network(2, rate=None)
    made = Cluster(network, tmp_path_factory.mktemp("slurm"))
    try:
        with network:
            made.up()
            yield made
    finally:
        for daemon in made.daemons:
            daemon.wait(30)


@pytest.mark.soak
def test_weights_are_those_of_launch(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    launched = [sys.executable, "train.py", "--launch", "4", "--out", "launched.pt"]
    subprocess.run(launched, cwd=tmp_path, check=True, timeout=300)
    assert cluster.job(tmp_path, "--out", "slurm.pt") == ("COMPLETED", "")
    expected, found = (torch.load(tmp_path / name) for name in ("launched.pt", "slurm.pt"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.soak
def test_killed_rank_is_named_and_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIES)
    state, printed = cluster.job(tmp_path)
    assert state == "FAILED"
    assert "srun: error: node2: task 3: Killed" in printed
    for rank in range(3):
        assert re.search(rf"^\[rank {rank} of 4\] .*PeerLostError: .*rank 3 was lost", printed, re.MULTILINE), printed
        backend, late = (tmp_path / f"noticed{rank}").read_text().split()
        assert backend == "shm+tcp"
        assert 0 <= float(late) < 5
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            assert (process / "cwd").readlink() != tmp_path, (process / "cmdline").read_text()
