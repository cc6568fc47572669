"""Builds stand-in CUDA libraries with which onnxruntime's real CUDA provider loads without a GPU.

The provider's own kernel registry, partitioning, memory planning and Memcpy insertion then work as
they do on a GPU: only the device is missing. Memory is the host's (zero when new). Copies, cuBLAS's
products and the kernels of `provider_kernels.cc` are real; other kernels of the provider compute
nothing, so that values computed by them are meaningless (zeros mostly).

Which functions a library must have is read from the provider itself (`nm`): each is generated as
one that returns success, unless a source beside this file defines it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Library:
    """One library: its soname, what its functions begin with, what is written out by hand."""

    soname: str
    prefix: str = ""
    sources: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


RUNTIME = "libcudart.so.13"
LIBRARIES = (
    Library(RUNTIME, sources=("cudart.cc", "memory.cc", "provider_kernels.cc", "streams.cc")),
    Library("libcublas.so.13", sources=("cublas.cc",), needs=(RUNTIME,)),
    Library("libcublasLt.so.13", sources=("cublaslt.cc",)),
    Library("libcurand.so.10", "curand"),
    Library("libcuda.so.1", "cu", ("driver.cc", "driver_work.cc"), needs=(RUNTIME,)),
    # Opened at run time; their functions are strings in the provider.
    Library("libcudnn.so.9", "cudnn", ("cudnn.cc",)),
    Library("libcufft.so.12", "cufft", ("cufft.cc",)),
    # For the list of kernels alone, see tensorrt.cc.
    Library("libnvinfer.so.10", sources=("tensorrt.cc",)),
    Library("libnvonnxparser.so.10"),
    # Opened by the operator library: NCCL, and what compiles its own kernels.
    Library("libnccl.so.2", sources=("nccl.cc",), needs=(RUNTIME,)),
    Library("libnvrtc.so.13", sources=("nvrtc.cc",)),
    Library("libnvrtc-builtins.so.13.0"),
)


def provider() -> Path:
    """Returns onnxruntime's CUDA provider; raises FileNotFoundError where the wheel has none."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("onnxruntime is not installed")
    path = Path(spec.origin).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not path.exists():
        raise FileNotFoundError(f"{path}: this onnxruntime has no CUDA provider")
    return path


def _undefined(library: Path) -> Sequence[tuple[str, str]]:
    """Returns name and version ("" where none) of every function the library wants from others."""
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    pairs = (line.split()[-1].partition("@") for line in lines)
    return [(name, version) for name, _, version in pairs]


def _named(library: Path) -> Sequence[str]:
    """Returns the names of CUDA's functions that the library contains as complete strings."""
    # What begins with plain bytes is found twenty times as fast as one of several prefixes.
    found = re.findall(rb"\0(cu[a-z]*[A-Z]\w+)(?=\0)", library.read_bytes())
    return sorted({name.decode() for name in found})


def _compile(library: Library, names: Sequence[str], folder: Path) -> None:
    stem = library.soname.partition(".")[0]
    stubs = folder / f"{stem}.c"
    stubs.write_text(
        "".join(f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in names)
    )
    script = folder / f"{stem}.map"
    version = library.soname.replace("-", "_")  # a script's names have no dashes
    script.write_text(f"{version} {{ global: *; }};\n")
    sources = [str(HERE / source) for source in library.sources]
    objects = [f"{stubs}.o"]
    subprocess.run(["gcc", "-c", "-fPIC", "-O0", str(stubs), "-o", objects[0]], check=True)
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command.append(f'-DSTANDIN_HERE="{HERE}"')
    link = [f"-Wl,-soname,{library.soname},--version-script={script}"]
    link += ["-o", str(folder / library.soname)]
    needs = [str(folder / need) for need in library.needs]
    subprocess.run([*command, *sources, *objects, *needs, *link], check=True)


def build(folder: Path) -> None:
    """Builds every library into a folder. Raises CalledProcessError where the compiler fails."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, opened = _undefined(provider()), _named(provider())

    def compiled(library: Library) -> None:
        names = {name for name, version in wanted if version == library.soname}
        if library.prefix:
            others = [*opened, *(name for name, version in wanted if not version)]
            names |= {name for name in others if re.match(rf"{library.prefix}[A-Z]", name)}
        _compile(library, sorted(names), folder)

    # At once: tests in other processes wait. Those that need another one are linked with it.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for linked in (False, True):
            list(pool.map(compiled, [each for each in LIBRARIES if bool(each.needs) is linked]))


def environment(folder: Path) -> Mapping[str, str]:
    """Returns the environment of a process that shall load the libraries of a folder."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{path}" if path else str(folder)}


if __name__ == "__main__":
    into = Path(sys.argv[1])
    build(into)
    if sys.argv[2:]:
        sys.exit(subprocess.run(sys.argv[2:], env=environment(into)).returncode)
