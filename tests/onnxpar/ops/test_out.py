"""`out` on every operator: a result has the requested layout, and is right.

The node has no other strategy. Its operands are sharded as far as that follows from the requested
layout; otherwise it is replicated, and its result sliced.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import OnnxparError
from onnxpar.ops.fallback import draws
from onnxpar.ops.table import REGISTRY
from onnxpar.strategy import Strategy
from tests.onnxpar.ops.op_cases import ALL
from tests.onnxpar.ops.op_harness import SEED, Case, chosen

DEVICES = 2
CASES = [case for case in ALL if case.proto is None and not case.reference]


@pytest.mark.parametrize("case", chosen(CASES, 12), ids=str)
def test_a_result_has_the_requested_layout(case: Case, tmp_path: Path) -> None:
    if not case.stands_alone or draws(case.view.node, REGISTRY):
        pytest.skip("other nodes replace it, or it draws random numbers")
    first, *others = [value.name or "" for value in case.view.node.outputs]
    model, feeds = tmp_path / "m.onnx", tmp_path / "in.npz"
    onnx.save(case.model, model)
    np.savez(feeds, **case.arrays)
    rank = len(case.env.shapes[first])
    for axis in range(rank):
        asked = [DEVICES if i == axis else 1 for i in range(rank)]
        nodes = {"node": {"out": [asked, *[None] * len(others)]}}
        data = {"devices": DEVICES, "dataset": "full_batch", "nodes": nodes}
        target = tmp_path / f"out{axis}"
        plan = shard_model(model, Strategy.from_dict(data), target).partitioned.plan
        left = plan.resharded.get(first, plan.nodes["node"].outputs[0])
        assert not left.partial and left.strategy(plan.mesh) == tuple(asked)
        for result in runtime.verify(
            target, model, inputs=feeds, options=runtime.VerifyOptions(rtol=case.rtol)
        ):
            assert result.ok, (axis, result)


AXES = ("a", "b", "c")
"""Mesh axes of two devices each."""
CLEAR = ("expected", "cannot be sharded", "outputs would be partial over two reductions")
"""Words in messages about a strategy, which say what is possible, or why nothing is."""


def _entry(rng: random.Random, rank: int, axes: Sequence[str]) -> list[object]:
    """A layout that puts each axis on some dim or on none."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in rng.sample(axes, rng.randint(0, len(axes))) if rank else ():
        rng.choice(dims).append(axis)
    return [d or None for d in dims]


def _counts(entry: list[object]) -> list[object]:
    return [2 ** len(d) if isinstance(d, list) else 1 for d in entry]


def _drawn(case: Case, rng: random.Random, axes: Sequence[str]) -> dict[str, object]:
    """The entry of the node: its operands, mostly in layouts that its rule admits, and results."""
    rule, view = case.rule, case.view
    factors: dict[str, list[str]] = {}
    for axis in axes:
        factor = rng.choice([None, *rule.splittable])
        if factor is not None:
            factors.setdefault(factor, []).append(axis)
    inputs: list[list[object]] = []
    for index, operand in enumerate(rule.inputs):
        if operand.mode or not view.has(index) or not operand.dims:
            continue
        entry = [[a for n in names for a in factors.get(n, ())] or None for names in operand.dims]
        inputs.append(entry if rng.random() < 0.9 else _entry(rng, len(operand.dims), axes))
    outs = [
        _entry(rng, len(case.env.shapes[v.name or ""]), axes) if v.name else None
        for v in view.node.outputs
    ]
    out = [e if e is not None and rng.random() < 0.8 else None for e in outs]
    made: dict[str, object] = {"out": out}
    if inputs and rng.random() < 0.7:
        made["in"] = inputs
    if rng.random() < 0.4:
        numbers = {k: [e and _counts(e) for e in v] for k, v in made.items()}  # type: ignore[attr-defined]
        return {"devices": 2 ** len(axes), "nodes": {"node": numbers}}
    return {"mesh": dict.fromkeys(axes, 2), "nodes": {"node": made}}


DRAWS = [(case, count, draw) for case in CASES for count in (2, 3) for draw in range(2)]


@pytest.mark.parametrize(("case", "count", "draw"), chosen(DRAWS, 24), ids=str)
def test_every_request_is_right_or_refused_clearly(
    case: Case, count: int, draw: int, tmp_path: Path
) -> None:
    """Random layouts of operands and of all results, at 4 and 8 devices."""
    if not case.stands_alone or draws(case.view.node, REGISTRY):
        pytest.skip("other nodes replace it, or it draws random numbers")
    rng = random.Random(f"{SEED} {draw} {count} {case}")
    data = {"dataset": "full_batch", **_drawn(case, rng, AXES[:count])}
    print(f"seed {SEED}: {data}")
    model, feeds, target = tmp_path / "m.onnx", tmp_path / "in.npz", tmp_path / "out"
    onnx.save(case.model, model)
    np.savez(feeds, **case.arrays)
    try:
        plan = shard_model(model, Strategy.from_dict(data), target).partitioned.plan
    except OnnxparError as error:
        assert "node 'node'" in str(error) and any(word in str(error) for word in CLEAR)
        return
    asked = data["nodes"]["node"]["out"]  # type: ignore[index,call-overload]
    for value, entry, made in zip(
        case.view.node.outputs, asked, plan.nodes["node"].outputs, strict=True
    ):
        if entry is not None:
            left = plan.resharded.get(value.name or "", made)
            counts = [e if isinstance(e, int) else 2 ** len(e or ()) for e in entry]
            assert not left.partial and list(left.strategy(plan.mesh)) == counts
    for result in runtime.verify(
        target, model, inputs=feeds, options=runtime.VerifyOptions(rtol=case.rtol)
    ):
        assert result.ok, result
