"""Which devices compute, and how batches lie on them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lra.errors import UserError

#: JAX's names of what a user calls cpu, gpu and tpu.
PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}

_INSTALL = {
    "gpu": 'Install JAX for it (pip install "jax[cuda13]") and check the driver with nvidia-smi, or',
    "tpu": 'Install JAX for it (pip install "jax[tpu]") on a TPU machine, or',
}


def select(platform: str, *, x64: bool = False) -> None:
    """Makes JAX use one kind of device; call before anything else touches JAX.

    Args:
        platform: "cpu", "gpu" or "tpu"; "" for what JAX finds.
        x64: 64-bit types.

    Raises:
        UserError: for another name, or if no such device is there.
    """
    jax.config.update("jax_enable_x64", x64)
    if not platform:
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"JAX finds no device ({error}); is JAX_PLATFORMS set to something that is not here?"
            ) from error
        return
    if platform not in PLATFORMS:
        raise UserError(
            f"run.platform must be one of {', '.join(PLATFORMS)} or empty; got {platform!r}"
        )
    for name in PLATFORMS[platform]:
        # The CPU stays there as a second backend: arrays are prepared on it.
        jax.config.update("jax_platforms", name if name == "cpu" else f"{name},cpu")
        try:
            if jax.devices()[0].platform == platform:
                return
        except RuntimeError:
            continue
    raise UserError(
        f"run.platform={platform}, but JAX finds no {platform} device here. "
        f"{_INSTALL.get(platform, '')} choose the platform cpu."
    )


def data_mesh() -> Mesh:
    """All devices of all hosts along one axis, `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's rows of a batch to its devices, rows divided among them.

    Args:
        batch: arrays whose first axis is the rows of this host.
        mesh: from `data_mesh`.
    """
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}


def describe() -> str:
    """One line: how many devices of which kind, on how many hosts."""
    devices = jax.devices()
    kinds = ", ".join(sorted({d.device_kind for d in devices}))
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{len(devices)} {devices[0].platform} device(s) ({kinds}){hosts}"
