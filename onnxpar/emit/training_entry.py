"""The manifest's record of a training, besides its programs."""

from dataclasses import asdict

from onnxpar.autodiff.append_loss import LossInfo
from onnxpar.autodiff.optimizer import state_name
from onnxpar.core.symbols.expressions import count_str
from onnxpar.emit.manifest import state_entry
from onnxpar.graph.tensor_parts import TensorPart
from onnxpar.stages.partition_training import PartitionedTraining
from onnxpar.stages.state_buffers import Buffer
from onnxpar_format.manifest import Loss, PartEntry, Training


def training_entry(training: PartitionedTraining) -> Training:
    """Returns the manifest's record of a training."""
    prepared = training.prepared
    parts = {p.name: p.part for p in prepared.selection.trained if p.part is not None}
    states = [
        state_entry(
            b.item,
            b.kind,
            b.parameter,
            b.stages,
            summed=b.summed,
            part=_part_entry(b, parts[b.parameter]) if b.parameter in parts else None,
        )
        for b in training.states
    ]
    flops = training.flops
    return Training(
        loss=_loss_entry(prepared.loss),
        optimizer=training.spec.optimizer,
        states={state.name: state for state in states},
        compute=prepared.compute,
        tensors=prepared.selection.outcome(prepared.unreached),
        notices=tuple(prepared.notices),
        spec=asdict(training.spec),
        flops=None if flops is None else count_str(flops),
        micro_batches=training.strategy.micro_batches or 1,
    )


def _part_entry(buffer: Buffer, part: TensorPart) -> PartEntry:
    name = state_name(buffer.kind, part.tensor)
    return PartEntry(name, part.tensor, part.shape, part.axis, part.start)


def _loss_entry(info: LossInfo) -> Loss:
    count = info.count
    size = None if count is None else count_str(count)
    return Loss(info.spec.kind, info.labels, info.spec.ignore_index, size)
