"""How time and memory of attention grow with the length.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --attention linear softmax --lengths=1024,4096

For every mechanism, bidirectional and causal, `mix` is compiled and run forward and backward
(gradients to all its features), 1 × 2 heads × L × 32 float32 by default. The table gives milliseconds,
the median of interleaved runs after one that warms up, and temporary memory of the compiled program
in MB (10⁶ bytes), at each length; and the slope of the straight line through log time, and log
memory, against log length: 1 for O(L), 2 for O(L²). A mechanism whose state does not grow with the
length claims O(L): its slopes are to be at most 1.15. Exit status 1 if one's are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.attention_memory import compile_mix
from configs.common import ATTENTION_DEFAULTS
from lra.arguments import at_least
from models.attention import ATTENTION, Attention, build

BOUND = 1.15


def claims_linear(layer: Attention) -> bool:
    """Whether the mechanism says that its cost for a token does not depend on the length."""
    return layer.mixing_flops(1 << 16) == layer.mixing_flops(1 << 12)


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Of the least-squares line through (log length, log value)."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


class Timed:
    """`mix` compiled, forward and backward, with its arguments.

    Args:
        layer: any mechanism.
        length: L, in tokens.
        dim: width over all heads.
        batch: B.
    """

    def __init__(self, layer: Attention, length: int, dim: int, batch: int = 1):
        self.program = compile_mix(layer, batch=batch, length=length, dim=dim, dropout=False)
        x = jax.random.normal(jax.random.key(0), (batch, length, dim))
        mask = jnp.ones((batch, length), bool)
        features = layer.project(x, mask)
        self.args = (jax.tree.leaves(features), nnx.state(layer), mask, None, features.value)
        self.features = features

    @property
    def megabytes(self) -> float:
        """Temporary memory."""
        return self.program.memory_analysis().temp_size_in_bytes / 1e6

    def milliseconds(self) -> float:
        """Of one run."""
        return milliseconds(self.program, *self.args)


def milliseconds(program: Callable[..., Any], *args: Any) -> float:
    """Of one run of a compiled program."""
    began = time.perf_counter()
    jax.block_until_ready(program(*args))
    return 1000 * (time.perf_counter() - began)


def measure(
    name: str, *, causal: bool, lengths: Sequence[int], heads: int, width: int, runs: int
) -> tuple[Attention, list[float], list[float]] | str:
    """Milliseconds and megabytes at each length; a reason where the mechanism refuses.

    Args:
        name: of the mechanism.
        causal: the causal form.
        lengths: L, in tokens.
        heads: H.
        width: K, of a head.
        runs: timed runs at each length.
    """
    own: dict[str, Any] = ATTENTION_DEFAULTS[name]
    try:
        layer = build(
            name, dim=heads * width, num_heads=heads, max_length=max(lengths), causal=causal,
            rngs=nnx.Rngs(0), **own,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    programs = [Timed(layer, length, heads * width) for length in lengths]
    for program in programs:
        program.milliseconds()
    times = [[p.milliseconds() for p in programs] for _ in range(runs)]
    return (
        layer,
        [statistics.median(column) for column in zip(*times, strict=True)],
        [p.megabytes for p in programs],
    )


def lengths_of(text: str) -> list[int]:
    """`4096,16384` as numbers: two at least, rising.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if len(lengths) < 2 or lengths[0] < 1 or lengths != sorted(set(lengths)):
        raise argparse.ArgumentTypeError(f"expected two or more rising lengths, got {text!r}")
    return lengths


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention", nargs="+", choices=list(ATTENTION), metavar="NAME",
        help="default: all that claim O(L)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=lengths_of, default=[4096, 16384, 65536], help="in tokens, rising"
    )
    parser.add_argument("--heads", type=at_least(1), default=2, help="H")
    parser.add_argument("--width", type=at_least(1), default=32, help="K, of a head")
    parser.add_argument("--runs", type=at_least(1), default=3, help="timed runs at each length")
    args = parser.parse_args(argv)
    lengths = args.lengths
    head = "".join(f"{f'{n} ms':>12}{'MB':>9}" for n in lengths)
    print(f"forward and backward of mix, 1×{args.heads}×L×{args.width} float32")
    print(f"{'mechanism':<16}{'form':<9}{head}{'slope ms':>10}{'slope MB':>10}")
    steep = []
    for name in args.attention or ATTENTION:
        for causal in (False, True):
            start = f"{name:<16}{'causal' if causal else 'both':<9}"
            if not args.attention and not _may_be_linear(name, causal, args.heads, args.width):
                continue
            found = measure(
                name, causal=causal, lengths=lengths, heads=args.heads, width=args.width, runs=args.runs
            )  # fmt: skip
            if isinstance(found, str):
                print(f"{start} refused: {found}")
                continue
            layer, times, memory = found
            slopes = slope(lengths, times), slope(lengths, memory)
            cells = "".join(f"{t:>12.1f}{m:>9.1f}" for t, m in zip(times, memory, strict=True))
            over = claims_linear(layer) and max(slopes) > BOUND
            steep += [f"{name} {'causal' if causal else 'both'}"] if over else []
            print(f"{start}{cells}{slopes[0]:>10.2f}{slopes[1]:>10.2f}", flush=True)
    if steep:
        print(f"steeper than {BOUND} though O(L) is claimed: {', '.join(steep)}")
    return 1 if steep else 0


def _may_be_linear(name: str, causal: bool, heads: int, width: int) -> bool:
    try:
        layer = build(
            name, dim=heads * width, num_heads=heads, max_length=64, causal=causal,
            rngs=nnx.Rngs(0), **ATTENTION_DEFAULTS[name],
        )  # fmt: skip
    except ValueError:
        return True
    return claims_linear(layer)


if __name__ == "__main__":
    sys.exit(main())
