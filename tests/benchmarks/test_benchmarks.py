"""The benchmark scripts run and print what they promise; their figures are nobody's to assert."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention_memory, backward, step_overhead
from models.attention import ATTENTION


def run(script, flags):
    script.main(flags.split())


def test_step_overhead(capsys):
    run(
        step_overhead,
        "--attention linear --layers 1 --dim 4 --length 4 --calls 2 --batches 2 --steps 1",
    )
    lines = capsys.readouterr().out.splitlines()
    number = r"\s+(\d+\.\d+)"
    assert lines[0].startswith("devices: ")
    assert lines[1] == "dispatch: 1 layers, width 4, length 4, batch 2; ms, 2 calls"
    call = re.match(
        rf"linear\s+call{number}  blocked{number}  queued{number}  put_batch{number}", lines[2]
    )
    assert call and float(call[1]) <= float(call[2])
    assert lines[3].startswith("pipeline: ")
    ratio = re.fullmatch(
        rf"recall\s+length 64\s+batch 64\s+linear\s+delivered{number} batches/s"
        rf"  consumed{number} steps/s  ratio{number}",
        lines[4],
    )
    assert ratio and len(lines) == 5
    delivered, consumed, quotient = map(float, ratio.groups())
    assert quotient == pytest.approx(delivered / consumed, rel=0.1, abs=0.1)


def test_attention_memory(capsys):
    run(
        attention_memory, "--attention linear softmax --heads 2 --length 1031 --width 4 --dropout 0"
    )
    header, titles, *rows = capsys.readouterr().out.splitlines()
    assert "1×2×1031×4 float32" in header
    assert titles.split() == ["mechanism", "form", "temporary", "largest", "L×L"]
    found = {}
    for row in rows:
        match = re.fullmatch(
            r"(\S+)\s+((?:both|causal)(?: dropout)?)\s+(\d+\.\d) +\w+\[([\d,]+)\] +(\d+\.\d)  (yes|no)",
            row,
        )
        assert match, row
        found[match[1], match[2]] = match[6]
    assert set(found) == {(n, form) for n in ("linear", "softmax") for form in ("both", "causal")}
    assert set(found.values()) == {"no"}


def test_attention_memory_sees_a_square_array(capsys, monkeypatch):
    def square(self, features, mask, dropout_key=None):
        return self.weights(features, mask) @ features.value

    monkeypatch.setattr(ATTENTION["softmax"], "mix", square)
    run(attention_memory, "--attention softmax --length 257 --width 4 --dropout 0.1")
    rows = capsys.readouterr().out.splitlines()[2:]
    assert ["dropout" in row for row in rows] == [False, False, True, True]
    assert all(row.endswith("yes") and "257,257]" in row for row in rows)


def test_refused_forms_are_told(capsys, monkeypatch):
    def refuse(self, **common):
        raise ValueError("not causal")

    monkeypatch.setattr(ATTENTION["linear"], "__init__", refuse)
    monkeypatch.setattr(attention_memory, "build", lambda name, **own: ATTENTION[name](**own))
    run(attention_memory, "--attention linear --length 8 --width 4")
    assert "refused: not causal" in capsys.readouterr().out


def test_backward(capsys):
    run(backward, "--attention gla taylor --batch 1 --heads 2 --length 600 --width 8 --runs 1")
    header, titles, *rows = capsys.readouterr().out.splitlines()
    assert header == "mix, 1×2×600×8 float32, cpu"
    assert titles.split() == [
        "mechanism",
        "form",
        "forward",
        "ms",
        "with",
        "backward",
        "ratio",
        "MB",
    ]
    assert [row.split()[:2] for row in rows] == [
        [name, form] for name in ("gla", "taylor") for form in ("both", "causal")
    ]
    for row in rows:
        ahead, whole, ratio, megabytes = map(float, row.split()[2:])
        assert ahead >= 0 and whole > 0 and ratio > 0 and megabytes > 0


def test_arrays_of_a_program():
    compiled = jax.jit(lambda x: x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16))
    text = compiled.lower(jax.ShapeDtypeStruct((37, 5), jnp.float32)).compile().as_text()
    seen = attention_memory.arrays(text)
    assert ("f32", (37, 5)) in seen and any(shape == (37, 37) for _, shape in seen)
    # A type that the table does not know would be passed over.
    kinds = set(re.findall(r"\b([a-z]+\d+)\[\d", text))
    assert kinds <= set(attention_memory.BYTES)
