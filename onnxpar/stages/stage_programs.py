"""Pipelines: the programs of each virtual stage, and their entry in the manifest."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onnxpar.autodiff.training_program import TrainingProgram
from onnxpar.core.errors import ModelError
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.pipeline_places import Copy, PlaceKind, Places, virtual_stage_of
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.ops.registry import Registry
from onnxpar.partition.partitioned_model import PartitionedModel, PipelinePrograms
from onnxpar.propagation.propagate import propagate
from onnxpar.stages.assign_stages import between_stages, decide_virtual_stages, of_micro_batch
from onnxpar.stages.choose_schedule import choose_schedule
from onnxpar.stages.partition_chain import chain_of, floating, known_virtual_stages, where_needed
from onnxpar.stages.place_nodes import order_by_place, put_stages, virtual_stages_by_name
from onnxpar.stages.program_places import forward_places, training_places
from onnxpar.stages.split_program import StageProgram, split
from onnxpar.stages.stage_price import ZERO_BUBBLE, PipelineSplit
from onnxpar.stages.transfers import with_transfers
from onnxpar.strategy import Strategy
from onnxpar.strategy.machine_file import machine_of
from onnxpar.strategy.pipeline_entry import PipelineEntry
from onnxpar_format.manifest import Pipeline

Json = dict[str, Any]


@dataclass
class Staging:
    """The pipeline of one strategy: assigns nodes to virtual stages, and splits programs by them.

    Attributes:
        strategy: The strategy; once a program to train is put into stages, with the sizes of a
            micro-batch.
        entry: Its section `pipeline`.
        copies: For each copy of an initializer in a further stage, by name: its original.
        virtual_stages: The virtual stage of each node of the forward program, by name.
        assign: The virtual stage of each node of the chain, by name.
        trained: Names of the parameters of which each stage has its own.
    """

    strategy: Strategy
    entry: PipelineEntry
    copies: Mapping[str, Copy] = field(default_factory=dict)
    virtual_stages: Mapping[str, int] = field(default_factory=dict)
    assign: Mapping[str, int] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()

    @property
    def pipeline_split(self) -> PipelineSplit:
        """Stages, micro-batches and schedule, as prices need them."""
        entry = self.entry
        count = entry.micro_batches or entry.stages
        return PipelineSplit(entry.stages, count, entry.order, entry.chunks)

    def put(self, program: Program, trained: Collection[str]) -> Mapping[str, Copy]:
        """Puts the nodes of a forward program into virtual stages; its model is changed.

        Args:
            program: The program.
            trained: Names of the parameters of which each stage has its own.

        Raises:
            StrategyError: As `decide_virtual_stages`.
        """
        graph = program.graph
        self.trained = frozenset(trained)
        if trained:
            self.strategy = of_micro_batch(self.strategy, program)
        weights = {*trained, *floating(graph)}
        virtual_by_node = decide_virtual_stages(self.strategy, self.entry, program, weights)
        computed_in = where_needed(graph, virtual_by_node)
        self.copies = put_stages(graph, computed_in, trained, self.entry.stages)
        self.virtual_stages = virtual_stages_by_name(graph)
        self.assign = {node.name or "": virtual for node, virtual in virtual_by_node.items()}
        return self.copies

    def put_forward(self, program: Program) -> Places:
        """Puts the nodes of a program that is not trained into virtual stages, in their order."""
        self.put(program, ())
        return self._forward_places(program.graph)

    def put_again(self, model: ir.Model, registry: Registry) -> Places:
        """Puts the nodes of another program of the same model into the stages of the first."""
        # A trained scalar is a weight, too: its reader stays in the stage that has it.
        weights = {*self.trained, *floating(model.graph)}
        chain = chain_of(model.graph, weights, registry)
        computed_in = where_needed(model.graph, known_virtual_stages(chain, self.virtual_stages))
        put_stages(model.graph, computed_in, (), self.entry.stages)
        return self._forward_places(model.graph)

    def _forward_places(self, graph: ir.Graph) -> Places:
        places = forward_places(graph, self.entry.virtual_stages, self.entry.stages)
        order_by_place(graph, places)
        return places

    def training_places(self, prepared: TrainingProgram) -> Places:
        """Returns the places of forward and backward, and orders the graph by them.

        If the strategy leaves the schedule open, it is chosen here.

        Raises:
            ModelError: A running statistic is kept by several stages.
        """
        graph = prepared.program.graph
        self._check_statistics(graph, prepared.updated)
        if self.entry.is_open:
            chosen = choose_schedule(self.strategy, self.pipeline_split, prepared)
            self.entry = self.entry.model_copy(update={"schedule": chosen})
        places = training_places(
            graph,
            self.entry.virtual_stages,
            self.entry.stages,
            prepared.links,
            list(prepared.gradients.values()),
            list(prepared.gradients),
            split=self.entry.order == ZERO_BUBBLE,
            joined=self.pipeline_split.joined,
        )
        order_by_place(graph, places)
        return places

    def _check_statistics(self, graph: ir.Graph, updated: Mapping[str, str]) -> None:
        """Raises ModelError where a running statistic is kept by several stages."""
        for name in updated.values():
            readers = {use.node for use in graph.initializers[name].uses()}
            stages = sorted({virtual_stage_of(n) % self.entry.stages for n in readers})
            if len(stages) > 1:
                raise ModelError(
                    f"running statistic {name!r}: expected the layers that share it in one "
                    f"pipeline stage, got stages {stages}; set it under pipeline: assign"
                )

    def transfers(
        self, places: Places, program: Program, plan: Plan, states: Collection[str] = ()
    ) -> Places:
        """Returns the places with the shardings in which values go to other stages.

        Args:
            places: The places.
            program: The program.
            plan: Its plan.
            states: Names of its inputs that are buffers of the runtime.
        """
        strategy, machine = self.strategy, machine_of(self.strategy)
        cost = CostModel(machine, plan.mesh, program.env.table, strategy.search.sizes)
        link = between_stages(machine, strategy.stages, plan.mesh.size)
        return with_transfers(places, program, plan, cost, link, states)

    def split(self, program: PartitionedModel, places: Places, name: str) -> "SplitProgram":
        """Splits a partitioned program into one program for each place. Its nodes are used up.

        Args:
            program: The program, partitioned with these places.
            places: Its places.
            name: Prefix of the names of its forward programs: `<name>.<virtual stage>`.
        """
        programs = []
        entries: list[Json] = [{} for _ in range(self.entry.virtual_stages)]
        for virtual, kind in zip(places.virtual_stage, places.kinds, strict=True):
            title = f"{name if kind is PlaceKind.FORWARD else f'{kind}_model'}.{virtual}"
            programs.append(StageProgram(title, virtual % self.entry.stages))
            match kind:
                case PlaceKind.FORWARD | PlaceKind.WEIGHT:
                    entries[virtual][kind.value] = title
                case PlaceKind.BACKWARD:
                    entries[virtual] |= {"backward": title, "weight": None}
                case PlaceKind.FORWARD_BACKWARD:
                    entries[virtual] = {"forward": None, "backward": title, "weight": None}
        made = split(program, places, programs, self.entry.stages, self.copies)
        # Its nodes have moved into the programs, where copies have the names of their originals.
        emptied = replace(
            program,
            builder=replace(program.builder, nodes=[]),
            parameters=tuple(
                replace(p, name=self.copies[p.name].original) if p.name in self.copies else p
                for p in program.parameters
            ),
            stages=self.entry.stages,
        )
        return SplitProgram(emptied, made, tuple(entries))

    def pipeline(
        self, split: Sequence["SplitProgram"], updates: Sequence[PartitionedModel] = ()
    ) -> PipelinePrograms:
        """Returns the entry of the pipeline in the manifest, with the programs that were split.

        Args:
            split: The programs that were split.
            updates: The programs that update states, `<name>.<number>`.
        """
        parts: dict[str, tuple[Mapping[str, str | None], ...]] = {
            s.unsplit.program: s.entries for s in split
        }
        for pm in updates:
            name = pm.program.rpartition(".")[0]
            parts[name] = (*parts.get(name, ()), {"update": pm.program})
        entry = Pipeline(
            stages=self.entry.stages,
            chunks=self.entry.chunks,
            schedule=self.entry.order,
            micro_batches=self.entry.micro_batches or self.entry.stages,
            parts=parts,
        )
        return PipelinePrograms(tuple(s.unsplit for s in split), entry, self.assign)


@dataclass(frozen=True)
class SplitProgram:
    """The programs into which a partitioned program was split.

    Attributes:
        unsplit: The program before it was split, without its nodes.
        programs: The programs, in the order of their places.
        entries: For each virtual stage the names of its programs, by "forward", "backward" and
            "weight".
    """

    unsplit: PartitionedModel
    programs: tuple[PartitionedModel, ...]
    entries: tuple[Json, ...]


def plan_copies(prepared: TrainingProgram, seeds: Seeds) -> Plan:
    """As `propagate`, with copies of parameters and their gradients laid out as the originals.

    Args:
        prepared: The program to plan.
        seeds: What is fixed.
    """
    p = prepared
    plan = propagate(p.program, seeds, p.links)
    if not p.copies:
        return plan
    laid = {name: plan.parameters[copy.original] for name, copy in p.copies.items()}
    if any(plan.parameters[name] != sharding for name, sharding in laid.items()):
        kept = {**seeds.parameters, **laid}
        plan = propagate(p.program, replace(seeds, parameters=kept), p.links)
    outputs = dict(plan.outputs)
    families: dict[str, list[str]] = {}
    for name, copy in p.copies.items():
        families.setdefault(copy.original, [copy.original]).append(name)
    for names in families.values():
        results = [p.gradients[name] for name in names if name in p.gradients]
        common = set.intersection(*(set(outputs[result].partial) for result in results))
        for result in results:
            outputs[result] = outputs[result].with_partial(common, outputs[result].reduction)
    return replace(plan, outputs=outputs)
