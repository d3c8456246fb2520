"""Backward passes that start from a function's arguments instead of its intermediate results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(function: Callable[..., Any], states: Any, x: Array, constants: Any) -> Any:
    return function(states, x, constants)


def _forward(function: Callable[..., Any], states: Any, x: Array, constants: Any) -> Any:
    return function(states, x, constants), (states, x, constants)


def _backward(function: Callable[..., Any], residuals: Any, cotangent: Any) -> Any:
    states, x, constants = residuals
    # `jax.checkpoint` alone does not save memory on the CPU: XLA drops its barriers there and finds
    # that what is computed again is there already. Zero times a cotangent, which no pass may drop,
    # makes it something new.
    first = next(
        leaf.ravel()[0]
        for leaf in jax.tree.leaves(cotangent)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    zero = jnp.where(jnp.isfinite(first), first, 0) * 0
    tie = functools.partial(jax.tree.map, lambda a: a + zero.astype(a.dtype))
    numbers, rest = _split(constants)
    constants = _join(tie(numbers), rest)
    _, pull = jax.vjp(lambda states, x: function(states, x, constants), states, tie(x))
    return *pull(cotangent), None


_call.defvjp(_forward, _backward)


def _split(constants: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Integers, which can be tied, and the rest (masks, None)."""
    tied = {
        i: c
        for i, c in enumerate(constants)
        if isinstance(c, jax.Array) and jnp.issubdtype(c.dtype, jnp.integer)
    }
    return tied, {i: c for i, c in enumerate(constants) if i not in tied}


def _join(a: dict[int, Any], b: dict[int, Any]) -> tuple[Any, ...]:
    both = {**a, **b}
    return tuple(both[i] for i in range(len(both)))


def recomputed(
    function: Callable[..., Any], modules: Sequence[nnx.Module], x: Array, *constants: Any
) -> Any:
    """`function(*modules, x, *constants)`; its backward pass computes what it needs from `x` anew.

    For what is cheap to compute and large to store: norms, activations, dropout. A product of
    matrices at the end is not computed twice, because its gradient does not need its result.

    Args:
        function: any; differentiable in the modules' parameters and in `x`.
        modules: what it uses.
        x: an array.
        *constants: arrays without gradients, or None.
    """
    graphs, states = zip(*map(nnx.split, modules), strict=True) if modules else ((), ())

    def pure(states: Any, x: Array, constants: Any) -> Any:
        merged = [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]
        return function(*merged, x, *constants)

    return _call(pure, states, x, constants)
