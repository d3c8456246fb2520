"""Config and sweep files as modules, by their path."""

import importlib.util
from pathlib import Path
from typing import Any


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
