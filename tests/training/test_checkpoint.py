"""Which checkpoints stay, which is the best, and that what comes back is what went in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.errors import UserError
from lra.training import checkpoint as checkpoint_module
from lra.training.checkpoint import FOLDER, Checkpoints


def tree(seed=0.0):
    return {
        "params": {0: {"kernel": jnp.arange(6.0).reshape(2, 3) / 7 + seed}},
        "small": jnp.asarray([1.5, -2.25], jnp.bfloat16) + jnp.bfloat16(seed),
        "step": jnp.asarray(3, jnp.int32),
        "empty": {},
    }


def steps(workdir):
    return sorted(int(p.name) for p in (workdir / FOLDER).iterdir())


@pytest.fixture
def checkpoints(tmp_path):
    store = Checkpoints(tmp_path)
    yield store
    store.close()


def test_an_empty_workdir_has_neither_latest_nor_best(checkpoints):
    assert checkpoints.latest is None
    assert checkpoints.best is None


def test_the_latest_two_and_the_best_stay(checkpoints, tmp_path):
    """Accuracy decides, then the lower loss; checkpoints without a measurement are never best."""
    saved = [
        (1, {"accuracy": 0.5, "loss": 1.0}, [1], 1),
        (2, {"accuracy": 0.7, "loss": 0.9}, [1, 2], 2),
        (3, {"accuracy": 0.7, "loss": 0.8}, [2, 3], 3),
        (4, {"accuracy": 0.7, "loss": 0.85}, [3, 4], 3),
        (5, None, [3, 4, 5], 3),
        (6, {"accuracy": 0.6, "loss": 0.1}, [3, 5, 6], 3),
        (7, None, [3, 6, 7], 3),
        (8, {"accuracy": 0.8, "loss": 5.0}, [7, 8], 8),
    ]
    for step, metrics, kept, best in saved:
        checkpoints.save(step, tree(step), metrics)
        assert (steps(tmp_path), checkpoints.latest, checkpoints.best) == (kept, step, best)


def test_best_is_none_where_nothing_was_evaluated(checkpoints):
    checkpoints.save(1, tree(), None)
    assert checkpoints.latest == 1
    assert checkpoints.best is None


def test_a_diverged_checkpoint_is_never_the_best(checkpoints):
    """NaN logits still score: argmax answers class 0 everywhere."""
    checkpoints.save(1, tree(), {"accuracy": 0.5, "loss": float("nan")})
    checkpoints.save(2, tree(), {"accuracy": 0.5, "loss": 0.7})
    assert checkpoints.best == 2


def test_restore_gives_the_same_bits(checkpoints, tmp_path):
    checkpoints.save(2, tree(0.25), {"accuracy": 0.5, "loss": 1.0})
    again = Checkpoints(tmp_path, read_only=True)
    loaded = again.restore(2, jax.tree.map(jnp.zeros_like, tree()))
    assert jax.tree.structure(loaded) == jax.tree.structure(tree())
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree(0.25)), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_saving_a_step_again_replaces_it(checkpoints):
    checkpoints.save(4, tree(0), {"accuracy": 0.5, "loss": 1.0})
    checkpoints.save(4, tree(1), {"accuracy": 0.9, "loss": 0.5})
    loaded = checkpoints.restore(4, tree())
    np.testing.assert_array_equal(loaded["params"][0]["kernel"], tree(1)["params"][0]["kernel"])
    assert checkpoints.latest == checkpoints.best == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {**tree(), "params": {0: {"kernel": jnp.zeros((2, 4))}}},
        {**tree(), "params": {0: {"other": jnp.zeros((2, 3))}}},
        {**tree(), "more": jnp.zeros(2)},
        {**tree(), "small": jnp.zeros(2)},
    ],
    ids=["shape", "name", "missing", "type"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_a_readable_line(checkpoints, wrong):
    checkpoints.save(1, tree(), None)
    with pytest.raises(UserError, match=r"checkpoints/1 does not fit") as caught:
        checkpoints.restore(1, wrong)
    assert len(str(caught.value)) < 500


def test_parts_can_be_restored_alone(checkpoints):
    checkpoints.save(1, tree(2), None)
    part = checkpoints.restore(1, {"params": tree()["params"]})
    assert list(part) == ["params"]
    np.testing.assert_array_equal(part["params"][0]["kernel"], tree(2)["params"][0]["kernel"])


def test_a_step_that_is_not_there_is_named(checkpoints):
    checkpoints.save(1, tree(), None)
    with pytest.raises(UserError, match="9"):
        checkpoints.restore(9, tree())


def test_a_kill_in_the_middle_of_the_first_save_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    first = Checkpoints(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "_file_hashes", killed)
    with pytest.raises(KeyboardInterrupt):
        first.save(1, tree(), None)
    monkeypatch.undo()
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert Checkpoints(tmp_path, read_only=True).rejected == {}
    again = Checkpoints(tmp_path)
    assert again.latest is None
    again.save(1, tree(), None)
    assert again.latest == 1
    again.close()
    first.close()


def test_a_file_that_somebody_put_there_is_no_damage(checkpoints, tmp_path):
    checkpoints.save(1, tree(), None)
    (tmp_path / FOLDER / "1" / ".DS_Store").write_text("x")
    assert Checkpoints(tmp_path, read_only=True).rejected == {}
