"""An mpirun that does not start its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.core.transport import Options
from unisono.errors import PeerLostError
from unisono.launcher import mpirun
from unisono.launcher.job import Job, conclude
from unisono.transports.hierarchical import transport_named


@pytest.mark.parametrize("does", ["exit 7", "exec sleep 60"])
@pytest.mark.parametrize("on_failure", ["end", "continue"])
def test_missing_ranks_are_named(does: str, on_failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] || {does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(program))
    for name in ("MPIRUN_START_S", "MPIRUN_END_S", "END_S"):
        monkeypatch.setattr(mpirun, name, 0.1)
    job = Job(print, (), {}, transport_named("thread"), Options("thread"), "auto", None)
    with mpirun.MpirunRanks(job, 2, on_failure, 1) as ranks:
        ended = ranks.run()
    assert all(isinstance(outcome.error, PeerLostError) for outcome in ended)
    with pytest.raises(PeerLostError, match=r"rank 0 of 2 ended before it could report; see its output and mpirun's"):
        conclude(ended, 2, "end")
