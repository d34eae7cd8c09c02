"""`unisono run` passes signals on, and ends what its ranks have started; output and surroundings are Python's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import is_running
from waiting import wait_until

# The scripts sleep only to stay until a signal or another rank ends them.
HANDLERS = """
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
def save(number, frame):
    open(f"{folder}/saved-{rank}-{number}", "w").close()
    if number not in (signal.SIGUSR1, signal.SIGUSR2) and "stubborn" not in sys.argv:
        sys.exit(0)
for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), save)
open(f"{folder}/ready-{rank}", "w").close()
while True:
    time.sleep(0.05)
"""
CHILDREN = """
import os, subprocess, sys, time
folder, rank, how = sys.argv[1], os.environ["RANK"], sys.argv[2]
child = subprocess.Popen(["sleep", "1000"])
open(f"{folder}/child-{rank}", "w").write(str(child.pid))
open(f"{folder}/ready-{rank}", "w").close()
while not os.path.exists(f"{folder}/ready-{1 - int(rank)}"):
    time.sleep(0.01)
if how == "fail":
    sys.exit(3)
if how == "succeed":
    sys.exit(0)
time.sleep(1000)
"""
# A shell ignores interrupts for what it starts in the background, tests for instance.
RUN = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "unisono", "run"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "children.py").write_text(CHILDREN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start two ranks, and wait until both are ready."""
    job = subprocess.Popen([*RUN, "-n", "2", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: len([*folder.glob("ready-*")]) == 2, 60.0), job.communicate()
    return job


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved-*"))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_handlers_of_ranks_save_and_leave(folder: Path, number: signal.Signals) -> None:
    job = started(folder, "handlers.py", str(folder))
    job.send_signal(number)
    job.communicate(timeout=300)
    assert job.returncode == 128 + number
    assert saved(folder) == [f"saved-{rank}-{int(number)}" for rank in range(2)]


def test_job_goes_on_after_a_signal_of_the_users_and_saves_at_its_end(folder: Path) -> None:
    job = started(folder, "handlers.py", str(folder))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job.send_signal(number)
        expected = {f"saved-{rank}-{int(number)}" for rank in range(2)}
        assert wait_until(lambda expected=expected: expected <= {*saved(folder)})
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGTERM
    numbers = sorted(map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)))
    assert saved(folder) == [f"saved-{rank}-{number}" for rank in range(2) for number in numbers]


@pytest.mark.parametrize("second", [pytest.param(False, marks=pytest.mark.soak), True])
def test_grace_ends_by_time_or_by_a_second_signal(folder: Path, second: bool) -> None:
    job = started(folder, "--grace", "60" if second else "0.5", "handlers.py", str(folder), "stubborn")
    job.send_signal(signal.SIGTERM)
    assert wait_until(lambda: len(saved(folder)) == 2)
    if second:
        job.send_signal(signal.SIGTERM)
    job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGTERM


def test_ignored_signal_stays_ignored(folder: Path) -> None:
    job = subprocess.Popen(["nohup", *RUN[2:], "-n", "2", "handlers.py", str(folder)], stdout=-3, stderr=-3)
    assert wait_until(lambda: len([*folder.glob("ready-*")]) == 2, 60.0)
    job.send_signal(signal.SIGHUP)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=300) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("fail", 3),
        ("succeed", 0),
        pytest.param("SIGINT", 130, marks=pytest.mark.soak),
        pytest.param("SIGTERM", 143, marks=pytest.mark.soak),
        ("SIGKILL", -9),
    ],
)
def test_children_of_ranks_end_with_the_job(
    folder: Path, how: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = folder / "places"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    job = started(folder, "children.py", str(folder), how)
    begun = time.monotonic()
    if how.startswith("SIG"):
        job.send_signal(getattr(signal, how))
    job.communicate(timeout=300)
    # The grace is 30 s.
    assert time.monotonic() - begun < 25
    assert job.returncode == status
    children = [int(path.read_text()) for path in folder.glob("child-*")]
    assert wait_until(lambda: not any(map(is_running, children)))
    assert not [*places.iterdir()], "files of the launcher remain"


# -- output ----------------------------------------------------------------------------------------
BYTES = r"""
import os, sys, time
sys.stdout.write("no newline"); sys.stdout.flush()
for share in (0, 50, 100):
    time.sleep(0.1)
    sys.stdout.write(f"\r{share}%"); sys.stdout.flush()
print()
os.write(1, b"\xff\xfe bytes\n")
os.write(1, "unicode \u00e9\u4e2d\n".encode())
sys.stdout.write("the end")
"""


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "unisono", "run", *words]
    return subprocess.run(command, check=False, capture_output=True, timeout=300, **options)


def test_output_passes_as_it_comes(folder: Path) -> None:
    (folder / "bytes.py").write_text(BYTES)
    # Ranks of `unisono run` are unbuffered.
    plain = subprocess.run([sys.executable, "-u", "bytes.py"], capture_output=True, check=True).stdout
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    assert run("-n", "1", "--no-prefix", "bytes.py", env=environment).stdout == plain
    expected = plain.replace(b"\r", b"\r[0] ").replace(b"\n", b"\n[0] ")
    assert run("-n", "1", "bytes.py", env=environment).stdout == b"[0] " + expected


def test_lines_of_ranks_do_not_run_into_each_other(folder: Path) -> None:
    (folder / "lines.py").write_text(
        "import os, sys, time\n"
        "for number in range(300):\n"
        "    sys.stdout.write(f'{number} of {os.environ[\"RANK\"]}'); sys.stdout.flush()\n"
        "    sys.stdout.write('.\\n')\n"
    )
    # Three ranks on two cores would be forked from a process that has imported torch.
    lines = run("-n", "3", "--start", "plain", "lines.py").stdout.decode().splitlines()
    whole = 0
    for rank in range(3):
        written = [f"{number} of {rank}." for number in range(300)]
        pieces = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        # Where the rest of a line takes long, it comes on a line of its own.
        assert "".join(pieces) == "".join(written)
        whole += len(set(written).intersection(pieces))
    assert whole > 600


def test_part_of_a_line_is_seen_before_its_end(folder: Path) -> None:
    (folder / "ask.py").write_text("print('got', input('name? '))")
    job = subprocess.Popen([*RUN, "-n", "1", "ask.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdin is not None
    assert job.stdout is not None
    assert os.read(job.stdout.fileno(), 100) == b"[0] name? "
    assert job.communicate(b"bob\n", timeout=300)[0] == b"got bob\n"
    assert job.returncode == 0


@pytest.mark.parametrize(("words", "found"), [(["--stdin", "1"], b"[0] ''\n[1] 'bob'\n"), ([], b"[0] ''\n[1] ''\n")])
def test_standard_input_reaches_the_rank_that_is_named(folder: Path, words: list[str], found: bytes) -> None:
    (folder / "read.py").write_text("import sys; print(repr(sys.stdin.read()))")
    output = run("-n", "2", *words, "read.py", input=b"bob").stdout
    assert b"".join(sorted(output.splitlines(keepends=True))) == found


def test_reader_that_leaves_ends_the_job_quietly(folder: Path) -> None:
    (folder / "lines.py").write_text("number = 0\nwhile True:\n    print(number)\n    number += 1\n")
    command = f"{' '.join(RUN)} -n 2 --no-prefix lines.py | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, timeout=300)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("0\n", "", 128 + signal.SIGPIPE)


# -- descriptors, flags and paths ------------------------------------------------------------------
@pytest.mark.parametrize("closed", [pytest.param("<&-", marks=pytest.mark.soak), "<&- >&- 2>&-"])
def test_closed_descriptors_end_no_rank(folder: Path, closed: str) -> None:
    (folder / "note.py").write_text(
        f"import os, sys\nsys.stdin.read()\nprint('x')\nopen('{folder}/ran-' + os.environ['RANK'], 'w').close()\n"
    )
    ended = subprocess.run(["bash", "-c", f"{' '.join(RUN)} -n 2 note.py {closed}"], check=False, timeout=300)
    assert ended.returncode == 0
    assert len([*folder.glob("ran-*")]) == 2


def test_ranks_end_with_a_launcher_whose_descriptors_were_closed(folder: Path) -> None:
    command = f"exec {' '.join(RUN)} -n 2 children.py {folder} wait <&- >&- 2>&-"
    job = subprocess.Popen(["bash", "-c", command])
    assert wait_until(lambda: len([*folder.glob("ready-*")]) == 2, 60.0)
    job.kill()
    job.wait(timeout=300)
    children = [int(path.read_text()) for path in folder.glob("child-*")]
    assert wait_until(lambda: not any(map(is_running, children)))


SURROUNDINGS = "import sys; print(sys.argv, __file__, sys.path[0], sys.flags.optimize, __debug__, __name__)"


@pytest.mark.parametrize(("script", "flags"), [("links/link.py", ["-O"]), ("./script.py", ["-P"])])
def test_script_sees_what_plain_python_shows(folder: Path, script: str, flags: list[str]) -> None:
    (folder / "script.py").write_text(SURROUNDINGS)
    (folder / "links").mkdir()
    (folder / "links" / "link.py").symlink_to(folder / "script.py")
    plain = subprocess.run([sys.executable, *flags, script, "-a", "b"], capture_output=True, check=True).stdout
    command = [sys.executable, *flags, "-m", "unisono", "run", "-n", "1", "--no-prefix", script, "-a", "b"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == plain


def test_folder_with_a_main_module_runs(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text("import helper; print(helper.VALUE)")
    (folder / "package" / "helper.py").write_text("VALUE = 7")
    assert run("-n", "1", "package").stdout == b"[0] 7\n"


@pytest.mark.soak
def test_error_of_a_program_that_a_rank_starts_is_seen(folder: Path) -> None:
    (folder / "inner.py").write_text("import unisono as un\nun.init(backend='thread')\nraise KeyError('the inner one')")
    (folder / "outer.py").write_text(
        "import os, subprocess, sys\n"
        "environment = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE')}\n"
        "assert subprocess.run([sys.executable, 'inner.py'], env=environment).returncode == 1\n"
    )
    ended = run("-n", "1", "outer.py")
    assert ended.returncode == 0
    assert b"KeyError: 'the inner one'" in ended.stderr
