"""What pyproject.toml cannot say: the native core, compiled where it can be. See unisono.core.native."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

CORE = Path("src/native")


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
        define_macros=[("UNISONO_BUILD", f'"{build}"'), ("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
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


setup(ext_modules=core())
