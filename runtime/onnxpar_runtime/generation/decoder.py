"""A program that predicts the next token, on one rank: its sessions, and what does not change.

Batches (`steps`) bind inputs and states to it; it knows what is where, and how long they may be.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onnxpar_format.entries import CarriedEntry, TensorEntry
from onnxpar_format.expressions import ExpressionError, bare_name, evaluate, names_of
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.generation.roles import Roles, roles_of
from onnxpar_runtime.generation.stages import Stages
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest


class Decoder:
    """A program of a directory that predicts tokens and has states.

    Args:
        manifest: The manifest.
        program: Name of the program.
        loader: Makes the sessions.

    Attributes:
        manifest: The manifest.
        program: The program.
        loader: What made its sessions.
        stages: How it runs through the stages of a pipeline; None if there is one stage.
        executors: The rank's graphs: one, or those of its virtual stages.
        scores: Whether the rank has a shard of the logits: it is of the stage that makes them.
        first: The first rank of this stage.
        held: The states that the rank has a shard of, by input.
        roles: What its inputs and outputs are for.
        carried: Its states, by input.
        in_place: Whether the states are extended in place, each sequence at its own length.
        specs: The inputs, by name.
        outputs: The outputs, by name.
        checked: The program, with the ranges of tokens as its only ranges of indices; positions are
            checked at once for a whole batch.
        sources: By symbol, the input and the dim that give its value.
        limited: Symbols whose values may violate their constraint as they grow; `check_length`
            knows the greatest values.
        logits_symbols: The symbols in the shape of the logits.
        place: Name and number of the device.
        notices: What the user should know about how it runs.
        captures: Whether steps of one token are captured as CUDA graphs and replayed.

    Raises:
        InputError: The program does not predict tokens, or has no states.
        DirectoryError: As `Executor`.
        LaunchError: As `Executor`.
    """

    def __init__(self, manifest: Manifest, program: str, loader: Loader) -> None:
        """Loads the rank's graphs."""
        self.manifest, self.program = manifest, manifest.program(program)
        self.roles: Roles = roles_of(self.program)
        self.carried: Mapping[str, CarriedEntry] = {s.input: s for s in self.program.carried}
        if not self.carried:
            raise InputError(
                f"{manifest.directory}: program {program!r} has no states to carry from token to "
                "token; name them with `onnxpar shard --state INPUT=OUTPUT`"
            )
        self.in_place = any(state.appends for state in self.carried.values())
        ranges = [r for r in self.program.index_ranges if r.input == self.roles.tokens.name]
        self.checked = replace(self.program, index_ranges=tuple(ranges))
        self.loader, self.stages = loader, None
        self.first = 0
        pipeline = manifest.pipeline
        if pipeline is None or program not in pipeline.programs:
            self.executors: tuple[Executor, ...] = (Executor(manifest, program, loader),)
        else:
            self.stages = Stages(manifest, program, loader)
            self.executors = self.stages.executors
            self.first = self.stages.outputs[self.roles.logits.name] * manifest.stage_devices
        own = [spec.name for e in self.executors for spec in e.program.outputs]
        self.scores = self.roles.logits.name in own
        self.held = {state.input for e in self.executors for state in e.program.carried}
        self.specs: Mapping[str, TensorEntry] = {spec.name: spec for spec in self.program.inputs}
        self.outputs: Mapping[str, TensorEntry] = {s.name: s for s in self.program.outputs}
        self.place = (loader.device.value, loader.index)
        obstacles = dict.fromkeys(e.obstacle for e in self.executors if e.obstacle is not None)
        self.notices = [f"steps are not captured as CUDA graphs: {why}" for why in obstacles]
        self.captures = all(executor.captures for executor in self.executors)
        self.sources = self._symbol_sources()
        sizes = self.roles.logits.shape
        self.logits_symbols = list(dict.fromkeys(n for size in sizes for n in names_of(size)))
        self.limited = {
            name: symbol
            for name, symbol in manifest.symbols.items()
            if name in self.sources and (symbol.divisor > 1 or symbol.same_as is not None)
        }

    def _symbol_sources(self) -> dict[str, tuple[str, int]]:
        found: dict[str, tuple[str, int]] = {}
        for spec in sorted(self.program.inputs, key=lambda spec: spec.name in self.carried):
            for dim, size in enumerate(spec.shape):
                name = bare_name(size)
                if name is not None:
                    found.setdefault(name, (spec.name, dim))
        return found

    def values(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the values of symbols that the shapes of the tokens and of other inputs give."""
        values = {
            symbol: shapes[name][dim]
            for symbol, (name, dim) in self.sources.items()
            if name in shapes
        }
        first = {bare_name(self.specs[n].shape[0]) for n in self.carried if self.specs[n].shape}
        for name in first - values.keys() - {None}:
            values[str(name)] = shapes[self.roles.tokens.name][0]
        return values

    def check_length(self, values: Mapping[str, int], columns: int, longest: int) -> None:
        """Checks that all steps of a batch can run, before the first one does.

        Args:
            values: Values of symbols.
            columns: The number of columns of the mask in the last run.
            longest: Tokens of the longest sequence then.

        Raises:
            InputError: A sequence would be longer than the model's table of positions, or a symbol
                greater than it may be.
        """
        for most, what, per_column in self._limits(values):
            length = columns if per_column else longest
            if length > most:
                raise InputError(
                    f"prompts and new tokens: expected at most {most} {what}, got {length}"
                )

    def longest(self, values: Mapping[str, int]) -> int | None:
        """Returns the tokens of the longest sequence; None if nothing limits it."""
        return min((most for most, _, _ in self._limits(values)), default=None)

    def _limits(self, values: Mapping[str, int]) -> Iterator[tuple[int, str, bool]]:
        """Yields limits: a length, what limits it, and whether padding counts."""
        for name in self._grown_symbols():
            symbol = self.manifest.symbols.get(name)
            if symbol is not None and symbol.max > symbol.min:
                yield symbol.max, f"positions (the constraint on symbol {name!r})", True
        positions = self.roles.positions
        for demand in self.program.index_ranges:
            if positions is None or demand.input != positions.name:
                continue
            try:
                high = evaluate(demand.high, values)
            except ExpressionError:
                continue
            node = f"node {demand.node!r}, {demand.op_type}"
            yield high + 1, f"in a sequence (the limit of {node})", False

    def _grown_symbols(self) -> set[str]:
        """Returns the symbols of the dims that grow from run to run."""
        sizes = [self.roles.mask.shape[1]] if self.roles.mask is not None else []
        grown = [(self.specs[name], s.grows) for name, s in self.carried.items()]
        sizes += [spec.shape[dim] for spec, dim in grown if dim is not None]
        return {name for size in sizes if (name := bare_name(size)) is not None}

    def state_shape(self, name: str, values: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the local shape of a state; along the dim in which it grows it is 0.

        Raises:
            InputError: Some size does not follow from the values.
        """
        spec, grows = self.specs[name], self.carried[name].grows
        sizes = {bare_name(spec.shape[grows]) or "": 0} if grows is not None else {}
        try:
            return spec.sharding(self.manifest.atoms, {**values, **sizes}).local_shape
        except ExpressionError as error:
            raise InputError(
                f"state {name!r}: its size is not known before the first run: {error}"
            ) from None

    def close(self) -> None:
        """Frees the sessions."""
        if self.stages is not None:
            self.stages.close()
        for executor in self.executors:
            executor.close()
