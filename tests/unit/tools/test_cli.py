"""The command line finds its commands, and every end has its exit status."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import CommTimeoutError, UnavailableError
from unisono.host.distribution import install_command
from unisono.tools import bench as tools_bench
from unisono.tools import demo as tools_demo
from unisono.tools.cli import COMMANDS, UsageError, main, make_parser


class Trial:
    """Try something.

    At length.
    """

    ending: Callable[[], int]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--status", type=int, default=0)

    def run(self, given: argparse.Namespace) -> int:
        return self.ending() or int(given.status)


@pytest.fixture
def trial() -> Iterator[Trial]:
    command = Trial()
    command.ending = lambda: 0
    COMMANDS.register("trial", command)
    yield command
    COMMANDS.unregister("trial")


def raising(error: BaseException) -> Callable[[], int]:
    def end() -> int:
        raise error

    return end


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"unisono {un.__version__}\n"


def test_help_lists_every_command(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert "Try something." in said
    assert "At length" not in said
    assert {"demo", "trial"} <= set(said.split())


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: unisono" in capsys.readouterr().err


def test_unknown_command_lists_the_known_ones(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["denmo"])
    said = capsys.readouterr().err
    # Python quotes them up to 3.13.
    assert {"demo", "trial"} <= set(re.findall(r"\w+", said.partition("choose from")[2]))


def test_command_does_not_import_the_others() -> None:
    program = "import sys; from unisono.tools.cli import main; main(['verify', 'ring']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-1] == "False"


def test_help_imports_no_command_and_no_torch() -> None:
    program = "import sys; from unisono.tools.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "unisono.tools.cli.commands" in modules
    assert not [name for name in modules if name.startswith(("torch", "numpy", "unisono.tools.cli.commands."))]


def test_help_of_every_command_imports_no_torch() -> None:
    program = (
        "import sys; from unisono.tools.cli import COMMANDS, main\n"
        "for words in [*([name] for name in COMMANDS.names()), ['checkpoint', 'convert'], ['trace', 'summary']]:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "unisono.tools.cli.commands.bench" in modules
    assert not {"torch", "numpy"} & modules


def test_defaults_and_names_of_options_are_those_of_the_settings() -> None:
    bench, demo = (make_parser([name]).parse_args([name]) for name in ("bench", "demo"))
    settings = tools_bench.Settings()
    named = {name: getattr(settings, name) for name in vars(bench) if hasattr(settings, name)}
    expected = {**vars(bench), "sizes": tools_bench.parse_sizes(bench.sizes), "against": ()}
    assert named.items() <= expected.items()
    assert asdict(tools_demo.DemoSettings()).items() <= vars(demo).items()
    parser = argparse.ArgumentParser()
    COMMANDS["bench"].add_arguments(parser)
    said = " ".join(parser.format_help().split())
    assert ", ".join(name for name in tools_bench.PEERS.names() if name != "unisono") in said


# `watch` becomes the program that it starts.
@pytest.mark.parametrize("name", sorted({*COMMANDS.names()} - {"completion", "watch"}))
def test_every_command_has_json(name: str) -> None:
    made: list[argparse.ArgumentParser] = []

    class Parser(argparse.ArgumentParser):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)

    # Parsers of subcommands are of the class of their parent.
    COMMANDS[name].add_arguments(Parser())
    for each in made[1:] or made:
        assert "--json" in each.format_help(), each.prog


def test_conversion_as_json_and_of_rubbish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors", reason="converts to safetensors")
    old, new = tmp_path / "old.pt", tmp_path / "new.safetensors"
    torch.save({"w": torch.ones(2)}, old)
    assert main(["checkpoint", "convert", str(old), str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(new)}
    assert main(["checkpoint", "convert", str(old), str(tmp_path / "x"), "--to", "tar"]) == 2
    assert "unknown format 'tar'; known: dcp" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(tmp_path / "none.pt"), str(tmp_path / "x")]) == 2
    assert "none.pt: there is no such file or directory\n" in capsys.readouterr().err
    for number, content in enumerate((b"", b"\x13" * 1000, new.read_bytes()[:-3])):
        rubbish = tmp_path / f"{number}.{'safetensors' if number == 2 else 'bin'}"
        rubbish.write_bytes(content)
        assert main(["checkpoint", "convert", str(rubbish), str(tmp_path / "x")]) == 1
        error = capsys.readouterr().err
        assert str(rubbish) in error
        assert error.count("\n") == 1


def test_closed_pipe_ends_without_a_traceback() -> None:
    command = f"{sys.executable} -m unisono verify ring --ranks 2"
    piped = f"set -o pipefail; {command} | true; for i in 1 2; do {command}; done | head -1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""


def test_full_disk_is_one_sentence() -> None:
    command = f"{sys.executable} -m unisono verify ring --ranks 2 > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "unisono verify: cannot print: No space left on device\n")


@pytest.mark.parametrize("name", COMMANDS.names())
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser([name])
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args([name, "--help"])
    said = capsys.readouterr().out
    assert "exit status: 0 ok" in said
    examples = [line.strip() for line in said.splitlines() if line.startswith("  unisono ")]
    assert examples
    assert COMMANDS.summary(name) == (COMMANDS[name].__doc__ or "").splitlines()[0]
    for example in examples:
        words = shlex.split(re.split(r" > | {3,}", example)[0])[1:]
        assert parser.parse_args(words).command == name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert {"doctor", "autopsy", "hosts", "stacks"} <= set(re.findall(r"\w+", said))
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", shell]) == 2
    assert f"completion needs shtab: {install_command('cli')}" in capsys.readouterr().err


def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "unisono").write_text(capsys.readouterr().out)
    script = f"source {tmp_path}/unisono; COMP_WORDS=(unisono doctor --ba); COMP_CWORD=2; "
    script += "_shtab_unisono unisono --ba doctor; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["--backend"]


def test_exit_status_is_that_of_the_command(trial: Trial) -> None:
    assert main(["trial"]) == 0
    assert main(["trial", "--status", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (UsageError("that cannot be"), 2, "unisono trial: that cannot be\n"),
        (UnavailableError("pip install it"), 2, "unisono trial: pip install it\n"),
        (CommTimeoutError("nobody came", rank=1, size=2), 1, "unisono trial: rank 1 of 2: timed out: nobody came\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_statuses(
    error: BaseException, status: int, sentence: str, trial: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    trial.ending = raising(error)
    assert main(["trial"]) == status
    assert capsys.readouterr().err == sentence


def test_unexpected_error_keeps_its_traceback(trial: Trial) -> None:
    trial.ending = raising(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        main(["trial"])


def test_as_a_module() -> None:
    command = [sys.executable, "-W", "error", "-m", "unisono", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"unisono {un.__version__}\n"


def test_watch_becomes_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--timeout", "0", "--", "true"]) == 2
    assert main(["watch", "--", "/no such program"]) == 2
    assert "cannot run '/no such program'" in capsys.readouterr().err
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execvpe", lambda *given: became.append(given))
    words = ["torchrun", "--nproc-per-node", "2", "train.py"]
    main(["watch", "--check", "before", "--timeout", "9", "--", *words])
    ((program, arguments, environment),) = became
    assert (program, arguments) == ("torchrun", words)
    assert environment.items() >= {"UNISONO_WATCH": "before", "UNISONO_WATCH_TIMEOUT": "9.0"}.items()
