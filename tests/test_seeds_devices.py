"""Keys by name; devices: which are there, and how batches lie on them."""

import jax
import numpy as np
import pytest

from lra import devices
from lra.errors import UserError
from lra.seeds import named_key


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_a_key_is_a_function_of_seed_and_name():
    names, seeds = ("params", "dropout", "features"), (0, 1, 2)
    keys = {words(named_key(seed, name)) for seed in seeds for name in names}
    assert len(keys) == 9
    assert words(named_key(1, "params")) == words(named_key(1, "params"))
    assert words(jax.random.key(0)) not in keys


def test_keys_stay_what_they_were_in_published_runs():
    """Results are named by their seed: another derivation would make them another run."""
    assert words(named_key(0, "params")) == words(jax.random.fold_in(jax.random.key(0), 0x8FCE0EF3))


def test_batches_lie_on_the_mesh_row_by_row():
    mesh = devices.data_mesh()
    assert mesh.axis_names == ("data",)
    assert mesh.devices.size == jax.device_count()
    batch = {"inputs": np.arange(12, dtype=np.int32).reshape(4, 3), "weight": np.ones(4)}
    placed = devices.put_batch(batch, mesh)
    assert placed.keys() == batch.keys()
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    assert placed["inputs"].sharding.spec == jax.sharding.PartitionSpec("data")
    assert devices.replicated(mesh).is_fully_replicated


def test_select_takes_the_cpu_or_what_is_there():
    platforms = jax.config.jax_platforms
    for name in ("", "cpu"):
        devices.select(name)
    assert jax.devices()[0].platform == "cpu"
    jax.config.update("jax_platforms", platforms)


@pytest.fixture
def settings():
    """JAX's settings, put back after the test."""
    before = jax.config.jax_platforms, jax.config.jax_enable_x64
    yield
    jax.config.update("jax_platforms", before[0])
    jax.config.update("jax_enable_x64", before[1])


def test_select_refuses_an_unknown_platform(settings):
    with pytest.raises(UserError, match=r"cpu, gpu, tpu or empty; got 'cuda'"):
        devices.select("cuda")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_select_refuses_a_platform_that_is_not_there(settings, monkeypatch, platform):
    def none_found():
        raise RuntimeError("Unknown backend")

    monkeypatch.setattr(jax, "devices", none_found)
    with pytest.raises(UserError, match=f"platform={platform}, but JAX finds no {platform} device"):
        devices.select(platform)


def test_select_does_not_take_the_cpu_for_a_gpu(settings):
    with pytest.raises(UserError, match="JAX finds no gpu device"):
        devices.select("gpu")


def test_select_switches_64_bit_types(settings):
    devices.select("", x64=True)
    assert jax.numpy.zeros(1).dtype == np.float64
    devices.select("", x64=False)
    assert jax.numpy.zeros(1).dtype == np.float32


def test_describe_counts_devices():
    assert devices.describe().startswith(f"{jax.device_count()} cpu device(s) (")
