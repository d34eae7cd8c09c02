"""The native core's stub as nanobind prints it; `python tests/house/native_stub.py` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from nanobind.stubgen import StubGen

import unisono._native

STUB = Path(__file__).parents[2] / "src/unisono/_native.pyi"


def printed() -> str:
    generator = StubGen(unisono._native)
    generator.put(unisono._native)
    # The build's number changes with each change of the sources.
    return re.sub("^(BUILD: str) = .*$", r"\1", generator.get(), flags=re.MULTILINE)


if __name__ == "__main__":
    STUB.write_text(printed())
