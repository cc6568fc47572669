"""Two ranks add up a tensor: `mpirun -n 2 python -m onnxpar_runtime.self_test [cpu|cuda]`.

It is the part of `onnxpar doctor` that runs under mpirun. Rank 0 prints one JSON object.
"""

import json
import sys
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime

from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError
from onnxpar_runtime.launch import guarded, init, report
from onnxpar_runtime.library import mpi_version
from onnxpar_runtime.options import CPU, cuda_options

_GRAPH = """<ir_version: 10, opset_import: ["" : 21, "onnxpar" : 1]>
g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce<reduction = "sum", group = [GROUP]>(x) }
"""
_SIZE = 1 << 16


def main() -> int:
    """Runs an AllReduce in onnxruntime on every rank, and checks the sum on every rank."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    try:
        rank = init("nccl" if device == "cuda" else "mpi", device)
    except OnnxparRuntimeError as error:
        report(str(error))
        return error.exit_code

    def body() -> int:
        world = rank.world
        group = ", ".join(map(str, range(world.size)))
        model = onnx.parser.parse_model(_GRAPH.replace("GROUP", group))
        options = onnxruntime.SessionOptions()
        rank.register(options)
        providers: list[Any] = [CPU]
        if device == "cuda" and rank.placement is not None:
            providers.insert(0, cuda_options(rank.placement.index, 0, {}))
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=providers
        )
        own = np.arange(_SIZE, dtype=np.float32) * (rank.index + 1)
        (found,) = session.run(["y"], {"x": own})
        wanted = np.arange(_SIZE, dtype=np.float32) * (world.size * (world.size + 1) // 2)
        if not np.array_equal(found, wanted):
            at = int((found != wanted).argmax())
            raise LaunchError(
                f"the sum of {world.size} ranks is wrong: element {at}: expected {wanted[at]}, "
                f"got {found[at]}"
            )
        if rank.index == 0:
            print(json.dumps({"ranks": world.size, "mpi": mpi_version()}), flush=True)
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    sys.exit(main())
