"""The seven-point contract, for every entry of the registry, forward and gradients."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.common import ATTENTION_DEFAULTS
from models.attention import ATTENTION, Attention, build

DIM, HEADS = 16, 2
#: 1, odd, around one chunk of a power of two, and across the blocks of the blockwise kernels.
LENGTHS = (65, 7, 257)
MORE_LENGTHS = (1, 64, 600)

#: Settings of a mechanism beside its defaults.
VARIANTS = {
    "softmax": (
        {"scale": "fixed", "temperature": 2.0},
        {"scale": "learned"},
        {"scale": "log_base"},
        {"scale": "adaptive"},
        {"sink": True},
        {"sigma_reparam": True},
    ),
    "linear": (
        {"feature_map": "relu"},
        {"feature_map": "relu2"},
        {"feature_map": "exp"},
        {"normalise": False},
        {"feature_map": "relu", "normalise": False},
    ),
    "taylor": ({"normalise": False, "feature_dim": 6},),
    "hedgehog": ({"normalise": False},),
    "performer": ({"num_features": 13}, {"kernel": "relu", "redraw_interval": 0}),
    "rfa": ({"feature_map": "arccos", "num_features": 5}, {"gate": True}),
    "gla": ({"gate_start": "spread", "chunk_size": 7}, {"output_gate": False}),
    "deltanet": ({"beta_max": 2.0, "output_gate": True},),
}


class Case:
    """A mechanism with its keywords and direction."""

    def __init__(self, name, own, causal):
        self.name, self.own, self.causal = name, own, causal

    def __repr__(self):
        told = "".join(f",{key}={value}" for key, value in self.own.items())
        return f"{self.name}{told}-{'causal' if self.causal else 'both'}"

    def make(self, length=64, dtype=jnp.float32, **own):
        """A layer with its parameters moved off where they start, so that each has an effect."""
        own = {**ATTENTION_DEFAULTS[self.name], **self.own, **own}
        try:
            layer = build(
                self.name, dim=DIM, num_heads=HEADS, max_length=length, causal=self.causal,
                rngs=nnx.Rngs(0), dtype=dtype, **own,
            )  # fmt: skip
        except ValueError as error:
            if self.causal and "causal" in str(error):
                pytest.skip(f"refuses to be causal: {error}")
            raise
        params = nnx.state(layer, nnx.Param)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(9), len(leaves))
        moved = [
            leaf + 0.1 * jax.random.normal(k, leaf.shape, leaf.dtype)
            for leaf, k in zip(leaves, keys, strict=True)
        ]
        nnx.update(layer, jax.tree.unflatten(tree, moved))
        return layer


DEFAULTS = [Case(name, {}, causal) for name in ATTENTION for causal in (False, True)]
FURTHER = [
    Case(name, own, causal)
    for name, variants in VARIANTS.items()
    for own in variants
    for causal in (False, True)
]


def cases(also=(), causal_only=False, further=False):
    """Parametrises by case, and by the values of `also`: defaults fast, the rest marked slow.

    Args:
        further: with the settings of `VARIANTS` as well, at the first of the values.
        also: (name, fast values, values that only the defaults take, and only in the slow run).
        causal_only: leaves bidirectional cases out.
    """
    fast, slow = ([], [])
    name, few, more = also or (None, (None,), ())
    for group, values, target in (
        (DEFAULTS, few, fast),
        (DEFAULTS, more, slow),
        (FURTHER if further else [], few[:1], slow),
    ):
        for case in group:
            if case.causal or not causal_only:
                target += [(case, value) for value in values]
    marked = [(entry, ()) for entry in fast] + [(entry, pytest.mark.slow) for entry in slow]
    if name is None:
        return pytest.mark.parametrize(
            "case",
            [pytest.param(case, marks=marks, id=repr(case)) for (case, _), marks in marked],
        )
    return pytest.mark.parametrize(
        ("case", name),
        [
            pytest.param(case, value, marks=marks, id=f"{case!r}-{value}")
            for (case, value), marks in marked
        ],
    )


def tokens(batch, length, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (batch, length, DIM), dtype)


def ragged_mask(batch, length):
    """Row b has b·L/3 pads on the right; the last row has none to spare beyond one real token."""
    counts = np.maximum(length - np.arange(batch) * length // 3, 1)
    return jnp.asarray(np.arange(length) < counts[:, None])


def jitted(layer, method):
    """`method(layer, …)` compiled, with the layer's parameters as an argument."""
    graph, state = nnx.split(layer)
    compiled = jax.jit(lambda state, *args: method(nnx.merge(graph, state), *args))
    return lambda *args: compiled(state, *args)


def call(layer, x, mask):
    return layer(x, mask=mask, deterministic=True)


def project_and_mix(layer, x, mask):
    features = layer.project(x, mask)
    return features, layer.mix(features, mask)


def relative(a, b):
    """Largest difference of two trees, relative to the largest magnitude in b.

    One scale for outputs and gradients together: with a single token the gradients of queries and
    keys are 0, and only rounding is left to compare.
    """
    a, b = ([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (a, b))
    scale = max(np.abs(y).max() for y in b)
    return max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) / max(scale, 1e-30)


def rounding(layer):
    """How far two float32 results of the same sums in another order may be apart, relative.

    A norm of each head makes rows that nearly cancel as large as the others, and their rounding with
    them.
    """
    return 1e-6 if getattr(layer, "head_norm", None) is None else 4e-6


def mixed_and_gradients(layer, features, mask, cotangent, reference):
    """Σ cotangent ∘ o over real queries, with gradients to every array of the features."""

    def scalar(features):
        naive = layer.weights(features, mask) @ features.value if reference else None
        out = layer.mix(features, mask) if naive is None else naive
        out = jnp.where(mask[:, None, :, None], out, 0)
        return (out * cotangent).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(features)
    return out, gradients


class TestReference:
    """1. Equal to the naive reference."""

    @cases(("length", LENGTHS, MORE_LENGTHS), further=True)
    def test_float64(self, case, length, x64):
        layer = case.make(length, jnp.float64)
        mask = ragged_mask(2, length)
        features = jitted(layer, type(layer).project)(tokens(2, length, dtype=jnp.float64), mask)
        cotangent = jax.random.normal(jax.random.key(1), features.value.shape, jnp.float64)
        fast = mixed_and_gradients(layer, features, mask, cotangent, reference=False)
        naive = mixed_and_gradients(layer, features, mask, cotangent, reference=True)
        assert fast[0].dtype == jnp.float64
        assert relative(fast, naive) < 1e-10

    @cases(("length", (257,), (600,)))
    def test_float32(self, case, length):
        layer = case.make(length)
        mask = ragged_mask(2, length)
        features = jitted(layer, type(layer).project)(tokens(2, length), mask)
        cotangent = jax.random.normal(jax.random.key(1), features.value.shape)
        fast = mixed_and_gradients(layer, features, mask, cotangent, reference=False)
        naive = mixed_and_gradients(layer, features, mask, cotangent, reference=True)
        assert relative(fast, naive) < 1e-5

    @cases()
    def test_linear_in_value_with_one_matrix(self, case):
        """The promise that lets one vector-Jacobian product measure any mechanism."""
        layer = case.make()
        mask = ragged_mask(2, 64)
        features = jitted(layer, type(layer).project)(tokens(2, 64), mask)
        width = features.value.shape[-1]
        query = 40 % width
        cotangent = jnp.zeros(features.value.shape).at[:, :, 40, query].set(1.0)

        @jax.jit
        def rows_of(value):
            return jax.vjp(lambda v: layer.mix(_with_value(features, v), mask), value)[1](cotangent)

        (rows,) = rows_of(features.value)
        assert relative(rows[..., query], layer.weights(features, mask)[:, :, 40]) < 1e-5
        others = np.delete(np.asarray(rows), query, axis=-1)
        np.testing.assert_allclose(others, 0, atol=1e-7 * max(np.abs(rows).max(), 1))


def _with_value(features, value):
    return dataclasses.replace(features, value=value)


class TestPadding:
    """2. Padding changes nothing."""

    @cases(("batch", (3,), (1,)), further=True)
    def test_number_and_content_of_pads(self, case, batch):
        layer = case.make(64)
        x = tokens(batch, 41)
        run = jitted(layer, call)
        bound = rounding(layer)
        alone = run(x, jnp.ones((batch, 41), bool))
        for pads, fill in ((1, 0.0), (600, -1e4), (600, np.nan), (600, np.inf)):
            padded = jnp.pad(x, ((0, 0), (0, pads), (0, 0)), constant_values=fill)
            mask = jnp.arange(41 + pads) < 41
            out = run(padded, jnp.broadcast_to(mask, (batch, 41 + pads)))
            assert relative(out[:, :41], alone) < bound

    @cases()
    def test_features_of_pads(self, case):
        """`mix` itself is right about the mask, whatever `project` made of the pads."""
        layer = case.make(64)
        mask = ragged_mask(3, 64)
        features = jitted(layer, type(layer).project)(tokens(3, 64), mask)
        junk = jax.tree.map(
            lambda a: jnp.where(mask.reshape(3, 1, 64, *([1] * (a.ndim - 3))), a, 1e3), features
        )
        keep = np.asarray(mask)[:, None, :, None]
        mix = jitted(layer, type(layer).mix)
        good, bad = mix(features, mask), mix(junk, mask)
        assert relative(np.where(keep, bad, 0), np.where(keep, good, 0)) < 1e-6

    @cases(further=True)
    def test_row_of_pads_alone(self, case):
        layer = case.make(64)
        x = tokens(2, 64)
        # Beside a row of tokens alone: what is no number in one spreads to the parameters of all.
        mask = jnp.zeros((2, 64), bool).at[1].set(True)
        graph, state = nnx.split(layer)

        def loss(state, x):
            out = call(nnx.merge(graph, state), x, mask)
            return (out**2).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
            state, x
        )
        assert np.isfinite(out).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        np.testing.assert_array_equal(jitted(layer, project_and_mix)(x, mask)[1][0], 0)


class TestCausal:
    """3. Causal means causal."""

    @cases(causal_only=True, further=True)
    def test_future_does_not_move_the_past(self, case):
        layer = case.make(300, short_conv=3)
        x = tokens(2, 300)
        mask = jnp.ones((2, 300), bool)
        run = jitted(layer, call)
        before = run(x, mask)
        for cut in (1, 100, 128, 256, 299):
            for change in (1.0, 1e3):
                moved = run(x.at[:, cut:].add(change), mask)
                assert relative(moved[:, :cut], before[:, :cut]) < 1e-6
                assert relative(moved[:, cut:], before[:, cut:]) > 1e-6

    @pytest.mark.parametrize("case", [c for c in DEFAULTS if not c.causal], ids=repr)
    def test_bidirectional_sees_both_sides(self, case):
        layer = case.make(64)
        x = tokens(1, 64)
        mask = jnp.ones((1, 64), bool)
        run = jitted(layer, call)
        moved = run(x.at[:, 50].add(10.0), mask)
        assert relative(moved[:, :50], run(x, mask)[:, :50]) > 1e-6


class TestSameExampleSameResult:
    """4. Alone, in a batch, again, after a reload, with and without jit."""

    @cases()
    def test_everywhere(self, case):
        layer = case.make(100)
        x, mask = tokens(4, 100), ragged_mask(4, 100)
        keep = np.asarray(mask)[..., None]
        run = jitted(layer, call)
        full = np.where(keep, run(x, mask), 0)
        single = jnp.concatenate([run(x[b : b + 1], mask[b : b + 1]) for b in range(4)])
        bound = rounding(layer)
        assert relative(np.where(keep, single, 0), full) < bound
        np.testing.assert_array_equal(np.where(keep, run(x, mask), 0), full)
        graph, state = nnx.split(layer)
        stored = jax.tree.map(np.asarray, state)
        other = jitted(nnx.merge(graph, jax.tree.map(jnp.asarray, stored)), call)
        np.testing.assert_array_equal(np.where(keep, other(x, mask), 0), full)
        assert relative(np.where(keep, call(layer, x, mask), 0), full) < bound


class TestRange:
    """5. bfloat16, and values at the ends of the range."""

    @cases()
    def test_bfloat16_is_close_to_float32(self, case):
        x, mask = tokens(2, 257), ragged_mask(2, 257)
        exact = case.make(257)
        coarse = case.make(257, jnp.bfloat16)
        out = jitted(coarse, call)(x.astype(jnp.bfloat16), mask)
        assert out.dtype == jnp.bfloat16 and np.isfinite(np.asarray(out, np.float32)).all()
        # 8 bits of mantissa: 2^-8 for each of a handful of roundings along the way.
        if getattr(exact, "head_norm", None) is None:
            keep = np.asarray(mask)[..., None]
            wanted = jitted(exact, call)(x, mask)
        else:
            # In front of the norm of each head, which makes rows that nearly cancel as large as others.
            keep = np.asarray(mask)[:, None, :, None]
            out = jitted(coarse, project_and_mix)(x.astype(jnp.bfloat16), mask)[1]
            wanted = jitted(exact, project_and_mix)(x, mask)[1]
        # A recurrence in both directions adds two results, of which parts may cancel.
        both = hasattr(exact, "scan") and not case.causal
        bound = 6e-2 if both else 3e-2
        assert relative(np.where(keep, out, 0), np.where(keep, wanted, 0)) < bound

    @cases(("dtype", ("float32",), ("bfloat16",)), further=True)
    def test_extreme_features(self, case, dtype, x64):
        """Values and gradients stay finite and near the float64 reference on the same features."""
        layer = case.make(70, jnp.dtype(dtype))
        mask = ragged_mask(2, 70)
        plain = jitted(layer, type(layer).project)(tokens(2, 70, dtype=jnp.dtype(dtype)), mask)
        cotangent = jnp.ones(plain.value.shape, plain.value.dtype)
        graph, state = nnx.split(layer)

        @jax.jit
        def both(state, features):
            layer = nnx.merge(graph, state)
            fast = mixed_and_gradients(layer, features, mask, cotangent, reference=False)
            wide = jax.tree.map(lambda a: a.astype(jnp.float64), features)
            return *fast, layer.weights(wide, mask)

        for size, sign in itertools.product((1e-4, 30.0, 1e4), (None, -1.0, 1.0)):
            features = jax.tree.map(
                lambda a: (size * jnp.abs(a) * (sign or jnp.sign(a))).astype(a.dtype),  # noqa: B023
                plain,
            )
            features = _with_value(features, plain.value)
            out, gradients, weights = both(state, features)
            where = f"{size} {sign}"
            for leaf in jax.tree.leaves((out, gradients)):
                assert np.isfinite(np.asarray(leaf, np.float64)).all(), where
            value = features.value.astype(jnp.float64)
            exact = jnp.where(mask[:, None, :, None], weights @ value, 0)
            # Relative to the values that are mixed. Logits near 1e8 have a spacing of 8 in float32, so
            # two nearly equal ones may change places there: only finiteness is asked of those.
            if size < 1e4 or not layer.has_weights:
                bound = {"float32": 1e-4, "bfloat16": 5e-2}[dtype]
                # exp(-1e4) is 0 in float64 too: rows in which the reference itself has nothing left.
                left = weights.any(-1, keepdims=True)
                wrong = np.where(left, np.asarray(out, np.float64) - exact, 0)
                largest = np.abs(value).max() * max(1, np.abs(weights).sum(-1).max())
                assert np.abs(wrong).max() < bound * largest, where


class TestMemory:
    """6. No L×L buffer, forward or backward."""

    @cases()
    def test_no_square_buffer(self, case):
        length = 4099  # prime: no other product of sizes looks like it
        layer = case.make(length, **({"dropout": 0.1} if ATTENTION[case.name].has_weights else {}))
        graph, state = nnx.split(layer)

        def loss(state, x, mask, key):
            layer = nnx.merge(graph, state)
            out = layer(x, mask=mask, deterministic=False, rngs=nnx.Rngs(dropout=key))
            return (out**2).sum()

        compiled = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
            .lower(state, tokens(1, length), jnp.ones((1, length), bool), jax.random.key(0))
            .compile()
        )
        shapes = {
            tuple(int(n) for n in dims.split(",") if n)
            for dims in re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]*)\]", compiled.as_text())
        }
        assert any(length in shape for shape in shapes), "the pattern no longer reads the program"
        # By size, so that a square that was reshaped or cut into blocks is found too.
        assert not [shape for shape in shapes if math.prod(shape) >= length**2]


class TestForms:
    """7. Parallel, chunked and recurrent forms agree."""

    @cases(("pieces", ((7, 1, 32),), ((1,) * 40,)), causal_only=True, further=True)
    def test_recurrent(self, case, pieces, x64):
        layer = case.make(40, jnp.float64)
        if type(layer).step is Attention.step:
            pytest.skip("no state of fixed size")
        mask = ragged_mask(2, 40)
        features = layer.project(tokens(2, 40, dtype=jnp.float64), mask)
        step = jitted(layer, type(layer).step)
        state = layer.init_state(2)
        outputs, start = [], 0
        for size in pieces:
            part = jax.tree.map(lambda a: a[:, :, start : start + size], features)  # noqa: B023
            state, out = step(state, part, mask[:, start : start + size])
            outputs.append(out)
            start += size
        keep = np.asarray(mask)[:, None, :, None]
        joined = np.where(keep, np.concatenate(outputs, axis=2), 0)
        assert relative(joined, np.where(keep, layer.mix(features, mask), 0)) < 1e-10
        parallel = layer.weights(features, mask) @ features.value
        assert relative(joined, np.where(keep, parallel, 0)) < 1e-10


class TestCosts:
    """What the report says of state and FLOPs."""

    @cases()
    def test_state_is_what_the_recurrent_form_keeps(self, case):
        layer = case.make(64)
        floats = layer.state_floats(64)
        assert floats > 0 and layer.mixing_flops(64) > 0
        if type(layer).step is Attention.step or not layer.causal:
            return
        kept = sum(leaf.size for leaf in jax.tree.leaves(layer.init_state(1)))
        assert floats <= kept <= floats + 2 * HEADS
        assert layer.state_floats(10**6) == floats
        assert layer.mixing_flops(10**6) == layer.mixing_flops(64)
