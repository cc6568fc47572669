"""Runs single nodes of the domain `onnxpar` on the CPU provider and on CUDA, for tests.

A process of its own, since the CUDA libraries that a process has once looked for are not checked
again. It reads pickled dicts, arguments of `answer`, from its standard input and writes a
pickled pair for each: the outputs on the CPU, and those of each run on CUDA, or an error's text.
"""

import pickle
import sys
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper

from onnxpar.ops.table import REGISTRY
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.options import cuda_options
from onnxpar_runtime.wanted_operators import want_operators
from tests.runtime.kernels.one_node import Attribute, model_of

STANDARD = {d.op_type: d.device_function for d in REGISTRY.defs if d.device_function is not None}
Array = np.ndarray
CPU = "CPUExecutionProvider"


def _value(array: Array) -> onnxruntime.OrtValue:
    flat = np.ascontiguousarray(array).reshape(array.shape)  # which makes a dim where there is none
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            flat.view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(flat)


def _array(value: onnxruntime.OrtValue) -> Array:
    """Returns an output; one of bfloat16, which numpy lacks, as float32."""
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        return np.asarray(value.numpy())
    kind = onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=kind.FLOAT)],
        "g",
        [helper.make_tensor_value_info("x", kind.BFLOAT16, None)],
        [helper.make_tensor_value_info("y", kind.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    return np.asarray(session.run_with_ort_values(["y"], {"x": value})[0].numpy())


def _run(
    rank: Rank,
    queue: Queue | None,
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    runs: int,
    last: Mapping[str, Array],
) -> list[list[Array]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    provider: object = CPU
    if queue is not None:
        provider = cuda_options(queue.index, queue.stream.value or 0, {})
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    want_operators(options, model)
    rank.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    names = [output.name for output in session.get_outputs()]
    values = {name: _value(array) for name, array in feeds.items()}
    made = [session.run_with_ort_values(names, values) for _ in range(runs)]
    if queue is not None and last:
        values = {name: _value(array) for name, array in last.items()}
        made.append(session.run_with_ort_values(names, values))
        queue.synchronize()
        rank.check_device(queue.stream)
    return [[_array(value) for value in run] for run in made]


def answer(
    ranks: Mapping[Queue | None, Rank],
    queue: Queue,
    op: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Attribute],
    outputs: Sequence[bool],
    runs: int,
    last: Sequence[Array | None] | None,
    changed: Sequence[int],
) -> tuple[list[list[Array]] | str, list[list[Array]] | str]:
    """Runs the node once on the CPU, and `runs` times on CUDA.

    With inputs of a `last` run that is made too, and what kernels have met is asked for. The node
    changes the memory of the `changed` operands: it gets copies, which become outputs.
    """
    model = model_of(op, inputs, outputs, attributes)
    for i in changed:
        (node,) = (n for n in model.graph.node if n.name == "node")
        node.input[i] = f"changed{i}"
        model.graph.node.insert(0, helper.make_node("Identity", [f"i{i}"], [f"changed{i}"]))
        model.graph.output.append(onnx.ValueInfoProto(name=f"changed{i}"))
    if op in STANDARD:
        # The CPU has no kernel of ours for it.
        model.functions.append(ir.to_proto(STANDARD[op].made(22)))
        model.opset_import[0].version = 22
    feeds = {f"i{i}": x for i, x in enumerate(inputs) if x is not None}
    more = {f"i{i}": x for i, x in enumerate(last or ()) if x is not None}
    found: list[list[list[Array]] | str] = []
    for where, times in ((None, 1), (queue, runs)):
        try:
            found.append(_run(ranks[where], where, model, feeds, times, more))
        except Exception as error:
            found.append(str(error))
    return found[0], found[1]


def main() -> None:
    """Answers until the input ends."""
    sink = sys.stdout.buffer
    sys.stdout = sys.stderr  # what libraries print is no answer
    queue = Queue(0)
    with World.threads(1) as host, World.threads(1) as device:
        ranks = {None: host.rank(0), queue: device.rank(0)}
        ranks[queue].open_device(0, "staged")
        while True:
            try:
                asked = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(answer(ranks, queue, **asked), sink)
            sink.flush()


if __name__ == "__main__":
    main()
