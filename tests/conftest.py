"""Runtime shape checks, markers, and fixtures that all tests share."""

import os

# Deterministic and light: the tests run on the CPU, on which the suite's numbers are defined.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Most of the suite's time is compilation of programs that run once: without the backend's optimisations it
# takes two thirds. `make faults`, the quickstart and the benchmarks run what users run. Flags that are
# given come later and win.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_backend_optimization_level=0", *os.environ.get("XLA_FLAGS", "").split()]
)

from jaxtyping import install_import_hook

install_import_hook(["models", "lra"], "beartype.beartype")

import jax
import pytest


def pytest_collection_modifyitems(items):
    """Skips what this machine or this run has not asked for."""
    data, slow = os.environ.get("LRA_REALDATA"), os.environ.get("LRA_SLOW") or os.environ.get("CI")
    for item in items:
        if "realdata" in item.keywords and not data:
            item.add_marker(pytest.mark.skip(reason="LRA_REALDATA does not name prepared data"))
        if "slow" in item.keywords and not slow:
            item.add_marker(pytest.mark.skip(reason="slow: set LRA_SLOW=1"))


@pytest.fixture
def x64():
    """64-bit types inside the test."""
    with jax.enable_x64(True):
        yield
