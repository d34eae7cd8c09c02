"""What pyproject.toml cannot say: the native core, compiled where it can be. See unisono.host.native."""

import hashlib
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

CORE = Path("src/native")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# From 3.12 on, one core serves all later versions; interpreters without the GIL have no stable ABI.
STABLE_ABI = sys.version_info >= (3, 12) and not FREE_THREADED
ABI_MACROS = [("Py_LIMITED_API", "0x030C0000")] * STABLE_ABI + [("NB_FREE_THREADED", None)] * FREE_THREADED


def core() -> list[Extension]:
    """The native core: nanobind's own source is compiled with it. None where nanobind is missing."""
    try:
        import nanobind
    except ImportError:
        return []
    sources = sorted(CORE.rglob("*.[ch]pp"))
    build = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    binding = Path(nanobind.__file__).parent
    extension = Extension(
        "unisono._native",
        [str(CORE / "bindings.cpp"), str(CORE / "nanobind.cpp")],
        depends=list(map(str, sources)),
        include_dirs=[str(CORE), *(str(binding / part) for part in ("include", "src", "ext/robin_map/include"))],
        define_macros=[("UNISONO_BUILD", f'"{build}"'), ("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None), *ABI_MACROS],
        py_limited_api=STABLE_ABI,
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            # Else a change anywhere moves a kernel's loop across lines of the cache: up to 8 % of a short reduction.
            "-falign-loops=64",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
            "-g0",
            "-Wall",
            "-Wextra",
        ],
        optional=True,
    )
    return [extension]


setup(ext_modules=core(), options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {})
