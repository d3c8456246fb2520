"""What tells the configurations of one stack apart, from the runs' config.json."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
#: Labels name at most this many keys; beyond, the config's hash stands for them.
MOST = 3


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(folder: Path) -> dict[str, Any] | None:
    """The leaves of a run's config that are part of its hash; None if it cannot be read."""
    try:
        stored = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return {k: v for k, v in _leaves(stored) if k != "seed" and not k.startswith("run.")}
    except (OSError, ValueError, AttributeError):
        return None


def differences(folders: Mapping[str, Path]) -> dict[str, str]:
    """`key=value` of what differs between configurations, for each.

    Args:
        folders: A run's folder for each config hash.

    Returns:
        A label for each hash that has one; none where a config cannot be read, or where more keys
        differ than a label can hold.
    """
    read = {name: _read(folder) for name, folder in folders.items()}
    configs = {name: leaves for name, leaves in read.items() if leaves is not None}
    if len(configs) < len(folders) or len(folders) < 2:
        return {}
    keys = sorted({key for leaves in configs.values() for key in leaves})
    differing = [key for key in keys if len({repr(c.get(key)) for c in configs.values()}) > 1]
    if not 0 < len(differing) <= MOST:
        return {}
    return {
        name: ", ".join(f"{key}={leaves[key]}" for key in differing if key in leaves)
        for name, leaves in configs.items()
    }
