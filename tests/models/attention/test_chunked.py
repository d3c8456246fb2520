"""Chunked linear attention against the sums written down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import chunked
from models.attention.base import visible

BATCH, HEADS, LENGTH, FEATURES, WIDTH = 3, 2, 20, 4, 5
#: Row 1 is half padding, row 2 padding alone.
MASK = jnp.asarray(np.arange(LENGTH) < np.array([LENGTH, 10, 0])[:, None])


def arrays():
    """φ(q) and φ(k), positive; values; a cotangent."""
    rng = np.random.default_rng(0)
    query, key = np.exp(rng.standard_normal((2, BATCH, HEADS, LENGTH, FEATURES)))
    value, cotangent = rng.standard_normal((2, BATCH, HEADS, LENGTH, WIDTH))
    dtype = start().outer.dtype
    return tuple(jnp.asarray(x, dtype) for x in (query, key, value, cotangent))


def start():
    dtype = jnp.promote_types(jnp.ones(()).dtype, jnp.float32)
    return chunked.LinearState.zeros(BATCH, HEADS, FEATURES, WIDTH, dtype)


def causal(query, key, value, mask=MASK, chunk_size=7):
    sums = chunked.causal(start(), query, key, value, mask, chunk_size=chunk_size)[1]
    return chunked.divide(sums.numerator, sums.denominator)


def bidirectional(query, key, value, mask=MASK):
    sums = chunked.bidirectional(query, key, value, mask)
    return chunked.divide(sums.numerator, sums.denominator)


def naive(query, key, value, mask=MASK, causal=True):
    weights = jnp.where(visible(mask, query.shape[2], causal), query @ key.swapaxes(-1, -2), 0)
    total = weights.sum(-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0) @ value


@functools.cache
def reference(causal):
    """Output and gradients of the sums, in float64."""
    return with_gradients(functools.partial(naive, causal=causal))(*arrays())


def with_gradients(attend):
    """Output and gradients, compiled."""

    @jax.jit
    def run(query, key, value, cotangent):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(cotangent)

    return run


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("chunk_size", (1, 3, 16, LENGTH, LENGTH + 100))
def test_causal_at_any_chunk_size(chunk_size, x64):
    fast = with_gradients(functools.partial(causal, chunk_size=chunk_size))(*arrays())
    assert_close(fast, reference(True))


def test_bidirectional(x64):
    assert_close(with_gradients(bidirectional)(*arrays()), reference(False))


def decays():
    """Log scales from −50 to 50, log gates from 0 to −1000."""
    rng = np.random.default_rng(1)
    shape = (BATCH, HEADS, LENGTH)
    gates = -np.exp(rng.uniform(-8, 7, shape)) * (rng.random(shape) < 0.7)
    return jnp.asarray(50 * rng.uniform(-1, 1, shape)), jnp.asarray(gates)


def naive_decayed(query, key, value, scale, gate):
    """The sums written down, relative to each row's largest weight."""
    gate = jnp.where(MASK[:, None], gate, 0)
    seen = visible(MASK, LENGTH, True)
    logs = scale[..., None, :] + chunked.segment_sums(gate)
    logs = jnp.where(seen, logs, -jnp.inf)
    top = logs.max(-1, keepdims=True)
    strength = jnp.where(seen, jnp.exp(logs - jnp.where(jnp.isfinite(top), top, 0)), 0)
    weights = query @ key.swapaxes(-1, -2) * strength
    return weights @ value, weights.sum(-1), strength.sum(-1)


@pytest.mark.parametrize("chunk_size", (1, 3, LENGTH))
def test_scales_and_gates(chunk_size, x64):
    query, key, value, cotangent = arrays()
    scale, gate = decays()

    def fast(*args):
        sums = chunked.causal(
            start(), *args[:3], MASK, chunk_size=chunk_size, log_scale=args[3], log_gate=args[4]
        )[1]
        return sums.numerator, sums.denominator, sums.count

    def ratio(form):
        def run(*args):
            numerator, denominator, _ = form(*args)
            return (chunked.divide(numerator, denominator) * cotangent).sum()

        return jax.jit(jax.grad(run, argnums=(0, 1, 2, 3, 4)))

    args = (query, key, value, scale, gate)
    assert_close(jax.jit(fast)(*args), naive_decayed(*args))
    assert_close(ratio(fast)(*args), ratio(naive_decayed)(*args))


def test_segment_sums_do_not_cancel():
    sums = chunked.segment_sums(jnp.array([0.0, -1e8, -0.5, -0.25]))
    np.testing.assert_allclose(sums[3], [-1e8, -0.75, -0.25, 0], rtol=1e-6)
    np.testing.assert_array_equal(sums[0], 0)


def test_continued_state(x64):
    query, key, value, _ = arrays()
    expected = reference(True)[0]
    step = jax.jit(functools.partial(chunked.causal, chunk_size=3))
    state, outputs, first = start(), [], 0
    for last in (7, 8, 20):
        parts = (x[:, :, first:last] for x in (query, key, value))
        state, sums = step(state, *parts, MASK[:, first:last])
        outputs.append(chunked.divide(sums.numerator, sums.denominator))
        first = last
    np.testing.assert_allclose(np.concatenate(outputs, 2), expected, atol=1e-10)
    real = jnp.where(MASK[:, None, :, None], key, 0)
    np.testing.assert_allclose(state.normaliser, real.sum(2), atol=1e-10)
    outer = jnp.einsum("bhsm,bhsk->bhmk", real, value)
    np.testing.assert_allclose(state.outer, outer, atol=1e-10)


def test_pads_leave_the_state_as_it_is(x64):
    query, key, value, _ = arrays()
    step = jax.jit(functools.partial(chunked.causal, chunk_size=6))
    before, _ = step(start(), query, key, value, MASK)
    after, _ = step(before, query, key, value, jnp.zeros_like(MASK))
    np.testing.assert_array_equal(after.outer, before.outer)
    np.testing.assert_array_equal(after.normaliser, before.normaliser)


@pytest.mark.parametrize("form", (causal, bidirectional))
def test_what_pads_hold_does_not_matter(form):
    query, key, value, cotangent = arrays()
    real = MASK[:, None, :, None]
    run = with_gradients(form)
    expected = run(query, jnp.where(real, key, 0), jnp.where(real, value, 0), cotangent)
    for fill in (np.nan, np.inf):
        found = run(query, jnp.where(real, key, fill), jnp.where(real, value, fill), cotangent)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    out, *gradients = expected
    assert all(np.isfinite(x).all() for x in expected)
    # The row of pads alone.
    for array in (out, *gradients):
        np.testing.assert_array_equal(array[2], 0)


def test_sums_of_bfloat16_are_in_float32():
    ones = jnp.ones((1, 1, 1000, 1), jnp.bfloat16)
    mask = jnp.ones((1, 1000), bool)
    state = chunked.LinearState.zeros(1, 1, 1, 1, jnp.dtype("float32"))
    state, sums = chunked.causal(state, ones, ones, ones, mask, chunk_size=100)
    # A sum in bfloat16 sticks at 256.
    assert state.normaliser.dtype == jnp.float32 and state.normaliser[0, 0, 0] == 1000
    assert state.outer[0, 0, 0, 0] == 1000
    assert sums.denominator[0, 0, -1] == sums.count[0, 0, -1] == 1000
    both = chunked.bidirectional(ones, ones, ones, mask)
    assert both.numerator[0, 0, 0, 0] == both.denominator[0, 0, 0] == both.count[0, 0, 0] == 1000


def test_divide():
    def total(numerator, denominator):
        return chunked.divide(numerator, denominator).sum()

    numerator, denominator = jnp.full((1, 1, 2, 1), 6.0), jnp.array([[[3.0, 0.0]]])
    np.testing.assert_array_equal(chunked.divide(numerator, denominator).ravel(), [2, 0])
    d_numerator, d_denominator = jax.grad(total, argnums=(0, 1))(numerator, denominator)
    np.testing.assert_allclose(d_numerator.ravel(), [1 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(d_denominator.ravel(), [-6 / 9, 0], rtol=1e-6)
