"""Builds the frozen data of a manifest from parsed JSON; errors name the place in the file."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from onnxpar_format.boxes import ShardBox
from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime.errors import ArtifactError
from onnxpar_runtime.json_reader import JsonReader
from onnxpar_runtime.manifest_entries import (
    COUNTERS,
    STATE_KINDS,
    Collective,
    Contents,
    EqualSizes,
    FileEntry,
    Handed,
    HandedIn,
    IndexRange,
    Loss,
    Parameter,
    Pipeline,
    ProgramEntry,
    ShardFile,
    State,
    StateOutput,
    SymbolEntry,
    SystemInput,
    TensorSpec,
    Training,
    TrainingTensor,
    VirtualStage,
)

SCHEMA = 1
SYSTEM_KINDS = ("symbol", "coordinate", "counter", "loss_weight", "hyperparameter")


def read_contents(path: Path, root: Path, raw: Any) -> Contents:
    """Returns what a manifest says.

    Args:
        path: Where the manifest was, for messages.
        root: The artifact directory.
        raw: The parsed JSON.

    Raises:
        ArtifactError: It is malformed, or of another schema.
    """
    return _Reader(path).contents(root, raw)


class _Reader(JsonReader):
    def contents(self, root: Path, raw: Any) -> Contents:
        schema = self.get(raw, "schema", int, "manifest")
        if schema != SCHEMA:
            raise ArtifactError(
                f"{self.path}: expected schema {SCHEMA}, got {schema}: it was written by another "
                "version of onnxpar; run `onnxpar shard` again"
            )
        mesh = self.get(raw, "mesh", dict, "manifest")
        atoms = self.integers(self.get(mesh, "atoms", list, "mesh"), "mesh.atoms")
        devices = self.get(raw, "devices", int, "manifest")
        stages = self.stages(raw, devices)
        if prod(atoms) != devices // stages or any(a < 2 for a in atoms):
            wanted = f"integers > 1 whose product is {devices // stages}"
            raise self.fail("mesh.atoms", wanted, list(atoms))
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
            digest = self.digest(entry, "sha256", where)
            files[name] = FileEntry(digest, self.get(entry, "bytes", int, where))
        listed = [f for p in programs.values() for f in p.files if f is not None]
        listed += [s.file for p in parameters.values() for s in p.shards]
        for name in listed:
            if name not in files:
                raise ArtifactError(f"{self.path}: {name!r} is used but is not under 'files'")
        pipeline = None
        if "pipeline" in raw:
            pipeline = self.pipeline(raw["pipeline"], stages, devices, programs)
        training = None
        if "training" in raw:
            training = self.training(
                self.get(raw, "training", dict, "manifest"), len(atoms), stages
            )
            for state in training.states.values():
                if state.parameter not in parameters:
                    where = f"training.states {state.spec.name!r}.parameter"
                    raise self.fail(where, "one of the parameters", state.parameter)
        for program in programs.values():
            used = [*program.state_inputs, *(o.state for o in program.state_outputs)]
            for name in used:
                if training is None or name not in training.states:
                    raise self.fail(f"programs.{program.name}", "states of 'training'", name)
        return Contents(
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
            training=training,
            pipeline=pipeline,
        )

    def stages(self, raw: Any, devices: int) -> int:
        """Returns the number of stages, one where there is no pipeline."""
        if "pipeline" not in raw:
            return 1
        entry = self.get(raw, "pipeline", dict, "manifest")
        count: int = self.get(entry, "stages", int, "pipeline")
        if count < 1 or devices % count:
            raise self.fail("pipeline.stages", f"a divisor of the {devices} devices", count)
        return count

    def pipeline(
        self, raw: Any, stages: int, devices: int, programs: Mapping[str, ProgramEntry]
    ) -> Pipeline:
        where = "pipeline"
        chunks, micro = (self.get(raw, key, int, where) for key in ("chunks", "micro_batches"))
        for key, number in (("chunks", chunks), ("micro_batches", micro)):
            if number < 1:
                raise self.fail(f"{where}.{key}", "a number >= 1", number)
        virtual: dict[str, tuple[VirtualStage, ...]] = {}
        updates: dict[str, tuple[str, ...]] = {}
        for name, entries in self.get(raw, "programs", dict, where).items():
            place = f"{where}.programs.{name}"
            if not isinstance(entries, list) or not entries:
                raise self.fail(place, "a list of stages", entries)
            if all(isinstance(e, dict) and "update" in e for e in entries):
                updates[name] = tuple(self.get(e, "update", str, place) for e in entries)
                allowed = {stages, stages * chunks}
            else:
                virtual[name] = tuple(
                    VirtualStage(
                        self.get(e, "forward", str, place),
                        *(
                            None if e.get(key) is None else self.get(e, key, str, place)
                            for key in ("backward", "weight")
                        ),
                    )
                    for e in entries
                )
                allowed = {stages * chunks}
                if name not in programs:
                    raise self.fail(place, f"one of the programs {sorted(programs)}", name)
            if len(entries) not in allowed:
                raise self.fail(
                    place, f"{' or '.join(map(str, sorted(allowed)))} entries", len(entries)
                )
        pipeline = Pipeline(
            stages, chunks, self.get(raw, "schedule", str, where), micro, virtual, updates
        )
        self.check_stages(pipeline, devices // stages, programs)
        return pipeline

    def check_stages(
        self, pipeline: Pipeline, size: int, programs: Mapping[str, ProgramEntry]
    ) -> None:
        """Checks that the parts are programs, have graphs on their stages alone, and fit together.

        Args:
            pipeline: The pipeline.
            size: Ranks of a stage.
            programs: The programs.
        """
        parts = [
            (name, index % pipeline.stages)
            for listed in pipeline.programs.values()
            for index, stage in enumerate(listed)
            for name in stage.programs
        ]
        parts += [
            (name, index % pipeline.stages)
            for listed in pipeline.updates.values()
            for index, name in enumerate(listed)
        ]
        for name, stage in parts:
            if name not in programs:
                raise self.fail("pipeline.programs", f"one of {sorted(programs)}", name)
            ranks = [r for r, file in enumerate(programs[name].files) if file is not None]
            if any(rank // size != stage for rank in ranks):
                wanted = f"files for the ranks of stage {stage} alone"
                raise self.fail(f"programs.{name}.files", wanted, ranks)
            for value in programs[name].handed_in:
                source = programs.get(value.source)
                made = source and {(v.name, v.dtype, v.shape) for v in source.handed_out}
                if not made or (value.name, value.dtype, value.shape) not in made:
                    where = f"programs.{name}.handed_in {value.name!r}"
                    raise self.fail(where, f"{value.source!r} to hand it out alike", value)

    def symbol(self, raw: Any, where: str) -> SymbolEntry:
        numbers = {k: self.get(raw, k, int, where) for k in ("min", "max", "divisor", "remainder")}
        flags = {k: self.get(raw, k, bool, where) for k in ("unique", "per_rank")}
        if numbers["divisor"] < 1 or not 0 <= numbers["remainder"] < numbers["divisor"]:
            raise self.fail(where, "divisor >= 1 and 0 <= remainder < divisor", raw)
        same_as = self.get(raw, "same_as", str, where) if "same_as" in raw else None
        return SymbolEntry(**numbers, **flags, same_as=same_as)

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
        self, name: str, raw: Any, atoms: int, devices: int, symbols: Mapping[str, SymbolEntry]
    ) -> ProgramEntry:
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
            elif kind == "loss_weight":
                system.append(SystemInput(label, loss_weight=True))
            elif kind == "hyperparameter":
                hyper = self.get(entry, "hyperparameter", str, place)
                system.append(SystemInput(label, hyperparameter=hyper))
            else:
                raise self.fail(f"{place}.kind", f"one of {list(SYSTEM_KINDS)}", kind)
        return ProgramEntry(
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
            index_ranges=tuple(
                self.index_range(entry, f"{where}.index_ranges")
                for entry in self.get({"index_ranges": [], **raw}, "index_ranges", list, where)
            ),
            state_inputs=self.names({"state_inputs": [], **raw}, "state_inputs", where),
            state_outputs=tuple(
                StateOutput(
                    self.get(entry, "name", str, f"{where}.state_outputs"),
                    self.get(entry, "state", str, f"{where}.state_outputs"),
                )
                for entry in self.get({"state_outputs": [], **raw}, "state_outputs", list, where)
            ),
            handed_in=tuple(
                HandedIn(*self.handed(entry, place), self.get(entry, "from", str, place))
                for place in (f"{where}.handed_in",)
                for entry in self.get({"handed_in": [], **raw}, "handed_in", list, where)
            ),
            handed_out=tuple(
                Handed(*self.handed(entry, f"{where}.handed_out"))
                for entry in self.get({"handed_out": [], **raw}, "handed_out", list, where)
            ),
        )

    def handed(self, raw: Any, where: str) -> tuple[str, str, tuple[int | str, ...] | None]:
        """Returns name, dtype and shape of a value that programs hand on."""
        name, dtype = self.get(raw, "name", str, where), self.get(raw, "dtype", str, where)
        if dtype not in DTYPES:
            raise self.fail(f"{where} {name!r}.dtype", f"one of {sorted(DTYPES)}", dtype)
        shape = raw.get("shape")
        if shape is None:
            return name, dtype, None
        if not isinstance(shape, list) or not all(type(size) in (int, str) for size in shape):
            raise self.fail(f"{where} {name!r}.shape", "a list of sizes or null", shape)
        return name, dtype, tuple(shape)

    def training(self, raw: Any, atoms: int, stages: int) -> Training:
        where = "training"
        loss = self.get(raw, "loss", dict, where)
        optional: dict[str, Any] = {
            key: None if loss.get(key) is None else self.get(loss, key, kind, f"{where}.loss")
            for key, kind in (("labels", str), ("ignore_index", int), ("count", (int, str)))
        }
        states: dict[str, State] = {}
        for entry in self.get(raw, "states", list, where):
            state = self.state(entry, atoms, stages)
            if state.spec.name in states:
                raise self.fail(f"{where}.states", "each name once", state.spec.name)
            states[state.spec.name] = state
        return Training(
            loss=Loss(kind=self.get(loss, "kind", str, f"{where}.loss"), **optional),
            optimizer=self.get(
                self.get(raw, "optimizer", dict, where), "kind", str, f"{where}.optimizer"
            ),
            states=states,
            tensors=tuple(
                TrainingTensor(
                    name=self.get(entry, "name", str, f"{where}.tensors"),
                    elements=self.get(entry, "elements", int, f"{where}.tensors"),
                    trained=self.get(entry, "trained", bool, f"{where}.tensors"),
                    parameter=self.get(entry, "parameter", bool, f"{where}.tensors"),
                    reason=self.get(entry, "reason", str, f"{where}.tensors"),
                    rule=self.get(entry, "rule", str, f"{where}.tensors"),
                    used_by=self.names(entry, "used_by", f"{where}.tensors"),
                )
                for entry in self.get(raw, "tensors", list, where)
            ),
            notices=self.names(raw, "notices", where),
            spec=self.get(raw, "spec", dict, where),
            compute=None if raw.get("compute") is None else self.get(raw, "compute", str, where),
        )

    def state(self, raw: Any, atoms: int, stages: int) -> State:
        where = "training.states"
        spec = self.tensor(raw, atoms, where)
        where += f" {spec.name!r}"
        kind = self.get(raw, "kind", str, where)
        if kind not in STATE_KINDS:
            raise self.fail(f"{where}.kind", f"one of {list(STATE_KINDS)}", kind)
        sizes = [n for dim in spec.dims for n, _ in dim]
        if not all(isinstance(n, int) for n in sizes):
            raise self.fail(f"{where}.dims", "integer sizes", sizes)
        partial = self.integers(self.get(raw, "partial", list, where), f"{where}.partial")
        used = [*partial, *(a for dim in spec.dims for _, by in dim for a in by)]
        if len(set(used)) != len(used) or any(not 0 <= a < atoms for a in partial):
            raise self.fail(f"{where}.partial", "atoms that do not split it, once each", partial)
        every = list(range(stages))
        held = self.integers(raw.get("stages", every), f"{where}.stages")
        if not held or len(set(held)) != len(held) or not set(held) <= set(every):
            raise self.fail(f"{where}.stages", f"different stages of {every}", list(held))
        return State(
            spec,
            kind,
            self.get(raw, "parameter", str, where),
            partial,
            held,
            self.get({"partial_stages": False, **raw}, "partial_stages", bool, where),
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

    def index_range(self, raw: Any, where: str) -> IndexRange:
        node, op_type, source = (
            self.get(raw, key, str, where) for key in ("node", "op_type", "input")
        )
        low, high, ignored = (raw.get(key) for key in ("low", "high", "ignored"))
        sizes = all(type(size) in (int, str) for size in (low, high))
        if not sizes or type(ignored) not in (int, type(None)):
            raise self.fail(where, "two sizes and an integer or null", raw)
        return IndexRange(node, op_type, source, low, high, ignored)

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
