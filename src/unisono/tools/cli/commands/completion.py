"""Print a shell's completion code for unisono's commands and options.

This command needs the optional dependencies `cli`.

  unisono completion bash > ~/.local/share/bash-completion/completions/unisono
  unisono completion zsh > ~/.zfunc/_unisono      (with fpath+=~/.zfunc before compinit in .zshrc)
  unisono completion fish > ~/.config/fish/completions/unisono.fish
"""

from __future__ import annotations

import argparse

from unisono.host.distribution import required
from unisono.tools.cli import COMMANDS, make_parser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete commands in")


def run(given: argparse.Namespace) -> int:
    """Print the shell's code."""
    shtab = required("shtab", "completion needs shtab", "cli")
    print(shtab.complete(make_parser(COMMANDS.names()), given.shell))
    return 0
