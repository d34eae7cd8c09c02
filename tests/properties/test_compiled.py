"""There is an extension where one can be compiled."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from compiled_kit import COMPILED, PLAIN

from unisono.compiled import NO_EXTENSIONS, native


def test_the_extension_is_there_where_there_is_a_compiler() -> None:
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    possible = compiler and header.exists() and not sysconfig.get_config_var("Py_GIL_DISABLED")
    wanted = bool(possible) and not os.environ.get(NO_EXTENSIONS)
    assert {name for name, found in COMPILED.items() if found is not None} >= (set(COMPILED) if wanted else set())
    assert (native() is not None) >= wanted
    assert set(PLAIN) == {"Filling"}
