"""Config and sweep files as modules, and the keys of configs."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


def load_module(path: Path | str) -> Any:
    """Runs a Python file and returns its module, which is not registered anywhere.

    Raises:
        OSError: it is no Python file. Whatever else the file raises.
    """
    spec = importlib.util.spec_from_file_location("_loaded", path)
    if spec is None or spec.loader is None:
        raise OSError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a ConfigDict's keys."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
