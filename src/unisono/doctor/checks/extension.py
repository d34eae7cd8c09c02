"""Whether unisono's compiled parts are there, which short calls are faster by."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from unisono.compiled import NO_EXTENSIONS, part
from unisono.doctor.finding import Finding, note, tick
from unisono.doctor.patient import Patient

__all__ = ["ORDER", "check"]

ORDER = 11


def check(_patient: Patient) -> Iterator[Finding]:
    """Ask for one of them."""
    if part("Storing") is not None:
        yield tick("unisono's compiled parts are there")
    elif os.environ.get(NO_EXTENSIONS):
        yield note(
            f"{NO_EXTENSIONS} is set: short calls take longer without unisono's compiled parts",
            f"unset {NO_EXTENSIONS}",
        )
    else:
        yield note(
            "unisono's compiled parts are not there: all works, and short calls take longer",
            f"{sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary unisono unisono   "
            "# where a C compiler and Python's headers are",
        )
