"""The secret comes from where it should, and never from a file that others could have read or written."""

from __future__ import annotations

import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unisono.control.sockets import find_secret
from unisono.errors import CommError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("UNISONO_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_argument_overrides_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SECRET", "from the environment")
    assert find_secret() == b"from the environment"
    assert find_secret("given") == b"given"
    assert find_secret(b"given") == b"given"


@pytest.mark.parametrize("empty", ["", b""])
def test_empty_secret_is_rejected(empty: str | bytes) -> None:
    with pytest.raises(ValueError, match="the secret is empty"):
        find_secret(empty)


def test_number_is_rejected_as_secret() -> None:
    with pytest.raises(TypeError, match="text or bytes, not int"):
        find_secret(32)  # type: ignore[arg-type]  # as a user may


def test_environment_may_hold_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SECRET", os.fsdecode(b"\xff\xfe"))
    assert find_secret() == b"\xff\xfe"


def test_missing_temporary_directory_matters_only_if_needed(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    (home / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "file"))
    with pytest.raises(CommError, match=r"no folder can hold the secret.*No usable temporary directory"):
        find_secret()


def test_user_key_is_created_once(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: find_secret(), range(8)))
    assert len(found) == 1
    path = home / "config/unisono/secret"
    assert path.read_bytes() in found
    assert len(path.read_bytes()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_user_key_without_home_is_a_temporary_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "file"))
    secret = find_secret()
    directory = home / f"unisono-{os.getuid()}"
    assert (directory / "secret").read_bytes() == secret
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_key_readable_by_others_is_rejected(home: Path) -> None:
    find_secret()
    path = home / "config/unisono/secret"
    path.chmod(0o640)
    with pytest.raises(CommError, match="is open to other users; run `chmod go-rwx "):
        find_secret()
    path.chmod(0o600)
    path.parent.chmod(0o777)
    with pytest.raises(CommError, match="is open to other users"):
        find_secret()


def test_key_owned_by_others_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    find_secret()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CommError, match="belongs to another user"):
        find_secret()


def test_empty_key_file_is_rejected(home: Path) -> None:
    find_secret()
    (home / "config/unisono/secret").write_text("")
    with pytest.raises(CommError, match="is empty; remove it"):
        find_secret()
