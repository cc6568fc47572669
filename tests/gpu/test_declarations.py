"""What is declared of CUDA's driver and of NCCL is what their headers say, where these are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "runtime" / "csrc"
ENTRY = re.compile(r'X\((\w+), "(\w+)"')
# NCCL's header wants of CUDA's runtime no more than these names.
RUNTIME = {
    "cuda_runtime.h": """#include <cuda.h>
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
""",
    "cuda_fp16.h": "",
}


def include(header: str) -> Path | None:
    """Returns where NVIDIA's wheels, or the system's CUDA, have a header."""
    places = [found for path in sys.path for found in Path(path).glob(f"nvidia/*/include/{header}")]
    places += Path("/usr/local").glob(f"cuda*/include/{header}")
    return places[0].parent if places else None


@pytest.mark.gpu  # not for its GPU: where one is, the headers are
def test_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    folders = [include(header) for header in ("cuda.h", "nccl.h")]
    if None in folders or shutil.which("g++") is None:
        pytest.skip("no cuda.h, nccl.h or g++ here")
    for name, text in RUNTIME.items():
        (tmp_path / name).write_text(text)
    tables = {"cuda::Driver": "abi/cuda_driver.h", "nccl::Library": "abi/nccl_abi.h"}
    lines = [
        # A number behind a name is a version, which the header's own macros add.
        f"ENTRY({library}, {member}, {name.removesuffix('_v2')})\n"
        for library, file in tables.items()
        for member, name in ENTRY.findall((CSRC / file).read_text())
    ]
    assert len(lines) > 40
    (tmp_path / "entries.inc").write_text("".join(lines))
    places = [f"-I{path}" for path in (tmp_path, *folders, CSRC)]
    command = ["g++", "-std=c++17", "-fsyntax-only", *places, str(HERE / "declarations.cc")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
