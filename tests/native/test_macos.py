"""The native core compiled for macOS, where nothing of it can be run here: what it needs from that system is there."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "src" / "native"
# Python's own headers are those of Linux, and so is the file with the sizes of this platform's types.
SIZES = {
    8: "DOUBLE LONG LONG_LONG SIZE_T TIME_T UINTPTR_T VOID_P",
    4: "FLOAT INT PID_T WCHAR_T",
    2: "SHORT",
}


@pytest.fixture
def library(tmp_path: Path) -> bytes:
    """The core as a library for macOS on arm64."""
    ziglang = pytest.importorskip("ziglang", reason="needs the dependency group macos")
    nanobind = Path(pytest.importorskip("nanobind").__file__).parent
    headers = tmp_path / "python"
    shutil.copytree(sysconfig.get_paths()["include"], headers)
    sizes = "".join(f"#define SIZEOF_{name} {size}\n" for size, names in SIZES.items() for name in names.split())
    (headers / "pyconfig.h").write_text(f"{sizes}#define HAVE_STDDEF_H 1\n#define HAVE_PTHREAD_H 1\n")
    folders = [CORE, headers, *(nanobind / part for part in ("include", "src", "ext/robin_map/include"))]
    made = tmp_path / "_native.so"
    command = [sys.executable, "-m", ziglang.__name__, "c++", "-target", "aarch64-macos", "-shared", "-std=c++17"]
    command += ["-undefined", "dynamic_lookup", "-fvisibility=hidden", "-DNDEBUG"]
    command += ['-DUNISONO_BUILD="macos"', *(f"-I{folder}" for folder in folders), "-o", str(made)]
    done = subprocess.run(
        [*command, str(CORE / "bindings.cpp"), str(CORE / "nanobind.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return made.read_bytes()


@pytest.mark.soak
def test_core_is_a_library_of_macos(library: bytes) -> None:
    exported, needed = symbols(library)
    assert exported >= {"_PyInit__native"}
    assert needed >= {"_pipe", "_poll", "_sendmsg", "_clock_gettime", "_setsockopt"}
    assert not needed & {"_eventfd", "_syscall"}


def symbols(library: bytes) -> tuple[set[str], set[str]]:
    """Return the symbols that a Mach-O file of 64 bits exports, and those that it needs from elsewhere."""
    magic, *_, commands, _, _, _ = struct.unpack_from("<8I", library)
    assert magic == 0xFEEDFACF
    exported = set()
    needed = set()
    at = 32
    for _ in range(commands):
        command, nbytes = struct.unpack_from("<2I", library, at)
        # LC_SYMTAB: a table of symbols, and the names to which it points.
        if command == 2:
            table, count, names, _ = struct.unpack_from("<4I", library, at + 8)
            for n in range(count):
                name_at, kind, _, _, _ = struct.unpack_from("<I2BHQ", library, table + 16 * n)
                name = library[names + name_at : library.index(b"\0", names + name_at)].decode()
                # N_EXT, visible outside of the file; and N_TYPE, which is 0 for a symbol that is not defined in it.
                if kind & 1:
                    (exported if kind & 0x0E else needed).add(name)
        at += nbytes
    return exported, needed
