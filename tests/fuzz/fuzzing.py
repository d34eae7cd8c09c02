"""Hostile bytes: valid messages changed a little, or noise; and what no parser may do with them.

A target is a file in `targets/`: what it reads, by which errors it may refuse, how much memory it may take.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random

__all__ = ["SLOWEST_S", "Target", "hostile", "load_targets", "smaller", "tried"]

FOLDER = Path(__file__).parent / "targets"

SLOWEST_S = 2.0
"""No input takes longer, of the processor's time: machines that run tests are busy. Waits are for pytest's timeout."""

_BYTES = (0, 1, 2, 7, 8, 127, 128, 254, 255)
_LENGTHS = tuple(length.to_bytes(8, "little") for length in (0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**62, 2**64 - 1))


@dataclass(frozen=True, slots=True)
class Target:
    """One parser.

    Attributes:
        run: Feed it these bytes.
        seeds: Valid ones.
        refusals: The errors by which it may refuse.
        memory: Bytes that it may take: so many, and so many more for each byte of input.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[BaseException], ...]
    memory: tuple[int, int]


def load_targets() -> list[Target]:
    targets = []
    for path in sorted(FOLDER.glob("*.py")):
        spec = spec_from_file_location(f"fuzz_target_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        targets.append(Target(path.stem, module.run, module.seeds(), module.REFUSALS, module.MEMORY))
    return targets


def hostile(draw: Random, seeds: Sequence[bytes]) -> bytes:
    """Noise now and then; most often a valid message with one to four changes."""
    if not draw.randrange(10):
        return draw.randbytes(draw.randrange(200))
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 4)):
        draw.choice(_CHANGES)(draw, data, seeds)
    return bytes(data)


def _place(draw: Random, data: bytearray) -> int:
    return draw.randrange(len(data) + 1)


def _flip(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice(_BYTES) if draw.random() < 0.5 else draw.randrange(256)


def _cut(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(draw, data)
    del data[start : start + draw.choice((1, 2, 8, len(data)))]


def _repeat(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(draw, data)
    data[start:start] = data[start : start + draw.randint(1, 16)] * draw.choice((1, 2, 50))


def _insert(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(draw, data)
    data[start:start] = draw.choice((draw.choice(_LENGTHS), b"\xff" + draw.choice(_LENGTHS), draw.randbytes(4)))


def _overwrite_length(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start, length = _place(draw, data), draw.choice(_LENGTHS)[: draw.choice((2, 4, 8))]
    data[start : start + len(length)] = length


def _splice(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = draw.choice(seeds)
    start = draw.randrange(len(other) + 1)
    data[_place(draw, data) :] = other[start:]


_CHANGES = (_flip, _overwrite, _cut, _repeat, _insert, _overwrite_length, _splice)


def tried(target: Target, data: bytes, *, measured: bool = False) -> str | None:
    """Return the fault of a target on these bytes; None if there is none."""
    began = measured and not tracemalloc.is_tracing()
    if began:
        tracemalloc.start()
    if measured:
        tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0] if measured else 0
    started = time.thread_time()
    try:
        target.run(data)
    except target.refusals:
        pass
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{target.name} ended by {type(error).__name__}: {error}"
    finally:
        took_s = time.thread_time() - started
        peak = tracemalloc.get_traced_memory()[1] - held if measured else 0
        if began:
            tracemalloc.stop()
    most = target.memory[0] + target.memory[1] * len(data)
    if peak > most:
        return f"{target.name} took {peak} bytes of memory for {len(data)}, more than {most}"
    return f"{target.name} took {took_s:.1f} s" if took_s > SLOWEST_S else None


def smaller(target: Target, data: bytes) -> bytes:
    """A short input that fails, too."""
    step = max(1, len(data) // 2)
    while step:
        start = 0
        while start < len(data):
            shorter = data[:start] + data[start + step :]
            if tried(target, shorter) is not None:
                data = shorter
            else:
                start += step
        step //= 2
    return data
