"""The C++ sources: what Python declares of their functions, and which folder includes which."""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onnxpar_runtime.library import MPI_SIGNATURES, SIGNATURES

CSRC = Path(__file__).parents[2] / "runtime" / "csrc"
EXPORTED = re.compile(r"^ONNXPAR_(?:MPI_)?EXPORT ([^(]*?)(\w+)\(([^)]*)\)", re.MULTILINE)
VALUES = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
}
POINTERS = {
    "char": ctypes.c_char_p,
    "int": ctypes.POINTER(ctypes.c_int),
    "int64_t": ctypes.POINTER(ctypes.c_int64),
}
FOLDERS = ("abi", "transport", "collective", "kernels", "directory", "capi")
Prototypes = Mapping[str, tuple[Any, list[Any]]]


def ctypes_of(text: str) -> Any:
    """The type of a result, or of a parameter whose name may follow."""
    words = text.replace("const ", "").replace("*", " * ").replace("&", " * ").split()
    if "*" in words:  # what no other type is known for is an address to Python
        return POINTERS.get(words[0], ctypes.c_void_p)
    return VALUES[words[0]]


def exported(source: str) -> Prototypes:
    """The functions that a C++ source exports."""
    found = {}
    for result, name, parameters in EXPORTED.findall(source):
        arguments = [ctypes_of(p) for p in parameters.split(",") if p.strip() not in ("", "void")]
        found[name] = (ctypes_of(result), arguments)
    return found


def test_a_prototype_is_read() -> None:
    source = """ONNXPAR_EXPORT int f(const W* w, int64_t* a,
                                 const char* b, size_t c);
ONNXPAR_EXPORT void* g();
"""
    counter = ctypes.POINTER(ctypes.c_int64)
    f = (ctypes.c_int, [ctypes.c_void_p, counter, ctypes.c_char_p, ctypes.c_size_t])
    assert exported(source) == {"f": f, "g": (ctypes.c_void_p, [])}
    with pytest.raises(KeyError):
        exported("ONNXPAR_EXPORT int f(long a);")


def test_the_operator_library_is_declared_as_its_headers_say() -> None:
    own, public = (CSRC / "capi" / name for name in ("capi.h", "onnxpar.h"))
    found, others = exported(own.read_text()), exported(public.read_text())
    assert len(found) == own.read_text().count("ONNXPAR_EXPORT ")
    assert len(others) == public.read_text().count("ONNXPAR_EXPORT ") - 2  # its definitions
    assert {*found} <= {*SIGNATURES}  # Python does not call all of the others
    assert {name: {**found, **others}[name] for name in SIGNATURES} == SIGNATURES


def test_the_mpi_library_is_declared_as_its_source_says() -> None:
    source = (CSRC / "transport" / "mpi.cc").read_text()
    # The operator library calls these.
    own = re.sub(r"ONNXPAR_MPI_EXPORT [^(]*onnxpar_mpi_(transport|guard|begin)\(", "", source)
    found = exported(own)
    assert found == MPI_SIGNATURES


def test_each_folder_includes_only_those_before_it() -> None:
    wrong = [
        f"{path.relative_to(CSRC)} includes {included}/"
        for place, folder in enumerate(FOLDERS)
        for path in sorted((CSRC / folder).rglob("*.*"))
        for included in re.findall(r'#include "(\w+)/', path.read_text())
        if included not in FOLDERS[: place + 1]
    ]
    assert wrong == []
