"""Recurrences over chunks against the recurrence token by token, at gates from 1 to exactly 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import build, decay
from models.attention.deltanet import unit_silu

BATCH, HEADS, K, V = 2, 2, 4, 3
GATES = {"one": 0.0, "near one": -1e-4, "e^-20": -20.0, "e^-1e4": -1e4, "zero": -np.inf}


def arrays(length, width):
    """Queries, keys, values, β, cotangent; the second row ends in pads."""
    rng = np.random.default_rng(length)
    shapes = [(length, K), (length, K), (length, V), (length,), (length, V)]
    q, k, v, b, cotangent = (
        jnp.asarray(rng.standard_normal((BATCH, HEADS, *shape))) for shape in shapes
    )
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    counts = np.array([length, (length + 1) // 2])
    return q, k, v, jax.nn.sigmoid(b), cotangent, jnp.asarray(np.arange(length) < counts[:, None])


def gate_of(kind, length, width):
    """Log gates: one value, or a mixture of all of them and of random ones."""
    shape = (BATCH, HEADS, length, width)
    if kind in GATES:
        return jnp.full(shape, GATES[kind])
    rng = np.random.default_rng(7)
    kinds = rng.integers(0, 6, shape)
    random = -np.exp(rng.uniform(-6, 3, shape))
    return jnp.asarray(np.choose(kinds, [*[np.full(shape, g) for g in GATES.values()], random]))


def naive(q, k, v, g, mask, b=None):
    """Token by token."""

    def one(state, now):
        q, k, v, g, b, real = now
        decayed = jnp.exp(g)[..., None] * state
        told = jnp.einsum("bhkv,bhk->bhv", decayed, k)
        new = decayed + k[..., None] * (v if b is None else b[..., None] * (v - told))[:, :, None]
        state = jnp.where(real[:, None, None, None], new, state)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    g = jnp.broadcast_to(g, k.shape)
    time = tuple(None if a is None else jnp.moveaxis(a, 2, 0) for a in (q, k, v, g, b))
    start = jnp.zeros((BATCH, HEADS, K, V), q.dtype)
    state, out = jax.lax.scan(one, start, (*time, mask.T))
    return state, jnp.moveaxis(out, 0, 2)


def chunked(q, k, v, g, mask, b=None, chunk_size=16):
    state = jnp.zeros((BATCH, HEADS, K, V), q.dtype)
    if b is None:
        return decay.gated(state, q, k, v, g, mask, chunk_size=chunk_size)
    return decay.delta(state, q, k, v, b, g[..., 0], mask, chunk_size=chunk_size)


def check(kind, length, width, use_beta, chunk_size=16):
    q, k, v, b, cotangent, mask = arrays(length, width)
    g = gate_of(kind, length, width)
    beta = b if use_beta else None

    def run(form):
        def loss(q, k, v, g, b):
            state, out = form(q, k, v, g, mask, b if use_beta else None)
            out = jnp.where(mask[:, None, :, None], out, 0)
            return (out * cotangent).sum(), (state, out)

        wrt = (0, 1, 2, 3, 4) if use_beta else (0, 1, 2, 3)
        return jax.jit(jax.grad(loss, argnums=wrt, has_aux=True))(q, k, v, g, b)

    del beta
    fast = run(functools.partial(chunked, chunk_size=chunk_size))
    exact = run(naive)
    for a, c in zip(jax.tree.leaves(fast), jax.tree.leaves(exact), strict=True):
        scale = max(np.abs(np.asarray(c)).max(), 1)
        np.testing.assert_allclose(a, c, atol=1e-10 * scale)


ALL = (*GATES, "mixed")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("width", (1, K))
def test_gated(kind, width, x64):
    check(kind, 65, width, use_beta=False)


@pytest.mark.parametrize("kind", ALL)
def test_delta(kind, x64):
    check(kind, 65, 1, use_beta=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("length", (1, 63, 64, 1000))
@pytest.mark.parametrize(("width", "use_beta"), ((1, False), (K, False), (1, True)))
def test_lengths(kind, length, width, use_beta, x64):
    check(kind, length, width, use_beta)


@pytest.mark.parametrize("chunk_size", (1, 7, 100))
@pytest.mark.parametrize("use_beta", (False, True))
def test_chunk_sizes(chunk_size, use_beta, x64):
    check("mixed", 50, 1 if use_beta else K, use_beta, chunk_size)


def test_gate_1_is_unnormalised_linear_attention(x64):
    q, k, v, _, _, mask = arrays(65, K)
    out = chunked(q, k, v, jnp.zeros((BATCH, HEADS, 65, K)), mask)[1]
    seen = jnp.tril(jnp.ones((65, 65), bool)) & mask[:, None, None]
    expected = jnp.where(seen, q @ k.swapaxes(-1, -2), 0) @ v
    np.testing.assert_allclose(out, expected, atol=1e-10)


def test_orthonormal_keys_are_recalled_exactly_by_the_delta_rule(x64):
    """Each value is replaced, not added to, when its key comes again."""
    k = jnp.broadcast_to(jnp.tile(jnp.eye(K), (3, 1)), (BATCH, HEADS, 3 * K, K))
    v = jax.random.normal(jax.random.key(0), (BATCH, HEADS, 3 * K, V))
    ones, mask = jnp.ones((BATCH, HEADS, 3 * K)), jnp.ones((BATCH, 3 * K), bool)
    start = jnp.zeros((BATCH, HEADS, K, V))
    state, out = decay.delta(start, k, k, v, ones, 0 * ones, mask, chunk_size=5)
    np.testing.assert_allclose(out, v, atol=1e-12)
    np.testing.assert_allclose(state, v[:, :, -K:], atol=1e-12)


@pytest.mark.parametrize("size", (1, 2, 7, 16, 33))
def test_unit_lower_inverse(size, x64):
    lower = jax.random.normal(jax.random.key(size), (2, 3, size, size))
    inverse = decay.unit_lower_inverse(lower)
    matrix = np.tril(np.asarray(lower), -1) + np.eye(size)
    np.testing.assert_allclose(
        inverse @ matrix, np.broadcast_to(np.eye(size), lower.shape), atol=1e-8
    )


def test_long_products_of_small_gates_stay_numbers_in_float32():
    q, k, v, _, cotangent, mask = (
        a.astype(jnp.float32) if a.dtype != bool else a for a in arrays(200, K)
    )

    def loss(g):
        return (chunked(q, k, v, g, mask)[1] * cotangent).sum()

    for gate in (0.0, -5.0, -1000.0, -np.inf):
        value, slope = jax.value_and_grad(loss)(jnp.full((BATCH, HEADS, 200, K), gate))
        assert np.isfinite(value) and np.isfinite(slope).all()


def test_unit_silu_keeps_proportions_where_silu_underflows(x64):
    x = jnp.array([[-300.0, -301.0], [2.0, -1.0], [0.0, 0.0], [-1e4, -1e4]])
    wide = np.asarray(jax.nn.silu(x[1]))
    found = np.asarray(unit_silu(x.astype(jnp.float32)), np.float64)
    np.testing.assert_allclose(found[1], wide / np.linalg.norm(wide), rtol=1e-6)
    ratio = 301 / 300 * np.exp(-1)
    np.testing.assert_allclose(found[0], -np.array([1, ratio]) / np.hypot(1, ratio), rtol=1e-4)
    np.testing.assert_array_equal(found[2], 0)
    np.testing.assert_allclose(found[3], -(0.5**0.5), rtol=1e-4)


class TestStarts:
    @staticmethod
    def decays(name, **own):
        """Gates of a layer on a token of zeros, `[H, G]`."""
        layer = build(
            name, dim=32, num_heads=4, max_length=1000, causal=True, rngs=nnx.Rngs(0), **own
        )
        x, mask = jnp.zeros((1, 1, 32)), jnp.ones((1, 1), bool)
        features = layer.project(x, mask)
        return np.exp(np.asarray(layer.log_gate(features, features.gate)))[0, :, 0]

    def test_gla(self):
        np.testing.assert_allclose(self.decays("gla"), 0.5 ** (1 / 16), rtol=1e-5)
        times = -1 / np.log(self.decays("gla", gate_start="spread"))
        expected = 1000 ** ((np.arange(4) + 0.5) / 4)
        np.testing.assert_allclose(times, np.tile(expected, (4, 1)), rtol=1e-3)

    def test_retnet_and_lightning(self):
        np.testing.assert_allclose(self.decays("retnet")[:, 0], 1 - 2.0 ** -np.arange(5, 9))
        rates = np.log(self.decays("lightning", depth=0.5)[:, 0])
        np.testing.assert_allclose(rates, -8 / 4 * 0.5 * np.arange(1, 5), rtol=1e-6)

    @pytest.mark.parametrize("name", ("mamba2", "gated_deltanet"))
    def test_steps_and_rates(self, name):
        found = -np.log(self.decays(name)[:, 0])
        assert (found > 1e-3).all() and (found < 1.6).all()


@pytest.mark.parametrize("use_beta", (False, True))
def test_the_way_back_is_that_of_the_flipped_sequence(use_beta, x64):
    q, k, v, b, cotangent, mask = arrays(21, K)
    forward, back = gate_of("mixed", 21, 1), gate_of("e^-20", 21, 1) * cotangent[..., :1] ** 2
    flip = functools.partial(jnp.flip, axis=2)

    def one_way(q, k, v, b, g, mask):
        state = jnp.zeros((BATCH, HEADS, K, V))
        if use_beta:
            return decay.delta(state, q, k, v, b, g[..., 0], mask, chunk_size=8)
        return decay.gated(state, q, k, v, g, mask, chunk_size=8)

    def apart(q, k, v, b, forward, back):
        state, out = one_way(q, k, v, b, forward, mask)
        flipped = [flip(x) for x in (q, k, v, b, back)]
        return state, out + flip(one_way(*flipped, jnp.flip(mask, axis=1))[1])

    def together(q, k, v, b, forward, back):
        state = jnp.zeros((BATCH, HEADS, K, V))
        if use_beta:
            gate, more = forward[..., 0], {"log_gate_back": back[..., 0]}
            return decay.delta(state, q, k, v, b, gate, mask, chunk_size=8, **more)
        return decay.gated(state, q, k, v, forward, mask, chunk_size=8, log_gate_back=back)

    def slopes(form):
        def loss(*args):
            state, out = form(*args)
            return (out * cotangent).sum() + (state**2).sum(), (state, out)

        return jax.grad(loss, argnums=range(6), has_aux=True)(q, k, v, b, forward, back)

    for found, expected in zip(*map(jax.tree.leaves, map(slopes, (together, apart))), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-11)
