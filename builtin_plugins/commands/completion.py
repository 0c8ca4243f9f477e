"""`hardpoint completion`: the script that makes a shell complete command lines."""

from __future__ import annotations

import argparse

from hardpoint.plugins import Command, CommandContext

_HELP = """\
Add a line to the file that your shell reads at its start:
  ~/.bashrc                   source <(hardpoint completion bash)
  ~/.zshrc, after compinit    source <(hardpoint completion zsh)
  ~/.config/fish/config.fish  hardpoint completion fish | source
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] SHELL"
    parser.description = "Print a script for your shell, which then completes with TAB."
    parser.epilog = _HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )


def _run(options: argparse.Namespace, context: CommandContext) -> int:  # noqa: ARG001
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415 - only this command needs it

    # Without defaults: a shell's own completion would offer file names for a prompt.
    print(shellcode(["hardpoint"], use_defaults=False, shell=options.shell))
    return 0


COMMAND = Command("completion", "print a script for TAB completion", _configure, _run)
