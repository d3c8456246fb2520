"""One run on 1, 2, 4 and 8 devices: the same examples, counts and losses, and checkpoints that move."""

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import pytest

from configs import recall
from lra.jsonl import read_rows
from lra.pipeline import guarded
from lra.training import loop

STEPS, HALF = 20, 10
SMALL = {
    "data.length": 16,
    "data.vocab_size": 16,
    "data.num_pairs": 2,
    "data.train_examples": 100,
    "data.validation_examples": 19,  # no multiple of a device count
    "model.num_layers": 2,
    "model.dim": 8,
    "model.dropout": 0.2,
    "optim.warmup_steps": 1,
    "optim.schedule_steps": STEPS,
    "train.batch_size": 8,
    "train.eval_every": 5,
    "eval.batch_size": 6,
    "run.log_every": 1,
    "run.tensorboard": False,
}


def small(steps):
    config = recall.get_config("attention=softmax/linear")
    config.update_from_flattened_dict(
        {**SMALL, "model.attention_dropout": 0.1, "train.steps": steps}
    )
    return config


def run(workdir, steps):
    """Trains; `workdir.order` gets a line for each batch: its step, inputs' checksum, weight."""
    with pytest.MonkeyPatch.context() as patch, Path(f"{workdir}.order").open("a") as file:

        def noted(batches, workers):
            for batch in guarded(batches, workers):
                print(zlib.crc32(batch["inputs"].tobytes()), batch["weight"].sum(), file=file)
                yield batch

        patch.setattr(loop, "guarded", noted)
        loop.train(small(steps), workdir)


def in_this_process(folder, count):
    """A whole run, the first half of one, and, where another process left a half, its second."""
    assert jax.device_count() == count
    run(folder / f"whole-{count}", STEPS)
    run(folder / f"begun-{count}", HALF)
    if count > 1:
        run(folder / "begun-1", STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on one device, then on more in processes of their own."""
    folder = tmp_path_factory.mktemp("devices")
    in_this_process(folder, 1)
    return folder


def on_devices(folder, count):
    """`in_this_process` where JAX sees `count` devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(count)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "count",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8],
)
def test_devices_do_not_change_a_run(folder, count, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    on_devices(tmp_path, count)
    loop.train(small(STEPS), tmp_path / f"begun-{count}")  # what `count` devices saved, on one
    one = read_rows(folder / "whole-1" / "metrics.jsonl")
    assert len(one) == STEPS + STEPS // SMALL["train.eval_every"]
    for name in (f"whole-{count}", "begun-1", f"begun-{count}"):
        other = read_rows(tmp_path / name / "metrics.jsonl")
        assert [(r["step"], r["split"]) for r in one] == [(r["step"], r["split"]) for r in other]
        for a, b in zip(one, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            for number in ("n", "labels", "accuracy"):
                assert a.get(number) == b.get(number)
        devices = [
            moment["devices"]
            for moment in json.loads((tmp_path / name / "run.json").read_text())["begun"]
        ]
        assert [int(text.split()[0]) for text in devices] == {
            f"whole-{count}": [count], "begun-1": [1, count], f"begun-{count}": [count, 1]
        }[name]  # fmt: skip
    order = (folder / "whole-1.order").read_text().splitlines()
    assert len(set(order)) == STEPS
    assert (tmp_path / f"whole-{count}.order").read_text().splitlines() == order
    assert (tmp_path / "begun-1.order").read_text().splitlines() == order


if __name__ == "__main__":
    in_this_process(Path(sys.argv[1]), int(sys.argv[2]))
