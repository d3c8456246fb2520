"""Scalings of softmax's logits: what each does to a row, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import Features, build
from models.attention.base import SpectralLinear
from models.attention.softmax import seen_keys

LENGTH, WIDTH = 12, 4
MASK = jnp.asarray(np.arange(LENGTH) < np.array([LENGTH, 5])[:, None])


def make(causal=False, name="softmax", **own):
    return build(
        name, dim=8, num_heads=2, max_length=64, causal=causal, rngs=nnx.Rngs(0), **own
    )  # fmt: skip


def features(size=1.0):
    query, key = size * jax.random.normal(jax.random.key(0), (2, 2, 2, LENGTH, WIDTH))
    return Features(query, key, jax.random.normal(jax.random.key(1), (2, 2, LENGTH, WIDTH)))


def rows(layer, given):
    """Weights that `mix` applies, from one-hot values in pieces of the value's width."""
    eye = jnp.eye(LENGTH)
    pieces = []
    for first in range(0, LENGTH, WIDTH):
        value = jnp.broadcast_to(eye[:, first : first + WIDTH], given.value.shape)
        pieces.append(layer.mix(Features(given.query, given.key, value), MASK))
    return jnp.concatenate(pieces, -1)


def entropy(p):
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)


def by_hand(given, factor, causal=False):
    """Softmax over real keys of `factor` times the logits."""
    logits = np.asarray(given.query @ given.key.swapaxes(-1, -2)) / WIDTH**0.5 * factor
    seen = np.asarray(MASK)[:, None, None] & (np.tri(LENGTH, dtype=bool) if causal else True)
    weights = np.where(seen, np.exp(np.where(seen, logits, 0)), 0)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("causal", (False, True))
def test_length_counts_real_keys_that_are_seen(causal):
    counts = np.asarray(seen_keys(MASK, causal))[:, 0]
    if causal:
        np.testing.assert_array_equal(counts[0], np.arange(1, 13))
        np.testing.assert_array_equal(counts[1], [1, 2, 3, 4, 5, *[5] * 7])
    else:
        np.testing.assert_array_equal(counts, [[12], [5]])
    np.testing.assert_array_equal(seen_keys(jnp.zeros((1, 3), bool), causal), 1)


@pytest.mark.parametrize("causal", (False, True))
def test_ssmax_multiplies_by_s_ln_n(causal):
    layer = make(causal, "ssmax")
    assert float(layer.length_factor[...][0]) == pytest.approx(1 / np.log(64))
    layer.length_factor[...] = jnp.array([0.5, 2.0])
    count = np.asarray(seen_keys(MASK, causal))[..., None]
    factor = np.array([0.5, 2.0])[:, None, None] * np.log(count)
    expected = by_hand(features(), factor, causal)
    np.testing.assert_allclose(rows(layer, features()), expected, rtol=1e-4, atol=1e-6)


def test_the_others():
    given = features()
    fixed = make(scale="fixed", temperature=4.0)
    np.testing.assert_allclose(rows(fixed, given), by_hand(given, 0.25), rtol=1e-4, atol=1e-6)
    learned = make(scale="learned")
    np.testing.assert_allclose(rows(learned, given), by_hand(given, 1), rtol=1e-4, atol=1e-6)
    learned.log_multiplier[...] = jnp.log(jnp.array([3.0, 0.5]))
    factor = np.array([3.0, 0.5])[:, None, None]
    np.testing.assert_allclose(rows(learned, given), by_hand(given, factor), rtol=1e-4, atol=1e-6)
    based = make(scale="log_base", log_base=512.0)
    factor = np.log([12, 5])[:, None, None, None] / np.log(512)
    np.testing.assert_allclose(rows(based, given), by_hand(given, factor), rtol=1e-4, atol=1e-6)


def test_a_sink_takes_weight_and_leaves_the_ratios():
    layer, given = make(sink=True), features()
    layer.sink[...] = jnp.array([1.0, -2.0])
    logits = np.asarray(given.query @ given.key.swapaxes(-1, -2)) / WIDTH**0.5
    seen = np.broadcast_to(np.asarray(MASK)[:, None, None], logits.shape)
    weights = np.where(seen, np.exp(logits), 0)
    sink = np.exp([1.0, -2.0])[:, None, None]
    expected = weights / (weights.sum(-1, keepdims=True) + sink)
    np.testing.assert_allclose(rows(layer, given), expected, rtol=1e-4, atol=1e-6)


def test_adaptive_temperature_sharpens_by_the_published_polynomial_in_inference_only():
    layer, given = make(scale="adaptive"), features(2.0)
    np.testing.assert_allclose(rows(layer, given), by_hand(given, 1), rtol=1e-4, atol=1e-6)
    h = entropy(by_hand(given, 1))
    beta = -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791
    beta = np.where(h > 0.5, np.maximum(beta, 1), 1)
    assert beta.max() > 1.1 and beta.min() == 1
    adapted = layer.adapt(given, MASK)
    real = np.asarray(MASK)[:, None, :, None]
    expected = np.where(real, by_hand(given, beta[..., None]), 0)
    found = np.where(real, rows(layer, adapted), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    x = jax.random.normal(jax.random.key(3), (2, LENGTH, 8)) * 2
    used, unused = (layer(x, mask=MASK, deterministic=flag) for flag in (True, False))
    assert np.abs(used - unused)[0].max() > 1e-3


def test_sigma_reparam_makes_the_spectral_norm_a_parameter():
    layer = make(sigma_reparam=True)
    assert layer.redraw_interval == 1
    for projection in (layer.query, layer.key):
        assert isinstance(projection, SpectralLinear)
        effective = np.asarray(projection(jnp.eye(8)[None]))[0]
        assert np.linalg.norm(effective, 2) == pytest.approx(1, rel=1e-5)
        projection.gain[...] = jnp.asarray(2.5)
        effective = np.asarray(projection(jnp.eye(8)[None]))[0]
        assert np.linalg.norm(effective, 2) == pytest.approx(2.5, rel=1e-5)
    # The estimate follows a matrix that has changed.
    layer.query.kernel[...] = jax.random.normal(jax.random.key(0), (8, 8))
    for _ in range(200):
        layer.redraw(jax.random.key(0))
    effective = np.asarray(layer.query(jnp.eye(8)[None]))[0]
    assert np.linalg.norm(effective, 2) == pytest.approx(2.5, rel=1e-3)
