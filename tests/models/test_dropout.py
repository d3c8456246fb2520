"""The dropout mask: right rate, no pattern, and the same mask however it is cut."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.dropout import keep_multiplier

BATCH, HEADS, LENGTH = 2, 3, 192
SEED = (12345, 67890)


def multiplier(rate, *, seed=SEED, rows=None, columns=None, **options):
    rows = jnp.arange(LENGTH) if rows is None else rows
    columns = jnp.arange(LENGTH) if columns is None else columns
    words = jnp.array(seed, jnp.uint32)
    return np.asarray(keep_multiplier(words, rate, BATCH, HEADS, rows, columns, **options))


def z_of_correlation(a, b, rate):
    """Standard score of the correlation of two arrays of independent drops at a rate."""
    a, b = ((x == 0).astype(np.float64).ravel() - rate for x in (a, b))
    return (a * b).mean() / (rate * (1 - rate)) * np.sqrt(a.size)


@pytest.mark.parametrize("rate", (0.01, 0.1, 0.5, 0.9))
def test_rate_and_values(rate):
    mask = multiplier(rate)
    assert mask.shape == (BATCH, HEADS, LENGTH, LENGTH) and mask.dtype == np.float32
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - rate))}
    error = np.sqrt(rate * (1 - rate) / mask.size)
    assert abs((mask == 0).mean() - rate) < 4 * error


@pytest.mark.parametrize("rate", (0.1, 0.5))
def test_rows_columns_heads_and_examples_have_the_rate_each(rate):
    dropped = multiplier(rate) == 0
    for axes in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (3,), (2,)):
        shares = dropped.mean(axes)
        size = dropped.size / shares.size
        z = (shares - rate) / np.sqrt(rate * (1 - rate) / size)
        # Σ z² is chi-squared with as many degrees of freedom as there are shares.
        score = ((z**2).sum() - z.size) / np.sqrt(2 * z.size)
        assert abs(score) < 5, axes
        assert np.abs(z).max() < 6, axes


@pytest.mark.parametrize("rate", (0.1, 0.5))
def test_neighbours_are_independent(rate):
    mask = multiplier(rate)
    for lag in (1, 2, 3, 8, 16, 64, 128):
        assert abs(z_of_correlation(mask[:, :, lag:], mask[:, :, :-lag], rate)) < 5, lag
        assert abs(z_of_correlation(mask[..., lag:], mask[..., :-lag], rate)) < 5, lag
        diagonal = mask[:, :, lag:, lag:], mask[:, :, :-lag, :-lag]
        assert abs(z_of_correlation(*diagonal, rate)) < 5, lag
    assert abs(z_of_correlation(mask, mask.swapaxes(-1, -2), rate)) < 5 * np.sqrt(2)
    flat = mask.reshape(BATCH * HEADS, LENGTH, LENGTH)
    for i in range(len(flat)):
        for j in range(i):
            assert abs(z_of_correlation(flat[i], flat[j], rate)) < 5, (i, j)


@pytest.mark.parametrize("change", ((1, 0), (0, 1), (1 << 31, 0), (0, 1 << 31)))
def test_every_bit_of_the_seed_gives_another_mask(change):
    other = (SEED[0] ^ change[0], SEED[1] ^ change[1])
    mask, moved = multiplier(0.5), multiplier(0.5, seed=other)
    # Example by example and head by head: the low bits of the first word exchange whole heads.
    for b in range(BATCH):
        for h in range(HEADS):
            assert abs(z_of_correlation(mask[b, h], moved[b, h], 0.5)) < 5


def test_the_position_alone_decides():
    whole = multiplier(0.3)
    rows, columns = jnp.array([7, 100, 3]), jnp.arange(40, 90)
    part = multiplier(0.3, rows=rows, columns=columns)
    np.testing.assert_array_equal(part, whole[:, :, np.asarray(rows)][..., 40:90])


def test_key_major_is_the_transpose():
    rows, columns = jnp.arange(5, 20), jnp.arange(30)
    mask = multiplier(0.4, rows=rows, columns=columns)
    turned = multiplier(0.4, rows=rows, columns=columns, key_major=True)
    assert turned.shape == (BATCH, HEADS, 30, 15)
    np.testing.assert_array_equal(turned, mask.swapaxes(-1, -2))


def test_rate_0_keeps_everything():
    np.testing.assert_array_equal(multiplier(0.0), 1)
