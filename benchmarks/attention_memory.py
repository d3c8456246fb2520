"""Memory that attention needs while training, as the compiler plans it.

    python -m benchmarks.attention_memory
    python -m benchmarks.attention_memory --length=16384 --attention softmax

For every mechanism, bidirectional and causal, and with attention dropout where it has weights, the
mixing step o = A v is compiled forward and backward (gradients to all its features, 1 × 4 × 8192 ×
64 float32 by default). Nothing is run. The table gives

* temporary: the compiled program's temporary memory in MB (10⁶ bytes), features, output and
  gradients not counted;
* largest: the largest array that the program names, with its size in MB;
* L×L: "yes" if any array in it has two dimensions of at least L.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra.arguments import at_least
from models.attention import ATTENTION, Attention, build

#: Bytes of an element of XLA's types.
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "fsu" for bits in (32, 64)
}

_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]+)\]")


def arrays(program: str) -> set[tuple[str, tuple[int, ...]]]:
    """Type and shape of every array in the text of a compiled program."""
    return {
        (kind, tuple(int(n) for n in sizes.split(","))) for kind, sizes in _ARRAY.findall(program)
    }


def compile_mix(layer: Attention, *, batch: int, length: int, dim: int, dropout: bool) -> Any:
    """`layer.mix`, forward and backward, compiled for features of the given size.

    Args:
        layer: any mechanism.
        batch: B.
        length: L, in tokens.
        dim: width of the tokens that `project` would take.
        dropout: drops attention weights, at the layer's rate.
    """
    graph, state = nnx.split(layer)
    mask = jax.ShapeDtypeStruct((batch, length), bool)
    tokens = jax.ShapeDtypeStruct((batch, length, dim), jnp.float32)
    structure: Any = None

    def project(state: Any, x: Any, mask: Any) -> Any:
        # The arrays of the features and not the features: their class takes no abstract arrays.
        nonlocal structure
        features = nnx.merge(graph, state).project(x, mask)
        leaves, structure = jax.tree.flatten(features)
        return leaves, features.value

    leaves, value = jax.eval_shape(project, state, tokens, mask)
    key = jax.eval_shape(lambda: jax.random.key(0)) if dropout else None

    def forward_backward(leaves: Any, state: Any, mask: Any, key: Any, cotangent: Any) -> Any:
        def mix(leaves: Any) -> Any:
            features = jax.tree.unflatten(structure, leaves)
            return nnx.merge(graph, state).mix(features, mask, key)

        mixed, pull = jax.vjp(mix, leaves)
        return mixed, pull(cotangent)

    return jax.jit(forward_backward).lower(leaves, state, mask, key, value).compile()


def row(
    name: str, *, causal: bool, rate: float, batch: int, heads: int, length: int, width: int
) -> str:
    """One line of the table; for a form that the mechanism refuses, its reason.

    Args:
        name: of the mechanism.
        causal: the causal form.
        rate: of attention dropout.
        batch: B.
        heads: H.
        length: L, in tokens.
        width: K, of a head.
    """
    form = ("causal" if causal else "both") + (" dropout" if rate else "")
    start = f"{name:<14} {form:<15}"
    own = {"dropout": rate} if rate else {}
    try:
        layer = build(
            name,
            dim=heads * width,
            num_heads=heads,
            max_length=length,
            causal=causal,
            rngs=nnx.Rngs(0),
            **own,
        )
    except ValueError as error:
        return f"{start} refused: {error}"
    compiled = compile_mix(layer, batch=batch, length=length, dim=heads * width, dropout=rate > 0)
    seen = arrays(compiled.as_text())
    kind, shape = max(seen, key=lambda array: (BYTES[array[0]] * math.prod(array[1]), array))
    square = any(sum(n >= length for n in dims) > 1 for _, dims in seen)
    temporary = compiled.memory_analysis().temp_size_in_bytes / 1e6
    largest = f"{kind}[{','.join(map(str, shape))}]"
    megabytes = BYTES[kind] * math.prod(shape) / 1e6
    return f"{start} {temporary:11.1f} {largest:>28} {megabytes:8.1f}  {'yes' if square else 'no'}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention", nargs="+", choices=list(ATTENTION), default=list(ATTENTION), metavar="NAME"
    )
    parser.add_argument("--batch", type=at_least(1), default=1, help="B")
    parser.add_argument("--heads", type=at_least(1), default=4, help="H")
    parser.add_argument("--length", type=at_least(1), default=8192, help="L, in tokens")
    parser.add_argument("--width", type=at_least(1), default=64, help="K, of a head")
    parser.add_argument("--dropout", type=float, default=0.1, help="rate; 0: no such rows")
    args = parser.parse_args(argv)

    print(
        f"forward and backward of mix, {args.batch}×{args.heads}×{args.length}×{args.width} float32, "
        f"{jax.devices()[0].platform}; MB"
    )
    print(f"{'mechanism':<14} {'form':<15} {'temporary':>11} {'largest':>28} {'':>8}  L×L")
    for name in args.attention:
        rates = [0.0, args.dropout] if ATTENTION[name].has_weights and args.dropout else [0.0]
        for rate in rates:
            for causal in (False, True):
                line = row(
                    name,
                    causal=causal,
                    rate=rate,
                    batch=args.batch,
                    heads=args.heads,
                    length=args.length,
                    width=args.width,
                )
                print(line, flush=True)


if __name__ == "__main__":
    main()
