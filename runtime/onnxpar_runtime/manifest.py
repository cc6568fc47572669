"""Reads `manifest.json` (schema 1) of an artifact directory into frozen data, and validates it.

The manifest is the only thing that the runtime knows of the transformer's decisions: mesh, symbols,
programs with their inputs and outputs, parameters as explicit boxes of indices, files with
checksums.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from onnxpar_runtime.boxes import Cut
from onnxpar_runtime.dtypes import DTYPES
from onnxpar_runtime.errors import ArtifactError
from onnxpar_runtime.expressions import Size, evaluate

SCHEMA = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Symbol:
    """Constraint of a symbolic dim: its value is divisor·N + remainder, N ≥ 1, in [min, max].

    Attributes:
        min: Smallest value.
        max: Largest value; no limit unless it is larger than `min`.
        divisor: The d of d·N + r.
        remainder: The r of d·N + r, 0 ≤ r < d.
        unique: Whether every use is the same number.
        per_rank: Whether data-parallel ranks may have different values.
        same_as: Another symbol whose value this one must have.
    """

    min: int = 1
    max: int = 0
    divisor: int = 1
    remainder: int = 0
    unique: bool = False
    per_rank: bool = False
    same_as: str | None = None

    @property
    def constraint(self) -> str:
        """The constraint for people: `8*N, N >= 1, at most 512`."""
        text = "N" if self.divisor == 1 else f"{self.divisor}*N"
        text += f" + {self.remainder}" if self.remainder else ""
        text += ", N >= 1"
        if self.min > self.divisor + self.remainder:
            text += f", at least {self.min}"
        return text + (f", at most {self.max}" if self.max > self.min else "")

    def admits(self, value: int) -> bool:
        """Whether the constraint holds for `value`."""
        if value < max(self.min, self.divisor + self.remainder):
            return False
        if self.max > self.min and value > self.max:
            return False
        return value % self.divisor == self.remainder

    def admissible(self, start: int, count: int) -> list[int]:
        """Returns up to `count` admissible values from `start` on, ascending."""
        first = max(start, self.min, self.divisor + self.remainder)
        first += (self.remainder - first) % self.divisor
        values = range(first, first + count * self.divisor, self.divisor)
        return [v for v in values if self.admits(v)]


@dataclass(frozen=True)
class TensorSpec:
    """One input, output or parameter: name, dtype name, and global shape with its sharding.

    Attributes:
        name: Name in the original model and in the rank's graph.
        dtype: ONNX's name of the element type in lower case (`float32`).
        shape: Global shape as size expressions.
        dims: Components `(size expression, atoms)` of each dim.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    dims: tuple[tuple[tuple[Size, tuple[int, ...]], ...], ...]

    def cut(
        self,
        atoms: tuple[int, ...],
        values: Mapping[str, int],
        local: tuple[int, ...] | None = None,
    ) -> Cut:
        """Returns how the tensor is cut when the symbols have these values.

        Args:
            atoms: Sizes of the mesh's atoms.
            values: Values of the symbols.
            local: Local shape of a part, which gives the size of a whole dim whose expression has a
                symbol without a value (a size that depends on data).

        Raises:
            ExpressionError: A size cannot be evaluated and `local` does not give it.
        """
        dims: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
        for index, dim in enumerate(self.dims):
            whole = len(dim) == 1 and not dim[0][1]
            if whole and local is not None:
                dims.append(((local[index], ()),))
            else:
                dims.append(tuple((evaluate(size, values), by) for size, by in dim))
        return Cut(atoms, tuple(dims))


COUNTERS = ("seed", "step", "micro_batch")
"""What random numbers are keyed by, next to the node that draws them."""


@dataclass(frozen=True)
class SystemInput:
    """An int64 input of shape [1] that the runtime fills.

    Attributes:
        name: Name in the rank's graph.
        symbol: The symbol whose global value it takes, or None.
        atom: The atom whose coordinate of the rank it takes, or None.
        counter: The session's counter that it takes (one of `COUNTERS`), or None.
    """

    name: str
    symbol: str | None = None
    atom: int | None = None
    counter: str | None = None


@dataclass(frozen=True)
class Collective:
    """A collective operator of the program: what it moves, over which atoms, and why.

    Attributes:
        op: Operator of the domain `onnxpar`.
        node: Name of the node.
        value: Name of the global value.
        atoms: Atoms that span its groups.
        bytes: Bytes that a rank sends, as a size expression (may be fractional).
        reason: Node and operand that want it.
        before: Layout before.
        after: Layout after.
    """

    op: str
    node: str
    value: str
    atoms: tuple[int, ...]
    bytes: Size
    reason: str
    before: str
    after: str


@dataclass(frozen=True)
class EqualSizes:
    """Two dims of the operands of a node that every rank takes to be of one size.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        values: Names of the two global values.
        dims: Which dim of each.
        sizes: Its size as an expression.
    """

    node: str
    op_type: str
    values: tuple[str, str]
    dims: tuple[int, int]
    sizes: tuple[Size, Size]


@dataclass(frozen=True)
class Program:
    """One program of the artifact, a graph per rank.

    Attributes:
        name: `model`, …
        files: Graph file of each rank, None where it was not written.
        inputs: Inputs with global shapes.
        outputs: Outputs with global shapes; never partial.
        system_inputs: Inputs that the runtime fills.
        collectives: In the order in which every rank issues them.
        equal_sizes: What a run must check, since nothing but the operators says it.
    """

    name: str
    files: tuple[str | None, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    system_inputs: tuple[SystemInput, ...]
    collectives: tuple[Collective, ...]
    equal_sizes: tuple[EqualSizes, ...] = ()


@dataclass(frozen=True)
class ShardBox:
    """A box of indices of a global parameter and where it lies in the shard, `[start, stop)`."""

    source: tuple[tuple[int, int], ...]
    local: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ShardFile:
    """One unique shard of a parameter: who holds it, where it is stored, which boxes it has."""

    ranks: tuple[int, ...]
    file: str
    boxes: tuple[ShardBox, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter and its shards."""

    spec: TensorSpec
    shards: tuple[ShardFile, ...]


@dataclass(frozen=True)
class FileEntry:
    """Checksum (hexadecimal SHA-256) and size in bytes of a file of the directory."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """An artifact directory's contents.

    Attributes:
        directory: The directory.
        generator: Name and version of what wrote it.
        model: Name of the model.
        axes: Named mesh axes with their sizes, major first.
        atoms: Sizes of the atoms, major first.
        devices: Number of ranks.
        symbols: Constraints by name.
        programs: By name.
        parameters: By name.
        files: Checksums by file name.
        strategy: The strategy as resolved.
        replicated: Nodes that every rank computes whole, with the reason.
    """

    directory: Path
    generator: str
    model: str
    axes: tuple[tuple[str, int], ...]
    atoms: tuple[int, ...]
    devices: int
    symbols: Mapping[str, Symbol]
    programs: Mapping[str, Program]
    parameters: Mapping[str, Parameter]
    files: Mapping[str, FileEntry]
    strategy: Mapping[str, Any]
    replicated: tuple[Mapping[str, Any], ...]

    @staticmethod
    def load(directory: str | Path) -> "Manifest":
        """Reads and validates a directory's manifest, and the sizes of its files.

        Raises:
            ArtifactError: The directory or a file is missing, truncated, or the manifest is
            malformed
                or of another schema.
        """
        root = Path(directory)
        path = root / FILE_NAME
        if not root.is_dir():
            raise ArtifactError(f"{root}: no such directory")
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ArtifactError(
                f"{root}: not an artifact directory, it has no {FILE_NAME} (is it the output of "
                "`onnxpar shard`?)"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: cannot be read: {error}") from None
        try:
            raw = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ArtifactError(f"{path}: not valid JSON: {error}") from None
        manifest = _Reader(path).manifest(root, raw)
        manifest.check_files()
        return manifest

    def program(self, name: str) -> Program:
        """Returns a program by name.

        Raises:
            ArtifactError: There is none; the message names those there are.
        """
        if name not in self.programs:
            raise ArtifactError(
                f"{self.directory}: no program {name!r}, it has {sorted(self.programs)}"
            )
        return self.programs[name]

    def graph_path(self, program: str, rank: int) -> Path:
        """Returns the path of a rank's graph.

        Raises:
            ArtifactError: The rank is not one of the mesh, or its graph was not written.
        """
        files = self.program(program).files
        if not 0 <= rank < self.devices:
            raise ArtifactError(
                f"{self.directory}: expected a rank from 0 to {self.devices - 1}, got {rank}"
            )
        name = files[rank]
        if name is None:
            have = [r for r, f in enumerate(files) if f is not None]
            raise ArtifactError(
                f"{self.directory}: the graph of rank {rank} was not written, only those of {have}"
            )
        return self.directory / name

    def check_files(self) -> None:
        """Raises ArtifactError unless every file is there with the size that the manifest says."""
        for name, entry in self.files.items():
            path = self.directory / name
            try:
                size = path.stat().st_size
            except OSError:
                raise ArtifactError(f"{path}: missing, though the manifest names it") from None
            if size != entry.bytes:
                state = "truncated" if size < entry.bytes else "changed"
                raise ArtifactError(
                    f"{path}: {state}, expected {entry.bytes} bytes, got {size} bytes"
                )

    def verify_files(self) -> None:
        """Raises ArtifactError unless every file's SHA-256 is the manifest's; reads every byte."""
        for name, entry in self.files.items():
            with (self.directory / name).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != entry.sha256:
                raise ArtifactError(
                    f"{self.directory / name}: changed, expected SHA-256 {entry.sha256}, "
                    f"got {digest}"
                )


class _Reader:
    """Builds the frozen data from parsed JSON; every error names the place in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, where: str, expected: str, got: object) -> ArtifactError:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ArtifactError(f"{self.path}: {where}: expected {expected}, got {shown}")

    def get(self, raw: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
        if not isinstance(raw, dict):
            raise self.fail(where, "an object", raw)
        if key not in raw:
            raise ArtifactError(f"{self.path}: {where}: {key!r} is missing")
        value = raw[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise self.fail(f"{where}.{key}", names, value)
        return value

    def integers(self, raw: Any, where: str) -> tuple[int, ...]:
        if not isinstance(raw, list) or not all(type(v) is int for v in raw):
            raise self.fail(where, "a list of integers", raw)
        return tuple(raw)

    def manifest(self, root: Path, raw: Any) -> Manifest:
        schema = self.get(raw, "schema", int, "manifest")
        if schema != SCHEMA:
            raise ArtifactError(
                f"{self.path}: expected schema {SCHEMA}, got {schema}: it was written by another "
                "version of onnxpar; run `onnxpar shard` again"
            )
        mesh = self.get(raw, "mesh", dict, "manifest")
        atoms = self.integers(self.get(mesh, "atoms", list, "mesh"), "mesh.atoms")
        devices = self.get(raw, "devices", int, "manifest")
        if prod(atoms) != devices or any(a < 2 for a in atoms):
            raise self.fail("mesh.atoms", f"integers > 1 whose product is {devices}", list(atoms))
        axes = []
        for axis in self.get(mesh, "axes", list, "mesh"):
            if not (isinstance(axis, list) and len(axis) == 2 and type(axis[1]) is int):
                raise self.fail("mesh.axes", "[name, size] pairs", axis)
            axes.append((str(axis[0]), axis[1]))
        symbols = {
            name: self.symbol(entry, f"symbols.{name}")
            for name, entry in self.get(raw, "symbols", dict, "manifest").items()
        }
        for name, symbol in symbols.items():
            if symbol.same_as is not None and symbol.same_as not in symbols:
                place = f"symbols.{name}.same_as"
                raise self.fail(place, f"one of the symbols {sorted(symbols)}", symbol.same_as)
        programs = {
            name: self.program(name, entry, len(atoms), devices, symbols)
            for name, entry in self.get(raw, "programs", dict, "manifest").items()
        }
        parameters = {
            name: self.parameter(name, entry, len(atoms), devices)
            for name, entry in self.get(raw, "parameters", dict, "manifest").items()
        }
        files = {}
        for name, entry in self.get(raw, "files", dict, "manifest").items():
            self.file_name(name, "files")
            where = f"files.{name}"
            digest = self.get(entry, "sha256", str, where)
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise self.fail(f"{where}.sha256", "64 hexadecimal digits", digest)
            files[name] = FileEntry(digest, self.get(entry, "bytes", int, where))
        listed = [f for p in programs.values() for f in p.files if f is not None]
        listed += [s.file for p in parameters.values() for s in p.shards]
        for name in listed:
            if name not in files:
                raise ArtifactError(f"{self.path}: {name!r} is used but is not under 'files'")
        return Manifest(
            directory=root,
            generator=self.get(raw, "generator", str, "manifest"),
            model=self.get(raw, "model", str, "manifest"),
            axes=tuple(axes),
            atoms=atoms,
            devices=devices,
            symbols=symbols,
            programs=programs,
            parameters=parameters,
            files=files,
            strategy=self.get(raw, "strategy", dict, "manifest"),
            replicated=tuple(self.get(raw, "replicated", list, "manifest")),
        )

    def file_name(self, name: Any, where: str) -> str:
        # onnxruntime refuses external data outside a model's folder, and a manifest from elsewhere
        # must not make the runtime read other people's files.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise self.fail(where, "a file name without folders", name)
        return name

    def symbol(self, raw: Any, where: str) -> Symbol:
        numbers = {k: self.get(raw, k, int, where) for k in ("min", "max", "divisor", "remainder")}
        flags = {k: self.get(raw, k, bool, where) for k in ("unique", "per_rank")}
        if numbers["divisor"] < 1 or not 0 <= numbers["remainder"] < numbers["divisor"]:
            raise self.fail(where, "divisor >= 1 and 0 <= remainder < divisor", raw)
        same_as = self.get(raw, "same_as", str, where) if "same_as" in raw else None
        return Symbol(**numbers, **flags, same_as=same_as)

    def tensor(self, raw: Any, atoms: int, where: str, name: str | None = None) -> TensorSpec:
        weights = name is not None
        name = self.get(raw, "name", str, where) if name is None else name
        where = f"{where} {name!r}"
        dtype = self.get(raw, "dtype", str, where)
        # Parameters may be of any type: onnxruntime reads them, not we.
        if not weights and dtype not in DTYPES:
            raise self.fail(f"{where}.dtype", f"one of {sorted(DTYPES)}", dtype)
        shape = self.get(raw, "shape", list, where)
        dims = []
        for dim in self.get(raw, "dims", list, where):
            if not isinstance(dim, list) or not dim:
                raise self.fail(f"{where}.dims", "a list of components a dim", dim)
            parts = []
            for part in dim:
                size = self.get(part, "size", (int, str), f"{where}.dims")
                by = self.integers(self.get(part, "atoms", list, f"{where}.dims"), f"{where}.dims")
                parts.append((size, by))
            dims.append(tuple(parts))
        used = [a for dim in dims for _, by in dim for a in by]
        if len(set(used)) != len(used) or any(not 0 <= a < atoms for a in used):
            raise self.fail(f"{where}.dims", "each atom of the mesh at most once", used)
        if len(dims) != len(shape) or not all(type(s) in (int, str) for s in shape):
            raise self.fail(f"{where}.shape", f"{len(dims)} sizes", shape)
        return TensorSpec(name, dtype, tuple(shape), tuple(dims))

    def program(
        self, name: str, raw: Any, atoms: int, devices: int, symbols: Mapping[str, Symbol]
    ) -> Program:
        where = f"programs.{name}"
        files = self.get(raw, "files", list, where)
        if len(files) != devices:
            raise self.fail(f"{where}.files", f"{devices} entries, one a rank", files)
        graphs = [f if f is None else self.file_name(f, f"{where}.files") for f in files]
        system = []
        for entry in self.get(raw, "system_inputs", list, where):
            kind = self.get(entry, "kind", str, f"{where}.system_inputs")
            label = self.get(entry, "name", str, f"{where}.system_inputs")
            place = f"{where}.system_inputs {label!r}"
            if kind == "symbol":
                symbol = self.get(entry, "symbol", str, place)
                if symbol not in symbols:
                    raise self.fail(place, f"one of the symbols {sorted(symbols)}", symbol)
                system.append(SystemInput(label, symbol=symbol))
            elif kind == "coordinate":
                atom = self.get(entry, "atom", int, place)
                if not 0 <= atom < atoms:
                    raise self.fail(place, f"an atom from 0 to {atoms - 1}", atom)
                system.append(SystemInput(label, atom=atom))
            elif kind == "counter":
                counter = self.get(entry, "counter", str, place)
                if counter not in COUNTERS:
                    raise self.fail(place, f"one of the counters {list(COUNTERS)}", counter)
                system.append(SystemInput(label, counter=counter))
            else:
                raise self.fail(f"{place}.kind", "'symbol', 'coordinate' or 'counter'", kind)
        return Program(
            name=name,
            files=tuple(graphs),
            inputs=self.tensors(raw, "inputs", atoms, where),
            outputs=self.tensors(raw, "outputs", atoms, where),
            system_inputs=tuple(system),
            collectives=tuple(
                self.collective(entry, f"{where}.collectives")
                for entry in self.get(raw, "collectives", list, where)
            ),
            equal_sizes=tuple(
                self.equal_sizes(entry, f"{where}.equal_sizes")
                for entry in self.get({"equal_sizes": [], **raw}, "equal_sizes", list, where)
            ),
        )

    def equal_sizes(self, raw: Any, where: str) -> EqualSizes:
        values, dims, sizes = (self.get(raw, k, list, where) for k in ("values", "dims", "sizes"))
        kinds = [[type(item) for item in side] for side in zip(values, dims, sizes, strict=False)]
        if len(kinds) != 2 or any(kind not in ([str, int, int], [str, int, str]) for kind in kinds):
            raise self.fail(where, "two values, two dims and two sizes", raw)
        return EqualSizes(
            node=self.get(raw, "node", str, where),
            op_type=self.get(raw, "op_type", str, where),
            values=(values[0], values[1]),
            dims=(dims[0], dims[1]),
            sizes=(sizes[0], sizes[1]),
        )

    def tensors(self, raw: Any, key: str, atoms: int, where: str) -> tuple[TensorSpec, ...]:
        entries: Iterable[Any] = self.get(raw, key, list, where)
        return tuple(self.tensor(entry, atoms, f"{where}.{key}") for entry in entries)

    def collective(self, raw: Any, where: str) -> Collective:
        texts = {
            key: self.get(raw, key, str, where)
            for key in ("op", "node", "value", "reason", "before", "after")
        }
        return Collective(
            atoms=self.integers(self.get(raw, "atoms", list, where), f"{where}.atoms"),
            bytes=self.get(raw, "bytes", (int, str), where),
            **texts,
        )

    def parameter(self, name: str, raw: Any, atoms: int, devices: int) -> Parameter:
        where = f"parameters.{name}"
        spec = self.tensor(raw, atoms, "parameters", name)
        shards = []
        for entry in self.get(raw, "shards", list, where):
            ranks = self.integers(self.get(entry, "ranks", list, where), f"{where}.ranks")
            if any(not 0 <= r < devices for r in ranks):
                raise self.fail(f"{where}.ranks", f"ranks from 0 to {devices - 1}", list(ranks))
            boxes = tuple(
                ShardBox(self.box(box, "global", where), self.box(box, "local", where))
                for box in self.get(entry, "boxes", list, where)
            )
            shards.append(
                ShardFile(
                    ranks=ranks,
                    file=self.file_name(self.get(entry, "file", str, where), f"{where}.file"),
                    boxes=boxes,
                    local_shape=self.integers(
                        self.get(entry, "local_shape", list, where), f"{where}.local_shape"
                    ),
                )
            )
        return Parameter(spec, tuple(shards))

    def box(self, raw: Any, key: str, where: str) -> tuple[tuple[int, int], ...]:
        box = []
        for pair in self.get(raw, key, list, where):
            start, *rest = self.integers(pair, f"{where}.{key}") or (0,)
            if len(rest) != 1 or not 0 <= start <= rest[0]:
                raise self.fail(f"{where}.{key}", "[start, stop] pairs", pair)
            box.append((start, rest[0]))
        return tuple(box)
