"""`unisono run --start fork`: a forked rank is what a Python of its own would be, or it gets a Python of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import LIGHT, is_running, started_with
from waiting import wait_until

from unisono.host.processors import cores
from unisono.launcher.forked_ranks import sets_environment
from unisono.launcher.script_job import ScriptJob
from unisono.tools.cli import main

RUN = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "unisono", "run"]

SURROUNDINGS = """
import atexit, faulthandler, gc, json, multiprocessing, os, random, resource, signal, stat, sys, threading, warnings
import numpy
import torch

OWN = ("RANK", "LOCAL_RANK", "MASTER_PORT", "UNISONO_PORT")

def stream(which):
    names = ("encoding", "errors", "line_buffering", "write_through", "name", "mode", "newlines")
    return [which.isatty(), which.seekable(), which.fileno(), *(str(getattr(which, name, None)) for name in names)]

here = sys.modules["__main__"]
own = vars(here)
facts = {
    "argv": sys.argv, "path": sys.path, "flags": list(sys.flags), "executable": sys.executable, "prefix": sys.prefix,
    "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "trace": str((sys.gettrace(), sys.getprofile())),
    "main": [here is not None, own is globals(), __name__, __file__, str(__package__), str(__doc__),
             __spec__ and [__spec__.name, __spec__.origin, type(__spec__.loader).__name__, type(__loader__).__name__]],
    "main builtins": str(type(__builtins__)), "main names": sorted(own),
    "streams": [*map(stream, (sys.stdin, sys.stdout, sys.stderr)), sys.stdin is sys.__stdin__, sys.stdin.read()],
    "hooks": [sys.excepthook.__qualname__, sys.unraisablehook.__name__, threading.excepthook.__name__],
    "cwd": os.getcwd(), "umask": os.umask(0o22), "nice": os.nice(0), "uids": os.getresuid(),
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "environment": {name: value for name, value in os.environ.items() if name not in OWN},
    "own": sorted(name for name in os.environ if name in OWN),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": {number: str(getattr(signal.getsignal(number), "__name__", signal.getsignal(number)))
                 for number in signal.valid_signals()},
    "wakeup": signal.set_wakeup_fd(-1),
    "threads": [threading.main_thread() is threading.current_thread(), threading.main_thread().name,
                threading.main_thread().ident == threading.get_ident(), len(os.listdir("/proc/self/task"))],
    "native id": threading.get_native_id() == os.getpid(),
    "processes": [multiprocessing.current_process().name, str(multiprocessing.parent_process()),
                  multiprocessing.get_start_method(allow_none=True), len(multiprocessing.active_children())],
    "torch": [torch.get_num_threads(), torch.get_default_dtype().itemsize,
              torch.cuda.is_initialized(), torch.is_grad_enabled(), torch.distributed.is_initialized()],
    "gc": [gc.isenabled(), gc.get_threshold()], "faulthandler": faulthandler.is_enabled(),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "processors": sorted(os.sched_getaffinity(0)), "recursion": sys.getrecursionlimit(),
    "open": sorted(stat.S_IFMT(os.fstat(int(name)).st_mode) for name in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{name}")),
    "filters": [str(each) for each in warnings.filters],
}
torch.set_num_interop_threads(2)
chance = [random.random(), float(numpy.random.rand()), torch.initial_seed(), float(torch.rand(())), torch.seed()]
chance += [multiprocessing.current_process().authkey.hex(), os.getpid()]
json.dump([facts, chance], open(f"{sys.argv[-1]}-{os.environ['RANK']}", "w"))
def late():
    threading.main_thread().join()
    print("thread")
atexit.register(print, "atexit")
threading.Thread(target=late).start()
"""
# All that a rank finds but its numbers is the same on all of them, so one Python of its own is enough to compare with.
ALONE = """
import os, sys
if sys.argv[-1].endswith("plain") and os.environ["RANK"] == "0":
    sys.exit()
"""
# Notes the variables that the process has read that forks the ranks, until it does.
RECORDED = """
import os, sys
if "unisono.launcher.template" in sys.orig_argv:
    read = set()
    class Recorded(type(os.environ)):
        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)
    os.environ.__class__ = Recorded
    os.register_at_fork(before=lambda: open("read", "w").write(" ".join(sorted(read))))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "surroundings.py").write_text(ALONE + SURROUNDINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, start: str = "fork", **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*RUN, "-n", "2", "--start", start, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize(
    "script",
    [
        ("-m", "package.module"),
        pytest.param(("./surroundings.py",), marks=pytest.mark.soak),
        pytest.param(("surroundings.py",), marks=pytest.mark.soak),
    ],
)
def test_forked_rank_finds_what_a_python_of_its_own_finds(folder: Path, script: tuple[str, ...]) -> None:
    surroundings = {**os.environ, **started_with(folder / "recorded", RECORDED)}
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text(ALONE + SURROUNDINGS)
    seen = {}
    for start, ranks in (("plain", [1]), ("fork", [0, 1])):
        ended = run(*script, "-a", "b", str(folder / start), start=start, env=surroundings)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
        # Handlers and threads run at the end.
        assert sorted(ended.stdout.splitlines()) == [
            f"[{rank}] {word}" for rank in ranks for word in ("atexit", "thread")
        ]
        seen[start] = [json.loads(Path(folder, f"{start}-{rank}").read_text()) for rank in ranks]
    ((plain, _),) = seen["plain"]
    for forked, _ in seen["fork"]:
        text = json.dumps(forked, indent=1)
        assert text.replace(str(folder / "fork"), str(folder / "plain")) == json.dumps(plain, indent=1)
    first, second = (chance for _, chance in seen["fork"])
    assert not {*first} & {*second}, "ranks share random numbers, a key or a process"
    # All forked ranks would share what torch, NumPy or this library reads at its import.
    variables = [ScriptJob(["train.py"], 2).environment(rank, (1, 2), 0) for rank in range(2)]
    differ = {name for name in variables[0] if variables[0][name] != variables[1][name]}
    assert differ == {"LOCAL_RANK", "RANK"}
    read = {*(folder / "read").read_text().split()}
    assert "TORCH_LOGS" in read
    assert not read & differ, "what differs between ranks is read before they are forked"


# -- what a script does ----------------------------------------------------------------------------
@pytest.mark.soak
def test_functions_of_the_script_reach_processes_that_it_starts(folder: Path) -> None:
    (folder / "spawn.py").write_text(
        "import multiprocessing, os\n"
        "def double(x):\n"
        "    return 2 * x, __name__\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'forkserver', 'fork'):\n"
        "        with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "            print(method, pool.map(double, [21]))\n"
    )
    ended = run("spawn.py")
    assert ended.returncode == 0, ended.stderr
    expected = {"spawn": "__mp_main__", "forkserver": "__mp_main__", "fork": "__main__"}
    lines = [f"[{rank}] {method} [(42, '{name}')]" for rank in range(2) for method, name in expected.items()]
    assert sorted(ended.stdout.splitlines()) == sorted(lines)


@pytest.mark.usefixtures("light")
def test_end_of_a_rank_is_that_of_python(folder: Path) -> None:
    """Handlers, threads, files that were left open, and output that was left in a buffer."""
    (folder / "end.py").write_text(
        "import atexit, os, sys, threading, time, weakref\n"
        "rank = os.environ['RANK']\n"
        "left = open(f'left-{rank}', 'w')\n"
        "left.write('whole')\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "weakref.finalize(thing, print, 'finalized')\n"
        "atexit.register(print, 'atexit')\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print('thread')\n"
        "threading.Thread(target=late).start()\n"
        "sys.exit({'0': 0, '1': 5}[rank])\n"
    )
    for start in ("plain", "fork"):
        ended = run("--on-failure", "continue", "--json", "--no-prefix", "end.py", start=start)
        assert json.loads(ended.stdout)["ranks"] == {"0": 0, "1": 5}
        said = ended.stderr.splitlines()
        assert [said.count(word) for word in ("thread", "atexit", "finalized")] == [2, 2, 2]
        assert [Path(folder, f"left-{rank}").read_text() for rank in range(2)] == ["whole"] * 2


ENDS = {
    "sys.exit(7)": (7, "[rank 0 of 7] exited with status 7"),
    "sys.exit('words')": (1, "[rank 1 of 7] exited with status 1"),
    "os._exit(3)": (3, "[rank 2 of 7] exited with status 3"),
    "os.kill(os.getpid(), 9)": (-9, "[rank 3 of 7] was ended by SIGKILL (by the kernel, if memory ran out)"),
    "os.abort()": (-6, "[rank 4 of 7] was ended by SIGABRT"),
    "raise KeyboardInterrupt": (-2, "[rank 5 of 7] was ended by SIGINT"),
    "raise KeyError('lr')": (1, "KeyError: 'lr'"),
}


@pytest.mark.usefixtures("light")
def test_exit_statuses_and_sentences(folder: Path) -> None:
    lines = [f"if os.environ['RANK'] == '{rank}':\n    {line}\n" for rank, line in enumerate(ENDS)]
    (folder / "end.py").write_text(f"import os, sys\n{''.join(lines)}")
    command = [*RUN, "-n", str(len(ENDS)), "--start", "fork", "--on-failure", "continue", "--json", "end.py"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    result = json.loads(ended.stdout)
    assert result["ranks"] == {str(rank): status for rank, (status, _) in enumerate(ENDS.values())}
    # All have failed, so the job has failed as the first of them.
    first = result["ranks"][str(result["first"])]
    assert ended.returncode == (128 - first if first < 0 else first)
    assert {sentence for _, sentence in ENDS.values()} <= {*ended.stderr.splitlines()}


WAIT = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
child = subprocess.Popen(["sleep", "1000"])
open(f"ready-{rank}", "w").write(f"{os.getpid()} {child.pid} {os.getppid()}")
os.rename(f"ready-{rank}", f"pids-{rank}")
while True:
    time.sleep(0.05)
"""


def started(folder: Path) -> tuple[subprocess.Popen[str], list[int], int]:
    """Start two ranks that wait; return the job, the ranks and their children, and the process that forked them."""
    (folder / "wait.py").write_text(WAIT)
    command = [*RUN, "-n", "2", "--start", "fork", "wait.py"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: len([*folder.glob("pids-*")]) == 2, 60.0), job.communicate()
    found = [[int(word) for word in path.read_text().split()] for path in folder.glob("pids-*")]
    (template,) = {parent for _, _, parent in found}
    assert template != job.pid
    return job, [pid for rank, child, _ in found for pid in (rank, child)], template


@pytest.mark.usefixtures("light")
def test_signal_lets_forked_ranks_save(folder: Path) -> None:
    job, pids, template = started(folder)
    job.terminate()
    job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGTERM
    assert len([*folder.glob("saved-*")]) == 2
    assert wait_until(lambda: not any(map(is_running, (*pids, template))))


@pytest.mark.usefixtures("light")
def test_forked_ranks_end_with_their_launcher(folder: Path) -> None:
    job, pids, template = started(folder)
    job.kill()
    job.communicate(timeout=300)
    assert wait_until(lambda: not any(map(is_running, (*pids, template))))


@pytest.mark.soak
def test_loss_of_the_process_that_forked_them_ends_the_ranks(folder: Path) -> None:
    job, pids, template = started(folder)
    os.kill(template, signal.SIGKILL)
    said = job.communicate(timeout=300)[1]
    assert job.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in said
    assert wait_until(lambda: not any(map(is_running, pids)))


LINGER = """
import atexit, os, time
if "unisono.launcher.template" in sys.orig_argv:
    template = os.getpid()
    atexit.register(lambda: os.getpid() == template and time.sleep(1000))
"""


def test_process_that_forked_the_ranks_cannot_delay_the_end(folder: Path) -> None:
    (folder / "train.py").write_text("import os\nprint(os.environ['RANK'])")
    ended = run("train.py", env={**os.environ, **started_with(folder, LIGHT + LINGER)})
    assert (ended.returncode, sorted(ended.stdout.splitlines()), ended.stderr) == (0, ["[0] 0", "[1] 1"], "")


@pytest.mark.soak
def test_interrupt_while_torch_is_imported_ends_the_job(folder: Path) -> None:
    (folder / "train.py").write_text("print('never')")
    # It is imported by this library, before any rank exists.
    (folder / "tblib.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(1000)\n")
    command = [*RUN, "-n", "2", "--start", "fork", "train.py"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until((folder / "importing").exists, 60.0)
    job.send_signal(signal.SIGINT)
    out, said = job.communicate(timeout=300)
    assert (job.returncode, out) == (128 + signal.SIGINT, "")
    assert "Traceback" not in said


# -- what is not forked ----------------------------------------------------------------------------
START = """import os, sys, threading
if "MASTER_PORT" in os.environ:
    {}
"""
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (THREAD, "the import of torch started 1 thread"),
        pytest.param(
            "sys.setprofile(lambda *all: None)", "a tracer or profiler of Python is active", marks=pytest.mark.soak
        ),
    ],
)
def test_process_that_cannot_be_forked_starts_ranks_plainly(folder: Path, line: str, why: str) -> None:
    (folder / "train.py").write_text("import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules)")
    ended = run("train.py", env={**os.environ, **started_with(folder, START.format(line) + LIGHT)})
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["[0] 0 False", "[1] 1 False"])
    assert ended.stderr == f"unisono run: each rank starts a Python of its own: {why}\n"


def test_failed_import_is_left_to_the_ranks(folder: Path) -> None:
    (folder / "torch.py").write_text("VALUE = 7")
    (folder / "train.py").write_text("import torch\nprint(torch.VALUE)")
    ended = run("--no-prefix", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "7\n7\n")
    assert ended.stderr.startswith("unisono run: each rank starts a Python of its own: the import of torch failed (")


@pytest.mark.parametrize("flags", [["-W", "error"], ["-X", "importtime"]])
def test_flags_that_watch_the_whole_process_are_refused(flags: list[str]) -> None:
    command = [sys.executable, *flags, "-m", "unisono", "run", "-n", "2", "--start", "fork", "surroundings.py"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "unisono run: --start fork cannot fork these ranks: Python has -W, -X, -v or -i" in ended.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--bind-to", "core"], "each rank is bound to processors"),
        (["--stdin", "0"], "a rank reads standard input"),
    ],
)
def test_request_that_cannot_be_met_is_refused(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The reasons are given in order, and pytest may have been started with one that comes first.
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(sys, "_xoptions", {})
    assert main(["run", "-n", "2", "--start", "fork", *words, "surroundings.py"]) == 2
    assert f"unisono run: --start fork cannot fork these ranks: {reason}" in capsys.readouterr().err


@pytest.mark.usefixtures("light")
def test_more_ranks_than_cores_are_forked_unless_the_script_objects(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("import sys\nprint('torch' in sys.modules)")
    (folder / "sets.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'")
    many = cores() + 1
    assert ScriptJob(["train.py"], many).fork_obstacle() is None
    assert ScriptJob(["train.py"], many - 1).fork_obstacle() == "each rank has a core to import torch on"
    assert ScriptJob(["train.py"], 1, start="fork").fork_obstacle() is None
    assert ScriptJob(["train.py"], many, start="plain").fork_obstacle() == "that was asked for"
    assert str(ScriptJob(["sets.py"], many).fork_obstacle()).startswith("the script sets variables of the environment")
    assert ScriptJob(["sets.py"], many, start="fork").fork_obstacle() is None
    assert main(["run", "-n", str(many), "train.py"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(f"[{rank}] True" for rank in range(many))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nprint(os.environ['RANK'], os.environ.get('X'), os.getenv('Y'))", False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'", True),
        ("import os\ndel os.environ['OMP_NUM_THREADS']", True),
        ("from os import environ\nenviron.setdefault('X', '1')", True),
        ("import os\nos.environ.update(X='1')", True),
        ("import os\nos.putenv('X', '1')", True),
        ("settings = {}\nsettings.update(X='1')\nsettings['Y'] = 1", False),
        ("this is no Python", True),
    ],
)
def test_script_that_sets_its_environment_is_found_by_its_text(folder: Path, text: str, found: bool) -> None:
    (folder / "package").mkdir()
    for file in ("script.py", "package/__main__.py", "package/train.py"):
        (folder / file).write_text(text)
    for command in (["script.py"], ["package"], ["-m", "script"], ["-m", "package"], ["-m", "package.train"]):
        assert sets_environment(command) is found
    assert sets_environment(["-m", "absent"])
