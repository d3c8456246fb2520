"""Positions: the tables, the rotation, and what a learned table refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.embeddings import POSITIONS, Embedding, cos_sin, rotate, sinusoids


class TestCosSin:
    @pytest.mark.parametrize(
        ("start", "length"),
        ((0, 7), (0, 1024), (0, 1025), (0, 2050), (1, 7), (1020, 10), (1024, 3), (2**20 - 3, 7),
         (2**20, 7), (2**30 - 7, 7)),
    )  # fmt: skip
    @pytest.mark.parametrize("traced", (False, True))
    def test_late_positions_are_as_exact_as_early_ones(self, start, length, traced):
        frequencies = np.array([1.0, 0.3, 1e-4])
        angles = (start + np.arange(length))[:, None] * frequencies
        if traced:
            run = jax.jit(lambda start: cos_sin(start, length, frequencies, jnp.float32))
            found = run(jnp.asarray(start))
        else:
            found = cos_sin(start, length, frequencies, jnp.float32)
        for table, exact in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
            # A few units in the last place of float32; at 2^30 the reference itself is off by 1e-7.
            np.testing.assert_allclose(table, exact, atol=5e-7)

    def test_positions_end(self):
        with pytest.raises(ValueError, match=r"end at 1073741824, asked for .* 1073741825"):
            cos_sin(2**30 - 6, 7, np.ones(1), jnp.float32)

    def test_a_long_table_is_not_a_constant_of_the_program(self):
        length = 2**16
        lowered = jax.jit(lambda: cos_sin(0, length, np.ones(16), jnp.float32)).lower()
        assert len(lowered.as_text()) < length * 16


class TestSinusoids:
    @pytest.mark.parametrize("dim", (2, 6, 7))
    def test_formula(self, dim):
        half = dim // 2
        table = sinusoids(11, dim)
        assert table.dtype == np.float32
        for t in range(11):
            for c in range(half):
                angle = t * 1e4 ** (-c / max(half - 1, 1))
                assert math.isclose(table[t, c], math.sin(angle), abs_tol=1e-7)
                assert math.isclose(table[t, half + c], math.cos(angle), abs_tol=1e-7)
        assert (table[:, 2 * half :] == 0).all()

    def test_a_single_channel_is_zero(self):
        np.testing.assert_array_equal(sinusoids(5, 1), np.zeros((5, 1)))

    def test_frequencies_end_at_1_and_1e_4(self):
        table = sinusoids(2, 8)
        np.testing.assert_allclose(table[1, [0, 3]], np.sin([1, 1e-4]), rtol=1e-6)

    def test_rows_do_not_depend_on_the_length(self):
        np.testing.assert_array_equal(sinusoids(4, 6), sinusoids(9, 6)[:4])


class TestRotate:
    @pytest.fixture
    def vectors(self):
        return jax.random.normal(jax.random.key(0), (2, 3, 50, 6))

    def test_formula(self, vectors):
        turned = np.asarray(rotate(vectors))
        for t in (0, 1, 49):
            for c in range(3):
                pair = vectors[..., t, c] + 1j * np.asarray(vectors[..., t, c + 3])
                expected = np.asarray(pair) * np.exp(1j * t * 1e4 ** (-2 * c / 6))
                np.testing.assert_allclose(turned[..., t, c], expected.real, atol=1e-5)
                np.testing.assert_allclose(turned[..., t, c + 3], expected.imag, atol=1e-5)

    def test_norms_stay(self, vectors):
        norms = np.linalg.norm(vectors, axis=-1)
        np.testing.assert_allclose(np.linalg.norm(rotate(vectors), axis=-1), norms, rtol=1e-5)

    def test_dot_products_depend_on_the_distance_only(self):
        query, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 8))
        query, key = (rotate(jnp.tile(x, (1, 1, 40, 1)))[0, 0] for x in (query, key))
        products = np.asarray(query @ key.T)
        for distance in (-30, -3, 0, 1, 17):
            diagonal = np.diagonal(products, distance)
            np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
        assert abs(products[0, 0] - products[0, 1]) > 1e-3

    def test_bfloat16_rounds_only_the_result(self, vectors):
        coarse = vectors.astype(jnp.bfloat16)
        turned = rotate(coarse)
        assert turned.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            turned, rotate(coarse.astype(jnp.float32)).astype(jnp.bfloat16)
        )


def embedding(positions, dim=4, dtype=jnp.float32):
    return Embedding(
        10, dim, positions=positions, max_length=6, rngs=nnx.Rngs(0), dtype=dtype
    )  # fmt: skip


class TestEmbedding:
    @pytest.mark.parametrize("positions", POSITIONS)
    @pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
    def test_what_is_added(self, positions, dtype):
        layer = embedding(positions, dtype=dtype)
        x = layer(jnp.array([[0, 9, 3, 3]]))
        assert x.dtype == dtype and x.shape == (1, 4, 4)
        np.testing.assert_array_equal(x[0, 2], layer.tokens.embedding[3].astype(dtype))
        out = layer.add_positions(x)
        assert out.dtype == dtype
        if positions == "learned":
            added = layer.position_table[...][:4]
        else:
            added = sinusoids(4, 4) if positions == "sinusoidal" else np.zeros((4, 4))
        np.testing.assert_array_equal(out, x + jnp.asarray(added, dtype))

    def test_only_learned_positions_are_parameters(self):
        sizes = {
            p: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(embedding(p), nnx.Param)))
            for p in POSITIONS
        }
        assert sizes == {"none": 40, "sinusoidal": 40, "learned": 40 + 24, "rotary": 40}

    def test_learned_positions_end(self):
        layer = embedding("learned")
        assert layer.add_positions(jnp.zeros((1, 6, 4))).shape == (1, 6, 4)
        with pytest.raises(ValueError, match=r"end at 6.* sequence of 7"):
            layer.add_positions(jnp.zeros((1, 7, 4)))

    def test_unknown_kind(self):
        with pytest.raises(ValueError, match=r"none, sinusoidal, learned, rotary; got 'sines'"):
            embedding("sines")
