"""Prints where a GPU's provider puts the nodes of one-node models: JSON in, JSON out.

Reads a list of paths from standard input; for each model prints the provider of its node, and the
positions of the graph's inputs that are wanted in host memory. A node for which no provider has a
kernel has no provider. Needs a GPU or the stand-ins.
"""

import json
import sys
from typing import Any

import onnxruntime

CUDA = "CUDAExecutionProvider"
NOWHERE = "Provider type for"  # … node with name … is not set


def place(path: str) -> Any:
    """Returns `[providers, positions]`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[CUDA])
    except Exception as error:
        if NOWHERE not in str(error):
            raise
        return [[], []]
    if CUDA not in session.get_providers():
        raise RuntimeError("the CUDA provider did not load")
    providers = sorted({part.ep_name for part in session.get_provider_graph_assignment_info()})
    wanted = [i for i, m in enumerate(session.get_input_memory_infos()) if m.name != "Cuda"]
    return [providers, wanted]


json.dump([place(path) for path in json.load(sys.stdin)], sys.stdout)
