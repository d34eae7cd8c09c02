"""Hostile files: none runs code, crashes, or takes more memory than stated multiples of its size, and a constant."""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import rewrite, saved, state_of

import unisono as un
from unisono.checkpoint import CheckpointError, FormatError
from unisono.checkpoint.manifest import GRANTED, MANIFEST, OF_MANIFEST
from unisono.testing import run_ranks

ROWS = 45_000
"""Of a state with 9 MB, too much to be held until all is checked."""
USUAL = 1 << 20
"""Memory that the interpreter and the allocators use when a small checkpoint is loaded."""
ARENAS = 32 << 20
"""Memory that they reserve at most without using it."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


HOSTILE = (
    *(
        -1,
        0,
        1 << 40,
        1 << 62,
        1 << 80,
        0.5,
        True,
        None,
        "",
        "../../x",
        "\ud800",
        [],
        {},
        [[]] * 50,
        {"$tensor": "nobody"},
    ),
    *(
        {"$tuple": 3},
        {"$range": [0, 1 << 60]},
        {"$bytes": "!"},
        {"$state": ["os.system", {}]},
        {"$rank": [9, "modulo"]},
    ),
    *(
        {"$generator": "model.bias"},
        {"$numbers": "model.weight"},
        {"$dict": [[[], 1]]},
        {"$set": [[1]]},
        {"$size": ["x"]},
    ),
    *(
        {"$int": "0x" + "f" * 50},
        {"$array": ["<f8", [1 << 50], "counts"]},
        {"$device": "cuda:99"},
        {"$dtype": "Tensor"},
    ),
    *({"$array": ["O", [1], "counts"]}, {"$complex": ["1", "x"]}, {"$unknown": 1}, {"$counter": [[1, "x"]]}, "float64"),
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a tree, with each of its keys."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def deep(levels: int) -> Any:
    node: Any = 0
    for _ in range(levels):
        node = [node]
    return node


def corrupted(whole: Any, chance: random.Random) -> Any:
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(list(places(whole)))
        what = chance.random()
        if what < 0.1:
            del container[key]
        elif what < 0.2:
            container[key] = deep(chance.choice([50, 150, 300]))
        elif what < 0.4:
            other, place = chance.choice(list(places(whole)))
            container[key] = json.loads(json.dumps(other[place]))
        else:
            container[key] = json.loads(json.dumps(chance.choice(HOSTILE)))
    return whole


RUN_CODE = ("exec", "compile", "pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "os.posix_spawn")
_watched: list[str] = []
_guards: list[int] = []


def watch(event: str, given: tuple[Any, ...]) -> None:
    if not _guards or event not in RUN_CODE:
        return
    code = getattr(given[0], "co_filename", "") if given else ""
    # A module of a library that is imported late.
    if event != "exec" or not Path(code).is_file():
        _watched.append(f"{event} {given}")


def kilobytes_of(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(name) :].split()[1])


@contextmanager
def guarded(nbytes: int) -> Iterator[Callable[[], int]]:
    """No code, and no more memory than that, used or not; what is yielded says how much was used at most.

    That is by new pages, which lack what had been free in older ones; or by what Python asked for, which lacks tensors.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    # The peak is measured from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes_of("VmRSS")
    tracemalloc.start()
    _guards.append(nbytes)
    try:
        yield lambda: max((kilobytes_of("VmHWM") - before) << 10, tracemalloc.get_traced_memory()[1])
    finally:
        _guards.clear()
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(path: Path, wanted: Any, most: int) -> str:
    """Load a hostile checkpoint, within the limit of one of its size and so many bytes more; how it ended."""
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    allowed = 2 * nbytes + OF_MANIFEST * (path / MANIFEST).stat().st_size + most
    with guarded(allowed + ARENAS) as used:
        try:
            un.checkpoint.load(path, wanted)
            end = "loaded"
        except CheckpointError as error:
            end = type(error).__name__
        taken = used()
    assert taken <= allowed, f"{taken} bytes of memory for {nbytes} bytes of files; {end}"
    return end


def spoil(path: Path, intact: dict[str, bytes], chance: random.Random) -> str:
    """Change the manifest, or bytes of any file; which one it was."""
    if chance.random() < 0.75:
        rewrite(path, lambda whole: corrupted(whole, chance))
        return "manifest.json"
    name = chance.choice(sorted(intact))
    data = bytearray(intact[name])
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    data[: chance.choice([0, 0, 8])] = chance.randbytes(8)
    (path / name).write_bytes(data)
    return name


def fuzz(folder: Path, count: int, rows: int = 40) -> dict[str, int]:
    """Load so many hostile checkpoints; how each ended."""
    sys.addaudithook(watch)
    path = saved(folder / f"victim-{rows}", 1, rows=rows)
    intact = {file.name: file.read_bytes() for file in path.iterdir()}
    chance = random.Random(11)
    ends: dict[str, int] = {}
    for wanted in (None, state_of(5, rows)):
        un.checkpoint.load(path, wanted)
    for _ in range(count):
        name = spoil(path, intact, chance)
        for wanted in (None, state_of(5, rows)):
            end = attempt(path, wanted, USUAL)
            ends[end] = ends.get(end, 0) + 1
        (path / name).write_bytes(intact[name])
    assert not _watched, _watched
    # Any other error is unexpected.
    assert ends.keys() <= {"loaded", "CorruptError", "FormatError", "StateError"}, ends
    return ends


def test_hostile_files(folder: Path) -> None:
    ends = fuzz(folder, 60)
    assert ends.keys() >= {"CorruptError", "FormatError", "StateError"}, ends
    assert fuzz(folder, 5, ROWS).keys() >= {"FormatError"}


@pytest.mark.soak
def test_10000_hostile_files(folder: Path) -> None:
    assert sum(fuzz(folder, 9_500).values()) == 19_000
    assert sum(fuzz(folder, 500, ROWS).values()) == 1_000


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "has other bytes than its shape": lambda whole: whole["tensors"]["model.bias"]["shape"].append(1 << 40),
    "belong to none, or to two": lambda whole: whole["tensors"]["model.bias"].update(
        pieces=[[0, *whole["tensors"]["model.weight"]["pieces"][0][1:]]], shape=[30, 20]
    ),
    "has another size": lambda whole: whole["files"][0].__setitem__(1, 1 << 40),
    "has no tensor": lambda whole: whole["files"].append(
        ["0123456789abcdef-00009.safetensors", 8, 8, *whole["files"][0][3:]]
    ),
    "is listed twice": lambda whole: whole["files"].append(whole["files"][0]),
    "other digests than blocks": lambda whole: whole["tensors"]["model.bias"]["pieces"][0].__setitem__(3, []),
    "the number of ranks differs": lambda whole: whole.update(ranks=3),
}


@pytest.mark.parametrize("said", LIES)
def test_manifest_that_contradicts_its_files(folder: Path, said: str) -> None:
    path = saved(folder / "lies" / "alone", 1, 1)
    rewrite(path, LIES[said])
    with pytest.raises(FormatError, match=said):
        un.checkpoint.load(path)


BOMBS: dict[str, Callable[[int], Any]] = {
    "lists": lambda n: [[]] * n,
    "dicts": lambda n: [{}] * n,
    "lists of one": lambda n: [[1]] * n,
    "dicts of one": lambda n: [{"a": 1}] * n,
    "tuples": lambda n: [{"$tuple": []}] * n,
    "sets": lambda n: [{"$set": []}] * n,
    "strings": lambda n: [f"{i:x}" for i in range(n)],
    "numbers": lambda n: [i + 0.5 for i in range(n)],
    "keys": lambda n: {f"{i:x}": 0 for i in range(n)},
    "keys and strings": lambda n: {f"{i:x}": f"x{i:x}" for i in range(n)},
    "one long string": lambda n: "x" * (60 * n),
    "tensors": lambda n: [{"$tensor": "model.bias"}] * n,
}


SAMPLE = {"lists": 160_000, "keys and strings": 10_000, "tensors": 10_000}
"""By default: only where it is refused does the number matter."""
DENSE = ("lists", "dicts", "lists of one", "dicts of one", "tuples", "sets")
"""Those that take more memory than so much text may: no number of them is too large for the others."""


LONG = [pytest.param(bomb, 300_000, marks=pytest.mark.soak) for bomb in BOMBS]


@pytest.mark.parametrize(("bomb", "most"), [*SAMPLE.items(), *LONG])
def test_short_values_that_expand_in_memory(folder: Path, bomb: str, most: int) -> None:
    path = saved(folder / bomb / "alone", 1, 1)
    ends = set()
    for count in sorted({10_000, most}):
        rewrite(path, partial(dict.update, state=BOMBS[bomb](count)))
        ends.add(attempt(path, None, GRANTED))
        ends.add(attempt(path, state_of(1), GRANTED))
    assert "loaded" in ends
    assert ("FormatError" in ends) == (bomb in DENSE)


def test_repeatedly_converted_tensors(folder: Path) -> None:
    path = saved(folder / "again" / "alone", 1, 1, rows=4000)
    for again in (
        {"$numbers": "model.embedding"},
        {"$bytes": {"$tensor": "model.embedding"}},
        {"$array": ["<f4", [4000, 50], "model.embedding"]},
    ):
        rewrite(path, partial(dict.update, state=[again] * 40))
        assert attempt(path, None, GRANTED) == "FormatError"


def test_cyclic_per_rank_values(folder: Path) -> None:
    """Each twice the next one: thirty of them would be 2 ** 30."""
    path = saved(folder / "laughs", 1, 1)
    laughs = [[{"$rank": [number + 1, "modulo"]}] * 2 for number in range(30)]
    rewrite(path, lambda whole: whole.update(state={"$rank": [0, "modulo"]}, per_rank=[[*laughs, 0]]))
    with pytest.raises(FormatError, match="in two places"):
        un.checkpoint.load(path)
    rewrite(path, lambda whole: whole.update(state=[{"$rank": [0, "modulo"]}] * 9, per_rank=[[0]]))
    with pytest.raises(FormatError, match="in two places"):
        un.checkpoint.load(path)


def test_unloadable_values_are_not_saved(folder: Path) -> None:
    # About 17 MiB of values, where 16 are granted to any checkpoint.
    many = {"many": [{} for _ in range(90_000)]}
    errors = run_ranks(lambda comm: un.checkpoint.save(folder / "many", many, comm), 2, on_failure="continue")
    assert all(isinstance(error, FormatError) and "keep long lists" in str(error) for error in errors), errors
    un.checkpoint.save(folder / "many", {**many, "large": torch.zeros(2_000_000)})
    assert len(un.checkpoint.load(folder / "many")["many"]) == 90_000
