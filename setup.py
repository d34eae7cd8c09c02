"""What pyproject.toml cannot say: the native core, compiled where it can be, and a reproducible package.

For the core see unisono.host.native. With SOURCE_DATE_EPOCH set, the same sources give the same sdist and wheel.
"""

import gzip
import hashlib
import os
import runpy
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

CORE = Path("src/native")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# From 3.12 on, one core serves all later versions; interpreters without the GIL have no stable ABI.
# Builds on Linux what other systems get, to test it: without futexes and eventfd, and so without shared memory.
PORTABLE = [("UNISONO_PORTABLE", None)] * bool(os.environ.get("UNISONO_PORTABLE"))
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
        define_macros=[
            ("UNISONO_BUILD", f'"{build}"'),
            ("NDEBUG", None),
            ("NB_COMPACT_ASSERTIONS", None),
            *ABI_MACROS,
            *PORTABLE,
        ],
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
            # Where the sources lay must not be in the core: a build's folder has another name each time.
            f"-ffile-prefix-map={binding}=nanobind",
            f"-ffile-prefix-map={Path.cwd()}=unisono",
            "-Wall",
            "-Wextra",
        ],
        optional=True,
    )
    return [extension]


class ReproducibleSdist(sdist):
    """Makes an archive that shows neither who built it nor when, nor their umask."""

    def make_archive(
        self, base_name: str, format: str, root_dir: str | None = None, *args: object, **kw: object
    ) -> str:
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or epoch is None:
            return super().make_archive(base_name, format, root_dir, *args, **kw)
        to = f"{base_name}.tar.gz"
        # The header of gzip names the file and the time, unless it is told otherwise.
        with (
            Path(to).open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            folder = Path(base_name).name
            for path in (Path(folder), *sorted(Path(folder).rglob("*"))):
                tar.add(path, recursive=False, filter=lambda entry: anonymous(entry, int(epoch)))
        return to


def anonymous(entry: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Take owner, time and umask from an entry. What the owner may execute, all may."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = epoch
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry


def page() -> dict[str, object]:
    """Authors, addresses and README for the package's metadata."""
    version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    site = runpy.run_path("docs/site/package_page.py")
    readme = site["page"](Path("README.md").read_text(), version)
    return {
        "author": "The unisono authors",
        "author_email": site["author_email"](),
        "long_description": readme,
        "long_description_content_type": "text/markdown",
        "project_urls": site["urls"](version),
    }


setup(
    ext_modules=core(),
    cmdclass={"sdist": ReproducibleSdist},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
    **page(),
)
