"""Arguments of the `python -m lra.…` commands: one way to parse, one way to refuse."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2.

    Args:
        prog: the command, as `python -m lra.report`.
        description, epilog: printed as they are.
    """

    def __init__(self, prog: str, description: str, epilog: str):
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        told = "".join(char if char.isprintable() else " " for char in message)
        self.exit(2, f"error: {told}; see {self.prog} --help\n")


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number with a lower end."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return number

    return parse


def folder(text: str) -> Path:
    """The type of a directory's name."""
    if not text:
        raise argparse.ArgumentTypeError("a directory name is empty")
    return Path(text)
