"""Splits the program of all ranks into the programs of a pipeline.

The program was partitioned as one, with its nodes in the order of their places. Each place becomes
a program of its own, whose ranks are those of one stage. If a node reads a value that another place
makes, the value is handed over: it becomes an output there and an input here, with the same name.
Values that depend on no data of the micro-batch (sizes, random numbers, resharded weights) are not
handed over but computed again. Exception: values made of trained weights for another virtual stage
are handed over, because their cotangents come back.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.facts.carried_states import CarriedState
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.cleanup import remove_unused
from onnxpar.graph.local_builder import PLACE
from onnxpar.graph.new_nodes import twin
from onnxpar.graph.pipeline_places import Copy, Places
from onnxpar.partition.partitioned_model import Handed, PartitionedModel, States
from onnxpar.stages.place_nodes import replace_reads


@dataclass(frozen=True)
class StageProgram:
    """One program of a pipeline.

    Attributes:
        name: Its name.
        stage: The stage whose ranks run it.
    """

    name: str
    stage: int


def split(
    parted: PartitionedModel,
    places: Places,
    programs: Sequence[StageProgram],
    stages: int,
    copies: Mapping[str, Copy],
) -> tuple[PartitionedModel, ...]:
    """Returns the program of each place. The nodes of the program given are used up.

    Args:
        parted: The program that was partitioned with these places.
        places: The places.
        programs: Name and stage of each place's program.
        stages: Number of stages.
        copies: The copies of initializers in further stages; they get the originals' names.

    Raises:
        ShardingError: A value that is not a tensor would be handed over, or a state is read in
            another place than the one that replaces it.
    """
    return _Split(parted, places, programs, stages, copies).run()


@dataclass
class _Split:
    parted: PartitionedModel
    places: Places
    programs: Sequence[StageProgram]
    stages: int
    copies: Mapping[str, Copy]

    def run(self) -> tuple[PartitionedModel, ...]:
        builder = self.parted.builder
        self.bound = self._bound()
        self.handed_out: list[dict[ir.Value, None]] = [{} for _ in self.programs]
        self.handed_in: list[dict[ir.Value, int]] = [{} for _ in self.programs]
        members: list[list[ir.Node]] = [[] for _ in self.programs]
        for node in builder.nodes:
            if node not in self.bound:
                continue
            place = node.meta[PLACE]
            members[place].append(node)
            for value in _data_read(node):
                self._hand(value, place)
        for item in self.parted.outputs:
            self._hand(item.local, self.places.outputs[item.name])
        free = [node for node in builder.nodes if node not in self.bound]
        chosen = [self._with_free(place, members[place], free) for place in range(len(members))]
        self._rename()
        return tuple(self._program(place, nodes) for place, nodes in enumerate(chosen))

    def _bound(self) -> set[ir.Node]:
        """The nodes that run only in their own place.

        They depend on data of the micro-batch; or they depend on a state, and another virtual stage
        reads them.
        """
        fed = self.parted.states.inputs
        data = {i.local for i in self.parted.inputs if i.name not in fed}
        bound: set[ir.Node] = set()
        while True:
            for node in self.parted.builder.nodes:
                if any(v in data for v in _data_read(node)):
                    bound.add(node)
                    data.update(node.outputs)
            foreign = self._foreign() - bound
            if not foreign:
                break
            bound |= foreign
            data.update(v for node in foreign for v in node.outputs)
        # An output is made in its own place, whatever it depends on.
        for item in self.parted.outputs:
            maker = item.local.producer()
            if maker is not None:
                bound.add(maker)
        return bound

    def _foreign(self) -> set[ir.Node]:
        """The nodes that depend on states and that another virtual stage reads.

        If the other stage computed them again, their cotangents would not reach the first stage,
        which has the states.
        """
        of_states = {p.local for p in self.parted.parameters if p.fed}
        stages = self.places.virtual_stage
        foreign = set()
        for node in self.parted.builder.nodes:
            for value in _data_read(node):
                if value not in of_states:
                    continue
                of_states.update(node.outputs)
                maker = value.producer()
                if maker is not None and stages[maker.meta[PLACE]] != stages[node.meta[PLACE]]:
                    foreign.add(maker)
        return foreign

    def _hand(self, value: ir.Value, place: int) -> None:
        maker = value.producer()
        if maker is None or maker not in self.bound or maker.meta[PLACE] == place:
            return
        source = maker.meta[PLACE]
        if source > place:
            raise AssertionError(f"{value.name!r} is computed after it is read")
        if not isinstance(value.type, ir.TensorType | None):
            raise ShardingError(
                f"{value.name!r} of type {value.type} crosses a pipeline stage boundary: "
                "expected a tensor; assign its producer and its consumers to one stage"
            )
        self.handed_out[source][value] = None
        self.handed_in[place][value] = source

    def _with_free(
        self, place: int, members: Sequence[ir.Node], free: Sequence[ir.Node]
    ) -> list[ir.Node]:
        """The nodes of a place, and copies of the nodes that it computes again, in their order."""
        outputs = [i.local for i in self.parted.outputs if self.places.outputs[i.name] == place]
        wanted = {v for node in members for v in _data_read(node)} | set(outputs)
        needed: set[ir.Node] = set()
        for node in reversed(free):
            if any(v in wanted for v in node.outputs):
                needed.add(node)
                wanted.update(_data_read(node))
        copied: dict[ir.Value, ir.Value] = {}
        found: list[ir.Node] = []
        inside = set(members)
        for node in self.parted.builder.nodes:
            if node in needed:
                copy = twin(node, [None if v is None else copied.get(v, v) for v in node.inputs])
                copied.update(zip(node.outputs, copy.outputs, strict=True))
                found.append(copy)
            elif node in inside:
                replace_reads(node, copied)
                found.append(node)
        return found

    def _rename(self) -> None:
        """Gives copies of initializers the names of their originals."""
        parameters = []
        for parameter in self.parted.parameters:
            copy = self.copies.get(parameter.name)
            if copy is not None:
                parameter.local.name = copy.original
                parameter = replace(parameter, name=copy.original)
            parameters.append(parameter)
        fed = self.parted.states.inputs - set(self.copies)
        self.parted = replace(
            self.parted,
            parameters=tuple(parameters),
            states=replace(self.parted.states, inputs=fed),
        )

    def _program(self, place: int, nodes: list[ir.Node]) -> PartitionedModel:
        parted, program = self.parted, self.programs[place]
        entering = {
            value: ir.Value(name=value.name, type=value.type, shape=value.shape)
            for value in self.handed_in[place]
        }
        for node in nodes:
            replace_reads(node, entering)
        received = tuple(
            Handed(entering[value], self.programs[source].name)
            for value, source in self.handed_in[place].items()
        )
        outputs = tuple(i for i in parted.outputs if self.places.outputs[i.name] == place)
        given = tuple(Handed(value, program.name) for value in self.handed_out[place])
        builder = parted.builder.part(nodes)
        remove_unused(builder, [*(i.local for i in outputs), *(h.local for h in given)])
        read = {v for node in builder.nodes for v in read_by(node)} | {i.local for i in outputs}
        names = {name for name, place_of in self.places.nodes.items() if place_of == place}
        made = {i.name for i in outputs}
        carried = tuple(state for state in parted.carried if state.output in made)
        self._check_states({i.name for i in parted.inputs if i.local in read}, carried, program)
        return replace(
            parted,
            program=program.name,
            builder=builder,
            inputs=tuple(i for i in parted.inputs if i.local in read),
            outputs=outputs,
            parameters=tuple(p for p in parted.parameters if p.local in read),
            replicated=tuple(r for r in parted.replicated if r[0] in names),
            equalities=tuple(e for e in parted.equalities if e.node in names),
            ranges=tuple(r for r in parted.ranges if r.node in names),
            carried=carried,
            states=States(
                parted.states.inputs,
                {n: s for n, s in parted.states.outputs.items() if n in made},
            ),
            stage=program.stage,
            stages=self.stages,
            virtual_stage=self.places.virtual_stage[place],
            handed_in=received,
            handed_out=given,
        )

    def _check_states(
        self, read: Collection[str], carried: Sequence[CarriedState], program: StageProgram
    ) -> None:
        """Raises ShardingError where a program reads a state that another one replaces."""
        made = {state.input for state in carried}
        for state in self.parted.carried:
            if state.input in read and state.input not in made:
                raise ShardingError(
                    f"state {state.input!r} is read by {program.name!r} on pipeline stage "
                    f"{program.stage}, but {state.output!r}, which replaces it, is computed in "
                    "another program; assign their nodes to one stage (pipeline: assign)"
                )


def _data_read(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads, without the token of a collective."""
    read = read_by(node)
    return read[:1] if node.domain == DOMAIN and "atoms" in node.meta else read
