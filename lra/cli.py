"""How the commands start and how they end: flags, help, one-line errors, exit status."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from lra import lifeline
from lra.errors import UserError
from lra.modules import leaves, load_module
from lra.names import in_stack, suggest
from lra.signals import Stopped

#: Set to 1 to see the traceback behind a one-line error.
TRACEBACK = "LRA_TRACEBACK"


def _fail(message: str) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    if os.environ.get(TRACEBACK):
        raise
    sys.exit(2)


def _load(path: str) -> tuple[Any, str | None]:
    """What a config file's `get_config` returns, and the file's docstring, for messages and help."""
    name, _, arg = path.partition(":")
    module = load_module(name)
    return module.get_config(arg or None), module.__doc__


def _given(argv: list[str], flag: str) -> str | None:
    """The last value of `--flag=value` or `--flag value` on a command line."""
    found = None
    for i, word in enumerate(argv):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == flag:
            found = value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return found


def _check_config(argv: list[str]) -> None:
    """Says what is wrong with `--config` and its overrides before absl meets them (`UserError`)."""
    path = _given(argv, "config")
    if path is None:
        if any(word.startswith("--config.") for word in argv):
            raise UserError(
                "--config=configs/<task>.py must stand before the keys it has; see --help"
            )
        return
    file = path.partition(":")[0]
    if not Path(file).is_file():
        folder = Path(file).parent
        hint = suggest(file, map(str, folder.glob("*.py")))
        raise UserError(f"--config: there is no file {file}.{hint}")
    try:
        config, _ = _load(path)
    except Exception as error:
        raise UserError(f"--config={path}: {error}") from error
    known = dict(leaves(config))
    first = next(i for i, word in enumerate(argv) if word.lstrip("-").partition("=")[0] == "config")
    for word in argv:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and name in known:
            raise UserError(f"unknown flag --{name}. Did you mean --config.{name}?")
    for word in argv[:first]:
        if word.startswith(("--config.", "--noconfig.")):
            raise UserError(f"--config={path} must stand before {word}")
    sections = {name.rpartition(".")[0] for name in known}
    for word in argv:
        name = word.lstrip("-").partition("=")[0]
        if not word.startswith("-") or not name.removeprefix("no").startswith("config."):
            continue
        key = name.removeprefix("no").removeprefix("config.")
        if key in known:
            used = _given(argv, "config.model.attention") or config.model.attention
            if key.startswith("attention.") and key.split(".")[1] not in in_stack(used):
                raise UserError(f"config.{key} has no effect: model.attention is {used!r}")
            continue
        if key in sections:
            raise UserError(
                f"config.{key} is a section; set a key in it, as --config.{key}.<key>=…"
            )
        raise UserError(f"the config has no key {key!r}.{_nearest(key, list(known))}")


def _nearest(key: str, known: list[str]) -> str:
    """A hint at the most similar key, by its full name or by its last part."""
    leaf = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    if same:
        return f" Did you mean {same[0]!r}?"
    leaves = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(leaf, leaves, n=1)
    return suggest(key, known) or (f" Did you mean {leaves[near[0]]!r}?" if near else "")


def _help(argv: list[str]) -> None:
    """Prints the command's docstring, its flags and, if a config is named, all of its keys."""
    main = sys.modules["__main__"]
    print((main.__doc__ or "").strip(), "\n\nFlags:")
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        print(f"  --{flag.name}: {flag.help}")
    path = _given(argv, "config")
    if path is None and _given(argv, "workdir") is None and "config" in flags.FLAGS:
        print("\nAdd --config=configs/<task>.py to see every key of that config with its default.")
    if path is not None:
        _check_config(argv)
        print(f"\n{path.partition(':')[0]}: {(_load(path)[1] or '').strip()}")
        print(f"\nKeys of {path} (explained in configs/common.py and in the file):")
        for name, value in leaves(_load(path)[0]):
            print(f"  --config.{name}={value!r}")


def run(main: Callable[[], None], *, required: tuple[str, ...]) -> None:
    """Parses flags and calls `main`; errors of the user's become one line and exit status 2.

    Args:
        main: the command.
        required: names of flags that must be given.
    """

    def parse(argv: list[str]) -> list[str]:
        if any(word in ("--help", "-help", "-h", "--helpfull", "--helpshort") for word in argv[1:]):
            try:
                _help(argv[1:])
            except UserError as error:
                _fail(str(error))
            sys.exit(0)
        try:
            _check_config(argv[1:])
            rest = flags.FLAGS(argv)
            for name in required:
                if flags.FLAGS[name].value in (None, ""):
                    raise UserError(f"--{name} is required; see --help")
            if len(rest) > 1:
                raise UserError(f"unexpected argument {rest[1]!r}; see --help")
        except (UserError, flags.Error, AttributeError, TypeError, ValueError, OSError) as error:
            _fail(str(error))
        return rest

    def guarded(_: list[str]) -> None:
        try:
            main()
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(128 + stopped.signal)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except (UserError, OSError) as error:
            # A full or read-only disk, wherever it shows: the message names the file.
            _fail(str(error))
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            _fail(
                "the device has too little memory: lower train.batch_size or eval.batch_size, raise "
                f"train.accumulate, or make the model or data.length smaller ({str(error)[:200]})"
            )

    lifeline.watch()
    # Until something holds work that is worth saving, Ctrl-C simply ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.set_verbosity(logging.WARNING)
    app.run(guarded, flags_parser=parse)
