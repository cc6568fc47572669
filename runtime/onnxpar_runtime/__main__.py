"""`python -m onnxpar_runtime`: prints the GPUs of this machine and their libraries."""

import sys

from onnxpar_runtime.devices import describe, look, obstacle
from onnxpar_runtime.installed import check_onnxruntime


def main() -> int:
    """Prints what the machine has; returns 0 if CUDA can be used, else 3."""
    check_onnxruntime()
    facts = look()
    print("\n".join(describe(facts)))
    return 3 if obstacle(facts) else 0


if __name__ == "__main__":
    sys.exit(main())
