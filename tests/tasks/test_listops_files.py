"""Preparing ListOps: workers, kills, damage, and a second process."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lra.errors import UserError
from lra.lock import lock
from lra.tasks import listops_files
from lra.tasks.listops import (
    VERSION,
    ListOps,
    Variant,
    prepare,
)

ROOT = Path(__file__).parents[2]
#: Real lengths, few trees, many blocks: drawing takes about a second.
LONG = Variant("long", 500, 2000, 10, 10, 1000, 40, 40, block=128)


def contents(directory):
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What preparing LONG in one go and in this process writes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(LONG, str(folder), workers=0)
    return contents(folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_workers(undisturbed, workers, tmp_path):
    directory = prepare(LONG, str(tmp_path), workers)
    assert directory == tmp_path / "listops" / "long" / VERSION
    assert contents(tmp_path) == undisturbed
    assert f"listops/long/{VERSION}/listops-train.array_record-00000-of-00001" in undisturbed


def start(folder, workers, kill_at=None, variant=LONG):
    """Starts preparing a variant in another process.

    kill_at: (module, function, n): the process is killed when it calls the function the n-th time.
    """
    code = f"from lra.tasks.listops import Variant, prepare\nvariant = {variant!r}\n"
    if kill_at:
        module, function, times = kill_at
        code += f"""
import importlib, itertools, os, signal
module = importlib.import_module("lra.tasks.{module}")
function, calls = module.{function}, itertools.count(1)
def killing(*arguments):
    if next(calls) == {times}:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)
module.{function} = killing
"""
    code += f"prepare(variant, {str(folder)!r}, workers={workers})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("workers", "kill_at"),
    [
        pytest.param(2, ("listops_files", "_read_block", 4), id="drawing"),
        pytest.param(0, ("listops_builder", "_in_order", 500), id="writing"),
        pytest.param(0, ("listops_files", "_sync", 2), id="written"),
    ],
)
def test_killed_and_run_again_gives_the_same_bytes(undisturbed, workers, kill_at, tmp_path):
    work = tmp_path / "listops" / "long" / f"incomplete_{VERSION}"
    assert start(tmp_path, workers, kill_at).wait() == -signal.SIGKILL
    assert not (tmp_path / "listops" / "long" / VERSION).exists()
    before = {path: path.stat().st_mtime_ns for path in work.glob("blocks/*.npz")}
    assert before
    drawn = []
    draw = listops_files.draw_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            listops_files, "draw_block", lambda v, s, i: (drawn.append(i), draw(v, s, i))[1]
        )
        prepare(LONG, str(tmp_path), workers=0)
    assert not set(drawn) & {int(path.stem[-5:]) for path in before}
    assert contents(tmp_path) == undisturbed


def test_workers_end_with_a_killed_parent(tmp_path):
    process = start(tmp_path, 2, variant=dataclasses.replace(LONG, train=100_000))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        process.wait()
        pytest.skip("this system does not list a process's children")
    blocks = tmp_path / "listops" / "long" / f"incomplete_{VERSION}" / "blocks"
    while process.poll() is None and not list(blocks.glob("*.npz")):
        time.sleep(0.001)
    pids = children.read_text().split()
    assert len(pids) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_worker_that_dies_is_reported(tmp_path):
    with pytest.raises(ChildProcessError, match="a process that draws trees died"):
        for _ in listops_files._blocks(LONG, 0, tmp_path, 1):
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
    assert list(tmp_path.glob("block-*.npz"))


def test_damaged_blocks_are_drawn_again(tmp_path):
    path = tmp_path / "block-00000.npz"
    listops_files._ensure_block(LONG, 0, 0, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    # Another variant's, empty, cut, and with one bit flipped.
    listops_files._ensure_block(dataclasses.replace(LONG, max_args=9), 0, 0, path)
    other = path.read_bytes()
    assert other != whole
    for damaged in (other, b"", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        listops_files._ensure_block(LONG, 0, 0, path)
        assert path.read_bytes() == whole
    # Sizes of splits do not matter to a block.
    written = path.stat().st_mtime_ns
    listops_files._ensure_block(dataclasses.replace(LONG, train=9), 0, 0, path)
    assert path.stat().st_mtime_ns == written


def test_failed_packing_leaves_no_data_set(tmp_path, monkeypatch, data_dir):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(listops_files, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        prepare("test", str(tmp_path), workers=0)
    with pytest.raises(FileNotFoundError, match="is not prepared"):
        ListOps(10, data_dir=str(tmp_path), variant="test").source("test")
    monkeypatch.undo()
    directory = prepare("test", str(tmp_path), workers=0)
    assert contents(directory) == contents(Path(data_dir, "listops", "test", VERSION))
    assert [path.name for path in directory.parent.iterdir()] == [VERSION]


def test_leftovers_of_a_whole_data_set_are_removed(tmp_path):
    directory = prepare("test", str(tmp_path), workers=0)
    before = contents(tmp_path)
    # As if the process had been killed between its last two acts.
    (directory.parent / f"incomplete_{VERSION}" / "blocks").mkdir(parents=True)
    written = directory.stat().st_mtime_ns
    assert prepare("test", str(tmp_path), workers=0) == directory
    assert contents(tmp_path) == before and directory.stat().st_mtime_ns == written


def test_second_process_is_refused(tmp_path):
    work = tmp_path / "listops" / "test" / f"incomplete_{VERSION}"
    work.mkdir(parents=True)
    with (
        lock(work / "lock", "it"),
        pytest.raises(UserError, match="is in use by process"),
    ):
        prepare("test", str(tmp_path), workers=0)
    prepare("test", str(tmp_path), workers=0)
