"""The headers of the native core, without Python, under sanitizers or for aarch64: ranks are threads of one program."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src/native"
BUILT = HERE.parents[1] / ".cache" / "native-tests"
COMPILER = shutil.which("g++")
CROSS_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")


def sanitized(sanitizers: str, level: str = "-O1") -> list[str]:
    # GCC says of each fence that -fsanitize=thread does not know it; data is ordered by release and acquire.
    flags = ["-std=c++17", level, "-g", "-fno-strict-aliasing", "-Wno-tsan", "-pthread", f"-fsanitize={sanitizers}"]
    return [str(COMPILER), *flags]


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_data_is_ordered_between_ranks() -> None:
    # To compile takes longest, and without optimization the sanitizer sees the same accesses.
    check(ran(sanitized("thread", "-O0"), [], "ranks"))


@pytest.mark.soak
@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
@pytest.mark.parametrize("name", ["ranks", "steps_ranks"])
def test_ranks_as_threads(name: str, sanitizers: str) -> None:
    check(ran(sanitized(sanitizers), [], name))


@pytest.mark.soak
@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_many_random_calls() -> None:
    check(ran(sanitized("thread"), [], "steps_ranks", "12"))


@pytest.mark.soak
@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_mutated_frames_are_refused() -> None:
    """Ten seconds of the fuzzer. Ten minutes by hand, from any script number on:

    g++ -std=c++17 -O1 -g -fno-strict-aliasing -pthread -fsanitize=address,undefined -Isrc/native
    tests/native/steps_fuzzer.cpp -o /tmp/fuzzer && /tmp/fuzzer 600 1000
    """
    status, output, errors = ran(sanitized("address,undefined"), [], "steps_fuzzer", "10")
    assert (status, output) == (0, "0 failed\n")
    assert re.fullmatch(r"[1-9]\d* runs\n", errors)


@pytest.mark.soak
@pytest.mark.skipif(
    None in (CROSS_COMPILER, EMULATOR), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user-static"
)
def test_ranks_as_threads_on_aarch64() -> None:
    """Instructions, layouts and roundings of aarch64. The emulator seldom reorders accesses, as a processor may."""
    flags = [
        "-std=c++17",
        "-O3",
        "-static",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-pthread",
    ]
    check(ran([str(CROSS_COMPILER), *flags], [str(EMULATOR)], "ranks"))


def check(done: tuple[int, str, str]) -> None:
    """Check that a program of ranks has found no failure; those that it did are in the error, whole."""
    status, output, errors = done
    assert done == (0, "0 failed\n", ""), f"exit status {status}\n{output}{errors}"


def built(command: list[str], name: str) -> Path:
    """Build a program without a warning, unless that is done: to compile takes several times as long as to run."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr(command).encode() + version)
    for path in sorted(path for folder in (HEADERS, HERE) for path in folder.rglob("*.[ch]pp")):
        digest.update(path.read_bytes())
    program = BUILT / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}")
        command = [*command, f"-I{HEADERS}", str(HERE / f"{name}.cpp"), "-o", str(part)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (made.returncode, made.stderr) == (0, "")
        part.replace(program)
    return program


def ran(compiler: list[str], emulator: list[str], name: str, *arguments: str) -> tuple[int, str, str]:
    """Run a program; return the exit status, output and errors.

    The longest run, twelve rounds of random calls with ThreadSanitizer, takes 450 s on two slow cores.
    """
    command = [*emulator, str(built(compiler, name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    return done.returncode, done.stdout, done.stderr
