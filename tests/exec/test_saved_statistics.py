"""Gradients of normalisations take the statistics that the forward nodes have computed."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer

from onnxpar_runtime.training.group import TrainerGroup
from tests.training_cases import batch_of, hyper, shard

WIDTH = 8
NODES = f"""<ir_version: 10, opset_import: ["" : 23]>
g (float[batch, 6] x) => (float[batch, 5] y)
  <float[6, {WIDTH}] a, float[{WIDTH}] scale, float[{WIDTH}, 5] b> {{
  [up] h = MatMul(x, a)
  [norm] n = RMSNormalization<axis = -1, epsilon = 0.01>(h, scale)
  [down] y = MatMul(n, b)
}}"""
REPLICATED, SPLIT = "devices: 1\n", 'mesh: {tp: 2}\nnodes:\n  "norm": {in: [[~, tp], [tp]]}\n'


def network(seed: int = 0) -> ir.Model:
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, WIDTH), "scale": (WIDTH,), "b": (WIDTH, 5)}
    content = "".join(
        f", float[{', '.join(map(str, shape))}] {name} = "
        f"{{{', '.join(f'{v:.6f}' for v in rng.standard_normal(shape).ravel())}}}"
        for name, shape in shapes.items()
    )
    head, _, rest = NODES.partition("<float[")
    return ir.from_onnx_text(f"{head}<{content[2:]}>{rest.partition('>')[2]}")


def nodes_of(sharded: Path, prefix: str) -> list[onnx.NodeProto]:
    """The training graph's nodes that stand for a node of the model, and for its gradient."""
    path = sharded / "rank0000.training_model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    return [n for n in graph.node if n.name == prefix or n.name.startswith(f"{prefix}/")]


@pytest.mark.parametrize(("strategy", "devices"), [("dp", 1), ("dp=2,tp=2", 4)])
def test_layer_norms_of_a_gpt_are_reduced_once(strategy: str, devices: int, tmp_path: Path) -> None:
    model = transformer.build(layers=2, d_model=16, heads=2, vocab=20, max_positions=8)
    norms = [n.name or "" for n in model.graph if n.op_type == "LayerNormalization"]
    assert len(norms) == 5
    out = shard(tmp_path / "a", model, strategy, devices=devices)
    for norm in norms:
        made = nodes_of(out, norm)
        (forward,) = (n for n in made if n.op_type == "LayerNormalization")
        assert len(forward.output) == 3
        assert [n.op_type for n in made].count("LayerNormalizationGrad") == 1
        # Directly, or with padding set to zero.
        assert {*forward.output[1:]} <= {name for n in made for name in n.input}, norm
        assert not [n.op_type for n in made if n.op_type.startswith("Reduce")], norm


@pytest.mark.parametrize("strategy", [REPLICATED, SPLIT], ids=["replicated", "split"])
def test_rms_norm_is_trained_by_the_saved_deviation(strategy: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "s.yaml").write_text(strategy)
    model = network()
    initial = {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}
    weights = {n: torch.tensor(a.copy(), requires_grad=True) for n, a in initial.items()}
    out = shard(tmp_path / "a", model, tmp_path / "s.yaml", optimizer="sgd")
    made = [n.op_type for n in nodes_of(out, "norm")]
    # One mean of squares, of the forward node. The gradient is one node. If rows are divided, it is
    # its own terms, with a sum over rows and one over columns.
    squares = [op for op in made if op in ("SimplifiedLayerNormalization", "ReduceSumSquare")]
    assert len(squares) == 1 and "RMSNormalization" not in made
    assert not {"Sqrt", "Reciprocal"} & set(made) or strategy == SPLIT
    sums = sum(op in ("ReduceMean", "ReduceSum") for op in made)
    assert (sums, made.count("RMSNormalizationGrad")) == ((2, 0) if strategy == SPLIT else (0, 1))
    batch = batch_of(out, np.random.default_rng(1), batch=4)
    batch["labels"] %= 5
    theirs = torch.optim.SGD(list(weights.values()), 0.1)
    with TrainerGroup(out) as group:
        for step in range(1, 6):
            theirs.zero_grad()
            hidden = torch.tensor(batch["x"]) @ weights["a"]
            normal = torch.nn.functional.rms_norm(hidden, (WIDTH,), weights["scale"], 0.01)
            loss = torch.nn.functional.cross_entropy(
                normal @ weights["b"], torch.tensor(batch["labels"])
            )
            loss.backward()
            theirs.step()
            got = group.train_step([batch], hyper("sgd", step, 0.1)).loss
            # Losses of about 2, each some 20 roundings from the exact one.
            assert got == pytest.approx(loss.item(), rel=0, abs=40 * 2.0**-23)
