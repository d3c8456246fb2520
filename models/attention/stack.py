"""Which mechanism stands in which layer: the grammar of `model.attention`."""

from __future__ import annotations

import re

from models.attention import ATTENTION, unknown_name


def parse_stack(text: str, num_layers: int) -> list[str]:
    """The mechanism of each layer.

    `softmax` is every layer; `3xlinear/softmax` is three linear layers and a softmax one. Layers are
    separated by `/`, `Nx` repeats. The list fills `num_layers` exactly or divides it, and is then
    repeated from the bottom up: `linear/softmax` alternates.

    Args:
        text: the value of `model.attention`.
        num_layers: layers to fill.

    Returns:
        `num_layers` names of the registry.

    Raises:
        ValueError: for an empty part, a repeat of 0, an unknown name, or a list that does not fit.
    """
    if num_layers < 1:
        raise ValueError(f"model.num_layers must be at least 1, got {num_layers}")
    layers: list[str] = []
    for part in text.split("/"):
        match = re.fullmatch(r"(?:(\d+)x)?(.+)", part.strip())
        if match is None:
            raise ValueError(f"model.attention {text!r} has an empty layer")
        times, name = int(match[1] or 1), match[2]
        if times < 1:
            raise ValueError(f"model.attention {text!r} repeats {name!r} {times} times")
        if name not in ATTENTION:
            raise ValueError(f"in model.attention {text!r}: {unknown_name(name)}")
        if len(layers) + times > num_layers:
            raise ValueError(
                f"model.attention {text!r} lists {len(layers) + times} layers, "
                f"more than model.num_layers={num_layers}"
            )
        layers += [name] * times
    if num_layers % len(layers):
        raise ValueError(
            f"model.attention {text!r} lists {len(layers)} layers, which neither fill nor divide "
            f"model.num_layers={num_layers}"
        )
    return layers * (num_layers // len(layers))
