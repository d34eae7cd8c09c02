"""Importing the package costs next to nothing and changes nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import unisono


def run(program: str) -> str:
    """Return the output of a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(statement: str) -> set[str]:
    return set(run(f"{statement}\nimport sys; print(*sys.modules)").split())


def test_import_loads_no_extras() -> None:
    modules = imported("import unisono")
    assert "unisono" in modules
    extras = {"mpi4py", "hypothesis", "pytest", "_pytest", "rich", "matplotlib", "sklearn"}
    assert not modules & (extras | {"unisono.testing", "unisono.data", "unisono.tools.cli"})


def test_import_changes_no_signals_logging_or_seeds_and_starts_no_threads() -> None:
    program = """
        import logging, os, random, signal, threading, torch
        def look():
            handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGUSR1)]
            return handlers, logging.root.handlers[:], random.getstate(), torch.initial_seed(), dict(os.environ)
        before = look()
        import unisono
        print(look() == before)
        print(threading.active_count(), torch.cuda.is_initialized(), torch.distributed.is_initialized())
        print(unisono.data.DataPartitioner.__name__, unisono.errors.CommError.__name__)
    """
    unchanged, threads, lazily = run(program).splitlines()
    assert unchanged == "True"
    assert threads == "1 False False"
    assert lazily == "DataPartitioner CommError"


def test_names_load_what_they_use() -> None:
    modules = imported("import unisono as un; un.launch; un.GradientAverager")
    assert "unisono.gradients.averager" in modules
    unused = ("checkpoint", "gradients.local_sgd", "gradients.periodic_averager", "utils.ema", "utils.seeding")
    assert not [name for name in modules if name.startswith(tuple(f"unisono.{room}" for room in unused))]


@pytest.mark.parametrize("door", ["checkpoint", "gradients", "utils"])
def test_doors_have_every_name_and_no_other(door: str) -> None:
    module = getattr(unisono, door)
    assert set(module.__all__) <= set(dir(module))
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=rf"module 'unisono\.{door}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018  # the access is what fails


def test_rendezvous_needs_no_torch() -> None:
    # Behind a bare package: the front door itself imports torch.
    folder = str(Path(unisono.__file__).parent)
    bare = f"import sys, types; p = sys.modules['unisono'] = types.ModuleType('unisono'); p.__path__ = [{folder!r}]"
    modules = imported(f"{bare}\nimport unisono.bootstrap, unisono.control.server, unisono.control.client")
    assert "unisono.control.server" in modules
    assert not modules & {"torch", "numpy"}


def test_pytest_plugin_imports_nothing() -> None:
    # Every pytest run imports the plugin if the package is installed.
    assert not imported("import unisono.testing.plugin") & {"torch", "hypothesis", "numpy", "unisono.launcher"}


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(unisono, "no_such_thing")


def test_top_level_names_are_few() -> None:
    functions_and_classes = [name for name in unisono.__all__ if not isinstance(getattr(unisono, name), ModuleType)]
    assert len(functions_and_classes) <= 20


def test_dir_lists_the_public_names() -> None:
    assert dir(unisono) == sorted(unisono.__all__)


@pytest.mark.soak
def test_public_names_and_a_launch_give_no_warning() -> None:
    program = """
        import torch, unisono as un
        for name in un.__all__:
            getattr(un, name)

        def program(comm):
            total = torch.tensor([comm.rank + 1.0])
            comm.all_reduce(total)
            return total.item()

        print(un.launch(program, 2, "shm", threads=1))
    """
    assert run(program).split() == ["[3.0,", "3.0]"]
