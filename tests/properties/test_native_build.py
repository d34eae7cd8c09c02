"""There is a native core where one can be compiled."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from unisono.host.native import NO_EXTENSIONS, native


def test_core_is_built_if_a_compiler_exists() -> None:
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    possible = compiler and header.exists()
    wanted = bool(possible) and not os.environ.get(NO_EXTENSIONS)
    assert (native() is not None) >= wanted
