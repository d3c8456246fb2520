"""Recomputing in the backward pass: the same gradients, from less that is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.dropout import Dropout
from models.recompute import recomputed

SEED = jnp.array([3, 4], jnp.uint32)


def function(norm, dense, x, seed, mask):
    noise = (seed[0] % 7).astype(x.dtype)
    return dense(jnp.where(mask, nnx.gelu(norm(x)) * noise, 0))


def losses(plain):
    """Σ of squares of the function's output, by its parameters and x."""
    modules = (nnx.LayerNorm(6, rngs=nnx.Rngs(0)), nnx.Linear(6, 5, rngs=nnx.Rngs(1)))
    graphs, states = zip(*map(nnx.split, modules), strict=True)

    def loss(states, x, mask):
        made = [nnx.merge(g, s) for g, s in zip(graphs, states, strict=True)]
        if plain:
            return (function(*made, x, SEED, mask) ** 2).sum()
        return (recomputed(function, made, x, SEED, mask) ** 2).sum()

    return loss, states


@pytest.mark.parametrize("jit", (False, True))
def test_values_and_gradients_are_those_of_the_function(jit, x64):
    x = jax.random.normal(jax.random.key(0), (2, 3, 6))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 3, 6))
    found = []
    for plain in (True, False):
        loss, states = losses(plain)
        run = jax.value_and_grad(loss, argnums=(0, 1))
        found.append((jax.jit(run) if jit else run)(states, x, mask))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def temporary(apply, shape=(8, 512, 256)):
    """Bytes of the compiled gradient of twelve applications, each followed by a product."""
    weights = jnp.eye(shape[-1])

    def loss(x):
        for _ in range(12):
            x = apply(x) @ weights
        return (x**2).sum()

    compiled = jax.jit(jax.grad(loss)).lower(jnp.zeros(shape)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_less_is_stored():
    def gelu(x):
        return nnx.gelu(nnx.gelu(x))

    assert temporary(lambda x: recomputed(gelu, (), x)) < 0.5 * temporary(gelu)


def test_dropout_stores_no_mask():
    def stored(x):
        return nnx.Dropout(0.3)(x, deterministic=False, rngs=nnx.Rngs(0))

    def drop(x):
        return Dropout(0.3)(x, deterministic=False, rngs=nnx.Rngs(dropout=0))

    # Without dropout nothing but x would be stored; masks would add an array for each.
    assert temporary(drop) < temporary(lambda x: x) + 3 * 4 * 8 * 512 * 256
    assert temporary(drop) < temporary(stored)


def test_dropout_drops_the_same_forward_and_backward():
    layer = Dropout(0.25)
    x = jnp.ones((4, 50, 30))

    def run(x):
        out = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=jax.random.key(5)))
        return out.sum(), out

    (_, out), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(x)
    np.testing.assert_array_equal(out, gradient)
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((np.asarray(out) == 0).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / out.size)
    with pytest.raises(ValueError, match="needs rngs"):
        layer(x, deterministic=False)
    np.testing.assert_array_equal(layer(x, deterministic=True), x)
