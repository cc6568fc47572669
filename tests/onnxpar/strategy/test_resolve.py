"""Strategies met with models: the mesh, the seeds, and what they do when executed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import transformer
import two_layer

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.errors import StrategyError
from onnxpar.core.layout import Layout
from onnxpar.core.mesh import Mesh
from onnxpar.core.name_patterns import match
from onnxpar.facts.program import Program
from onnxpar.graph.seeds import Seeds
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.strategy import Strategy, load_strategy, resolve, resolved
from tests.lockstep import run_model

MATMUL = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[16, 8] x, float[8, 32] w) => (float[16, 32] y) { [mm] y = MatMul(x, w) }
"""
MERGED = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 6, 4] x) => (float[n, 4] y)
<int64[2] target = {-1, 4}> { [view] y = Reshape(x, target) }
"""
BIAS = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 8] x, float[1] s) => (float[batch, 8] y)
<float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float c = {2}> {
    [add] t = Add(x, b) [mul] u = Mul(t, c) [scale] y = Mul(u, s)
}
"""


def parse(text: str) -> Program:
    return analyse(ir.from_proto(onnx.parser.parse_model(text)), {})


def seeds(analysed: Program, text: str | Mapping[str, Any]) -> Seeds:
    if isinstance(text, str):
        strategy = Strategy.from_text(text, source="s")
    else:
        strategy = Strategy.from_dict(text, source="s")
    return resolve(strategy, analysed)


def groups(found: Seeds, node: str, factor: str) -> tuple[tuple[int, ...], ...]:
    atoms = [a for c in found.nodes[node].factors[factor] for a in c.atoms]
    return found.mesh.groups(atoms)


def test_the_first_factor_is_outermost() -> None:
    found = seeds(parse(MATMUL), "devices: 8\nnodes: {mm: {in: [[2, 4], [4, 1]]}}")
    assert groups(found, "mm", "M") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups(found, "mm", "K") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "N" not in found.nodes["mm"].factors
    assert found.nodes["mm"].where == "s:2"


def test_what_is_left_repeats_and_varies_fastest() -> None:
    found = seeds(parse(MATMUL), "devices: 8\nnodes: {mm: {in: [[2, 2], [2, 1]]}}")
    assert groups(found, "mm", "M") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups(found, "mm", "K") == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize("entry", ["[[3, 8], [8, 1]]", "[[8, 1], [1, 3]]"])
def test_three_and_eight_on_24_devices(entry: str) -> None:
    found = seeds(parse(MATMUL), f"devices: 24\nnodes: {{mm: {{in: {entry}}}}}")
    counts = {f: found.mesh.count(p[0].atoms) for f, p in found.nodes["mm"].factors.items()}
    assert counts == ({"M": 3, "K": 8} if entry[2] == "3" else {"M": 8, "N": 3})


@pytest.mark.parametrize(
    ("devices", "entry", "factors"),
    [
        (8, "[[4, 2], [4, 2]]", {"M": 4, "N": 2}),
        (4, "[[2, 2], [2, 2]]", {"M": 2, "N": 2}),
        (8, "[[2, 2], [2, 2]]", {"M": 2, "K": 2, "N": 2}),
        (16, "[[2, 2], [2, 2]]", {"M": 2, "K": 2, "N": 2}),
        (16, "[[4, 2], [4, 2]]", {"M": 4, "N": 2}),
        (8, "[[8, 1], [8, 1]]", {"M": 8}),
        (8, "[[1, 8], [1, 8]]", {"N": 8}),
        (8, "[[a, b], [a, b]]", {"M": 4, "N": 2}),
        (8, "[[b, a], [b, a]]", {"M": 2, "N": 4}),
        (8, "[[a, ~], [a, ~]]", {"M": 4}),
    ],
)
def test_operands_and_result_over_one_device_matrix(
    devices: int, entry: str, factors: dict[str, int]
) -> None:
    """Each device gathers the contracted dim of both operands; a weight is stored as the entry."""
    named = "a" in entry
    mesh = "mesh: {a: 4, b: 2}" if named else f"devices: {devices}"
    analysed = analyse(two_layer.build(), {})
    node = "/matmul1/MatMul"
    found = seeds(analysed, f"{mesh}\nnodes: {{{node}: {{in: {entry}}}}}")
    parts = found.nodes[node].factors
    assert {f: found.mesh.count(p[0].atoms) for f, p in parts.items()} == factors
    weight = found.parameters.get("matmul1.weight")
    if "K" in factors:
        assert weight is None
        return
    of = {"M": "K", "N": "N"}
    stored = {of[f]: found.mesh.groups(p[0].atoms) for f, p in parts.items()}
    if "M" in factors:
        assert weight is not None
        for dim, name in enumerate("KN"):
            assert found.mesh.groups(weight.dim_atoms(dim)) == stored.get(
                name, found.mesh.groups(())
            )
    parted = propagate_and_partition(analysed, found)
    assert run(parted, two_layer.build(), 16) < CLOSE


def test_a_fixed_parameter_is_stored_as_its_own_entry_says() -> None:
    text = "devices: 8\nnodes: {/matmul1/MatMul: {in: [[4, 2], [4, 2]]}}\n"
    found = seeds(analyse(two_layer.build(), {}), text + "parameters: {matmul1.weight: [1, 2]}")
    assert found.parameters["matmul1.weight"].strategy(found.mesh) == (1, 2)


def test_matrices_that_exclude_one_another_name_both_nodes() -> None:
    text = "devices: 24\nnodes:\n  /matmul1/MatMul: {in: [[3, 8], [8, 1]]}\n"
    text += "  /matmul2/MatMul: {in: [[8, 1], [1, 3]]}"
    with pytest.raises(StrategyError) as error:
        seeds(analyse(two_layer.build(), {}), text)
    assert "s:3: node '/matmul1/MatMul'" in str(error.value)
    assert "s:4: node '/matmul2/MatMul'" in str(error.value)
    with pytest.raises(StrategyError, match=r"s:2: node 'mm'.* with s:1: the mesh .*'dp': 3"):
        seeds(parse(MATMUL), "mesh: {dp: 3, tp: 8}\nnodes: {mm: {in: [[8, 1], [1, 3]]}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "devices: 8\nnodes: {mm: {in: [[2, 2], [1, 2]]}}",
            r"s:2: node 'mm' \(MatMul\): operand 1 \('w'\), dim 0 \(K\): expected 2 shards, as "
            r"operand 0 \('x'\), dim 1 \(K\) has, got 1",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[3, 1], [1, 1]]}}",
            r"s:2: node 'mm' .*: expected numbers of shards whose product divides the 8 "
            r"devices, got 3",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[2, 2, 1], [2, 1]]}}",
            r"operand 0 \('x'\): expected 2 entries for the shape \(16, 8\), got 3: \[2, 2, 1\]",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[2, 2]]}}",
            r"an entry for each of its 2 operands .*: operand 0 \('x'\), operand 1 \('w'\); got 1",
        ),
        (
            "mesh: {a: 2, b: 2}\nnodes: {mm: {in: [[a, b], [a, ~]]}}",
            r"operand 1 \('w'\), dim 0 \(K\): expected \[b\], as operand 0 .* has, got \[a\]",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[4, 2], [2, 4]]}}",
            "expected numbers of shards whose product divides the 8 devices, got 4·2·4 = 32",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[4, 2], [4, 1]]}}",
            r"operand 1 \('w'\), dim 0 \(K\): expected 2 shards, as operand 0 .*, got 4",
        ),
        (
            "mesh: {a: 2, b: 2}\nnodes: {mm: {in: [[a, b], [b, a]]}}",
            "expected distinct mesh axes for its dims M and N, got a for both",
        ),
        (
            "mesh: {a: 2, b: 2}\nnodes: {mm: {in: [[a, ~], [~, a]]}}",
            "expected distinct mesh axes for its dims M and N, got a for both",
        ),
        (
            "mesh: {a: 2, b: 2}\nnodes: {mm: {in: [[a, ~], [1, 2]]}}",
            r"expected all operands to use numbers of shards, or all to use mesh axes, got "
            r"\[~?1?, 2\] and \[a, ~",
        ),
        (
            "mesh: {a: 2}\nnodes: {mn: {in: [[a, ~], ~]}}",
            r"s:2: expected the name or a pattern of a node, got the name 'mn', .*nearest: 'mm'",
        ),
        (
            "mesh: {a: 2}\nnodes: {'n*': {in: [[a, ~], ~]}}",
            r"got the pattern 'n\*', which matches no node; there is only 'mm'",
        ),
        (
            "mesh: {a: 2}\nnodes:\n  'm*': {in: [[a, ~], ~]}\n  '*m': {in: [[~, a], ~]}",
            r"s:4: node 'mm': expected one entry, got two that differ: '\*m' here and 'm\*' at s:3",
        ),
        (
            "mesh: {a: 2}\nnodes: {mm: {in: [~, ~], partial: {operands: [0, 1], axes: [a]}}}",
            r"node 'mm' .*'partial': 'operands': expected \[0\] or \[1\], got \[0, 1\]",
        ),
        (
            "mesh: {a: 2}\nnodes:\n"
            "  mm: {in: [~, ~], partial: {operands: [0], axes: [a], reduction: max}}",
            r"'operands': expected none, since its rule allows no partial max, got \[0\]",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[2, 4], [4, 1]], out: [[2, 3]]}}",
            r"output 0 \('y'\), dim 1: expected a number .* that the node computes \(1\), got 3",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[2, 4], [4, 1]], out: [[8]]}}",
            r"output 0 \('y'\): expected 2 entries for the shape \(16, 32\), got 1",
        ),
        (
            "devices: 8\nnodes: {mm: {in: [[2, 4], [4, 1]], out: [[8, 1], ~]}}",
            "expected at most 1 entries under 'out', got 2",
        ),
        (
            "devices: 8\nparameters: {v: [2]}",
            "s:2: expected the name or a pattern of a parameter, got the name 'v'.*there are none",
        ),
        (
            "devices: 8\ndataset: {z: [2, 1]}",
            "s:2: expected the name or a pattern of a graph input, got the name 'z'",
        ),
        (
            "devices: 8\ndataset: {x: [2]}",
            r"s:2: graph input 'x': expected 2 entries for the shape \(16, 8\), got 1: \[2\]",
        ),
        (
            "devices: 8\ndataset: {x: [3, 1]}",
            "s:2: graph input 'x': expected numbers of shards whose product divides the 8 "
            "devices, got 3",
        ),
    ],
)
def test_mistakes_name_node_operand_expected_and_got(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        seeds(parse(MATMUL), text)


def test_exact_names_win_and_equal_entries_agree() -> None:
    entries = {"/a*": 1, "/a/b": 2, "*/c": 1}
    found = match(entries, ["/a/b", "/a/c", "/d/c"], "node", dict.fromkeys(entries, "s"))
    assert found == {"/a/b": ("/a/b", 2), "/a/c": ("/a*", 1), "/d/c": ("*/c", 1)}
    # A name that reads as a pattern is first of all a name.
    assert match({"w[0]": 1}, ["w[0]", "w0"], "node", {"w[0]": "s"}) == {"w[0]": ("w[0]", 1)}


def test_operands_that_are_not_sharded_may_be_left_out() -> None:
    analysed = parse(BIAS)
    expected = None
    for entry in ("[[2, 4]]", "[[2, 4], []]", "[[2, 4], ~]"):
        found = seeds(analysed, f"devices: 8\nnodes: {{mul: {{in: {entry}}}}}")
        assert expected in (None, found.nodes["mul"].factors)
        expected = found.nodes["mul"].factors
    found = seeds(analysed, "devices: 8\nnodes: {add: {in: [[2, 4], [4]]}}")
    assert found.nodes["add"].factors == expected
    with pytest.raises(StrategyError, match=r"operand 1 \('b'\), dim 0 \(b\): expected 4 shards"):
        seeds(analysed, "devices: 8\nnodes: {add: {in: [[2, 4], [2]]}}")
    with pytest.raises(StrategyError, match=r"operand 1 \('s'\), dim 0: expected 1 shard, .*got 2"):
        seeds(analysed, "devices: 8\nnodes: {scale: {in: [[2, 4], [2]]}}")


@pytest.mark.parametrize(
    ("entry", "counts"),
    [("[[2, 3, 1]]", {2, 3}), ("[[4, 1, 1]]", {4}), ("[[1, 6, 1]]", {6}), ("[[2, 3, 2]]", {2, 3})],
)
def test_a_view_is_split_by_the_operand(entry: str, counts: set[int]) -> None:
    found = seeds(parse(MERGED), f"devices: 24\nnodes: {{view: {{in: {entry}}}}}")
    made = [found.mesh.count(p[0].atoms) for p in found.nodes["view"].factors.values()]
    assert set(made) == counts


SPLIT = MERGED.replace("[batch, 6, 4]", "[n, 4]").replace("[n, 4] y", "[m, 2, 3, 4] y")
SPLIT = SPLIT.replace("[2] target = {-1, 4}", "[4] target = {-1, 2, 3, 4}").replace("[n,", "[12,")


@pytest.mark.parametrize(
    ("entry", "sizes"),
    [
        ("[[2, 1]]", {2: 2}),
        ("[[4, 1]]", {2: 4}),
        ("[[12, 1]]", {2: 12}),
    ],
)
def test_pieces_of_a_merged_dim_go_to_its_major_factors_first(
    entry: str, sizes: dict[int, int]
) -> None:
    """12 rows viewed as (2, 2, 3, 4): 2 shards split dim 0, 4 also dim 1, and 12 also dim 2."""
    found = seeds(parse(SPLIT), f"devices: 12\nnodes: {{view: {{in: {entry}}}}}")
    factors = found.nodes["view"].factors
    total = int(np.prod([found.mesh.count(p[0].atoms) for p in factors.values()]))
    assert total == next(iter(sizes.values()))
    atoms = [a for parts in factors.values() for a in parts[0].atoms]
    assert atoms == sorted(atoms)


def test_pieces_that_do_not_shard_a_merged_dim_in_order_are_refused() -> None:
    with pytest.raises(StrategyError, match="each of the merged dims 2 x 2 x 3 completely"):
        seeds(parse(SPLIT), "devices: 6\nnodes: {view: {in: [[3, 1]]}}")
    with pytest.raises(StrategyError, match="each of the merged dims 2 x 2 x 3 completely"):
        seeds(parse(SPLIT), "mesh: {a: 3}\nnodes: {view: {in: [[a, ~]]}}")


def test_axes_of_a_merged_dim() -> None:
    found = seeds(parse(SPLIT), "mesh: {a: 2, b: 2}\nnodes: {view: {in: [[[b, a], ~]]}}")
    factors = list(found.nodes["view"].factors.values())
    assert [p[0].atoms for p in factors] == [(1,), (0,)]
    assert [p[0].size for p in factors] == [2, 2]


@pytest.mark.parametrize(
    ("out", "atoms"),
    [
        ("[2, 1]", ((0,), ())),
        ("[8, 1]", ((0, 1, 2), ())),
        ("[2, 4]", ((0,), (1, 2))),
        ("[1, 8]", ((), (1, 2, 0))),
        ("[4, 2]", ((0, 1), (2,))),
        ("[1, 1]", ((), ())),
    ],
)
def test_pieces_of_an_output_come_from_the_pending_sum_first(
    out: str, atoms: tuple[tuple[int, ...], ...]
) -> None:
    analysed = parse(MATMUL)
    text = f"devices: 8\nnodes: {{mm: {{in: [[2, 4], [4, 1]], out: [{out}]}}}}"
    wanted = seeds(analysed, text).nodes["mm"].out[0]
    assert wanted is not None
    assert (wanted.dim_atoms(0), wanted.dim_atoms(1)) == atoms


def test_out_alone_says_how_the_node_is_split() -> None:
    found = seeds(parse(MATMUL), "mesh: {a: 2, b: 2}\nnodes: {mm: {out: [[a, b]]}}")
    counts = {f: p[0].atoms for f, p in found.nodes["mm"].factors.items()}
    assert counts == {"M": (0,), "N": (1,)}


def test_layouts() -> None:
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    entry = {"in": [layout("dp", ("sp", "mp")), layout(("sp", "mp"), None)]}
    found = seeds(parse(MATMUL), {"devices": 8, "nodes": {"mm": entry}})
    assert {f: p[0].atoms for f, p in found.nodes["mm"].factors.items()} == {
        "M": (0,),
        "K": (1, 2),
    }
    row = Layout((8,), ("d",))("d", None)
    tiles = Layout((4, 2), ("d", "e"))("d", None)
    found = seeds(
        parse(MATMUL), {"devices": 8, "dataset": {"x": row}, "nodes": {"mm": {"out": [tiles]}}}
    )
    assert found.mesh.count(found.inputs["x"].dim_atoms(0)) == 8
    out = found.nodes["mm"].out[0]
    assert out is not None
    assert found.mesh.groups(out.dim_atoms(0))[0] == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("text", "atoms"),
    [
        ("devices: 4", {"x": ((0, 1), ())}),
        ("mesh: {dp: 2, tp: 2}", {"x": ((0,), ())}),
        ("mesh: {tp: 4}", {"x": ((), ())}),
        ("devices: 4\ndataset: full_batch", {}),
        ("devices: 4\ndataset: {x: [1, 4]}", {"x": ((), (0, 1))}),
        ("mesh: {a: 2, b: 2}\ndataset: {x: [~, b], s: [~]}", {"x": ((), (1,)), "s": ((),)}),
    ],
)
def test_dataset(text: str, atoms: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """A dim of size 1, such as that of `s`, is replicated."""
    found = seeds(parse(BIAS), text).inputs
    assert {n: tuple(s.dim_atoms(d) for d in range(s.rank)) for n, s in found.items()} == atoms


def test_parameters_by_pattern() -> None:
    found = seeds(
        analyse(two_layer.build(), {}),
        "mesh: {dp: 2, tp: 4}\nparameters: {'*.weight': [~, tp], matmul2.weight: [4, 2]}",
    )
    one, two = found.parameters["matmul1.weight"], found.parameters["matmul2.weight"]
    assert one.strategy(found.mesh) == (1, 4)
    assert two.strategy(found.mesh) == (4, 2)
    assert found.mesh.groups(two.dim_atoms(1))[0] == (0, 1)


CLOSE = 34 * 2.0**-24
"""Two layers in float32, of sums of 32 and 64 terms: a root of their number on each side."""


def run(parted: PartitionedModel, model: ir.Model, batch: int) -> float:
    """Largest difference between the sharded and the undivided model, relative to the largest."""
    x = np.random.default_rng(batch).standard_normal((batch, 32)).astype(np.float32)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    want = session.run(None, {"x": x})[0]
    got = run_model(parted, {"x": x}, {"batch": batch})["y"]
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize(
    ("text", "operators"),
    [
        ("dp=4", []),
        ("tp=4", ["AllReduce"]),
        ("dp=2,tp=4", ["AllReduce"]),
        ("replicate", []),
        ("mesh: {dp: 2, tp: 4}\nrest: data_parallel", []),
        (
            "mesh: {dp: 2, tp: 4}\nnodes: {'*1/MatMul': {in: [[dp, tp], [tp, ~]], "
            "out: [[[dp, tp], ~]]}}",
            ["ReduceScatter"],
        ),
        (
            "devices: 8\nnodes: {/matmul1/MatMul: {in: [[2, 4], [4, 1]], out: [[8, 1]]}}",
            ["AllToAll", "ReduceScatter"],
        ),
        (
            "devices: 8\ndataset: full_batch\nnodes: {/relu/Relu: {in: [[2, 2]], out: [[1, 8]]}}",
            None,
        ),
    ],
)
def test_execution_equals_the_undivided_model(text: str, operators: list[str] | None) -> None:
    analysed = analyse(two_layer.build(), {})
    strategy = (
        load_strategy(text, None if "=" in text else 4)
        if ":" not in text
        else (Strategy.from_text(text))
    )
    parted = propagate_and_partition(analysed, resolve(strategy, analysed))
    if operators is not None:
        assert [c.op for c in parted.builder.collectives][: len(operators)] == operators
    for batch in (1, 5, 16):
        # float32, sums of 32 and of 16 terms in another order: (sqrt(32) + sqrt(16)) * 2^-24 is
        # 6e-7 of the largest output where terms do not cancel; some do.
        assert run(parted, two_layer.build(), batch) < 1e-5


@pytest.mark.parametrize(
    ("positions", "layout"),
    [("3, batch, seq", (1, 2, 1)), ("batch, seq, 3", (2, 1, 1)), ("4, seq, 3", (2, 1, 1))],
)
def test_the_batch_of_positions_may_come_second(positions: str, layout: tuple[int, ...]) -> None:
    """Qwen2-VL takes the positions of time, row and column as [3, batch, seq]."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[batch, seq] x, float[{positions}] p) => (float[batch, seq] y, float[a, b, c] z)
        {{
            y = Relu(x)
            z = Relu(p)
        }}
    """
    found = seeds(parse(text), "mesh: {dp: 2}")
    assert found.inputs["x"].strategy(found.mesh) == (2, 1)
    assert found.inputs["p"].strategy(found.mesh) == layout


def test_rest_data_parallel_returns_to_the_batch_after_a_node_of_its_own() -> None:
    analysed = analyse(two_layer.build(), {})
    text = "mesh: {dp: 4}\nrest: data_parallel\nnodes: {/relu/Relu: {in: [[~, dp]]}}"
    found = seeds(analysed, text)
    assert set(found.nodes) == {"/matmul1/MatMul", "/relu/Relu", "/matmul2/MatMul"}
    parted = propagate_and_partition(analysed, found)
    assert [c.op for c in parted.builder.collectives] == ["AllToAll", "AllToAll"]
    assert parted.plan.nodes["/matmul2/MatMul"].inputs[0].strategy(found.mesh) == (4, 1)
    assert run(parted, two_layer.build(), 6) < CLOSE


def test_rest_data_parallel_leaves_what_has_no_batch_alone() -> None:
    analysed = analyse(transformer.build(layers=1), {})
    found = seeds(analysed, "mesh: {dp: 2}\nrest: data_parallel")
    batch = analysed.env.shapes["input_ids"][0]
    assert found.nodes
    for seed in found.nodes.values():
        assert [p[0].size for p in seed.factors.values()] == [batch], seed.node
    weights = {n for n in analysed.model.graph.initializers}
    for node in analysed.model.graph:
        if all(v is None or v.name in weights for v in node.inputs):
            assert node.name not in found.nodes


def test_resolved_says_what_the_plan_does() -> None:
    analysed = analyse(two_layer.build(), {})
    found = seeds(analysed, "mesh: {dp: 2, tp: 4}\nnodes: {'*1/MatMul': {in: [[dp, tp], ~]}}")
    data = resolved(propagate_and_partition(analysed, found).plan, analysed.model)
    assert data["mesh"] == {"devices": 8, "axes": {"dp": 2, "tp": 4}, "atoms": [2, 2, 2]}
    # The only reader wants its columns sharded, so that is the layout of the input.
    assert data["inputs"]["x"] == {"pieces": [2, 4], "text": "[dp, tp]"}
    node = data["nodes"]["/matmul1/MatMul"]
    assert node["in"] == [
        {"pieces": [2, 4], "text": "[dp, tp]"},
        {"pieces": [4, 1], "text": "[tp, ~]"},
    ]
    assert node["out"] == [{"pieces": [2, 1], "text": "[dp, ~] partial sum over tp"}]


def test_mesh_of_one_device_has_nothing_to_split() -> None:
    found = resolve(load_strategy("dp", 1), parse(MATMUL))
    assert found.mesh == Mesh.of(dp=1)
    assert all(s.is_replicated for s in found.inputs.values())


@pytest.mark.parametrize("form", [{}, {"merged_heads": True}], ids=str)
def test_a_transformer_placed_by_hand_moves_what_the_preset_does(form: dict[str, bool]) -> None:
    """Columns then rows (Shoeybi et al., Megatron-LM, 2019): two reductions a layer."""
    text = """
mesh: {dp: 2, tp: 4}
nodes:
  "/layer*/attn/[qkv]_proj/MatMul": {in: [[dp, ~, ~], [~, tp]]}
  "/layer*/attn/out_proj/MatMul": {in: [[dp, ~, tp], [tp, ~]]}
  "/layer*/mlp/fc1/MatMul": {in: [[dp, ~, ~], [~, tp]]}
  "/layer*/mlp/fc2/MatMul": {in: [[dp, ~, tp], [tp, ~]], out: [[dp, ~, ~]]}
"""
    analysed = analyse(transformer.build(layers=2, **form), {})
    by_hand = propagate_and_partition(analysed, seeds(analysed, text))
    strategy = load_strategy("dp=2,tp=4")
    preset = propagate_and_partition(analysed, resolve(strategy, analysed))
    moved = [(c.op, c.value, c.atoms) for c in by_hand.builder.collectives]
    assert moved == [(c.op, c.value, c.atoms) for c in preset.builder.collectives]
    assert [op for op, _, _ in moved] == ["AllReduce"] * 5
    assert by_hand.plan.parameters == preset.plan.parameters
