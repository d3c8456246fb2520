"""What training costs beside inference: `mix` forward, and forward and backward.

    python -m benchmarks.backward
    python -m benchmarks.backward --attention gla deltanet --length=65536 --batch=1 --width=64

For every mechanism, bidirectional and causal, with gradients to all its features, 2 × 4 heads × 1024
× 32 float32 by default. Keys are as wide as values where a mechanism does not fix their width. The
table gives milliseconds, the median of interleaved runs after one that warms up, their ratio, and
temporary memory of the compiled forward and backward in MB (10⁶ bytes).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.scaling import Timed, milliseconds
from configs.common import ATTENTION_DEFAULTS
from lra.arguments import at_least
from models.attention import ATTENTION, build


def row(
    name: str, *, causal: bool, batch: int, heads: int, length: int, width: int, runs: int
) -> str:
    """One line of the table; for a form that the mechanism refuses, its reason.

    Args:
        name: of the mechanism.
        causal: the causal form.
        batch: B.
        heads: H.
        length: L, in tokens.
        width: K, of a head.
        runs: timed runs.
    """
    start = f"{name:<16}{'causal' if causal else 'both':<9}"
    dim = heads * width
    own = ATTENTION_DEFAULTS[name]
    if "output_gate" in own:  # it would halve the keys
        own = {**own, "key_dim": width}
    try:
        layer = build(
            name, dim=dim, num_heads=heads, max_length=length, causal=causal, rngs=nnx.Rngs(0),
            **own,
        )  # fmt: skip
    except ValueError as error:
        return f"{start} refused: {error}"
    graph, state = nnx.split(layer)
    both = Timed(layer, length, dim, batch)
    mask = jnp.ones((batch, length), bool)
    # The arrays of the features and not the features: their class takes no abstract arrays.
    leaves, structure = jax.tree.flatten(both.features)

    def mix(state: Any, leaves: Any, mask: Any) -> Any:
        return nnx.merge(graph, state).mix(jax.tree.unflatten(structure, leaves), mask)

    args = (state, leaves, mask)
    forward = jax.jit(mix).lower(*args).compile()
    times = [(milliseconds(forward, *args), both.milliseconds()) for _ in range(runs + 1)][1:]
    ahead, whole = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{start}{ahead:>12.1f}{whole:>15.1f}{whole / ahead:>8.2f}{both.megabytes:>10.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention", nargs="+", choices=list(ATTENTION), default=list(ATTENTION), metavar="NAME"
    )
    parser.add_argument("--batch", type=at_least(1), default=2, help="B")
    parser.add_argument("--heads", type=at_least(1), default=4, help="H")
    parser.add_argument("--length", type=at_least(1), default=1024, help="L, in tokens")
    parser.add_argument("--width", type=at_least(1), default=32, help="K, of a head")
    parser.add_argument("--runs", type=at_least(1), default=9, help="timed runs of each")
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in ("batch", "heads", "length", "width", "runs")}
    shape = f"{args.batch}×{args.heads}×{args.length}×{args.width}"
    print(f"mix, {shape} float32, {jax.devices()[0].platform}")
    print(
        f"{'mechanism':<16}{'form':<9}{'forward ms':>12}{'with backward':>15}{'ratio':>8}{'MB':>10}"
    )
    for name in args.attention:
        for causal in (False, True):
            print(row(name, causal=causal, **sizes), flush=True)


if __name__ == "__main__":
    main()
