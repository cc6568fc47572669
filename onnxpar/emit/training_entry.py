"""The manifest's record of a training, besides its programs."""

from dataclasses import asdict

from onnxpar.autodiff.append_loss import LossInfo
from onnxpar.core.symbols import dim_str
from onnxpar.emit.manifest import state_entry
from onnxpar.stages.partition_training import PartitionedTraining
from onnxpar_format.manifest import Loss, Training


def training_entry(training: PartitionedTraining) -> Training:
    """Returns the manifest's record of a training."""
    prepared = training.prepared
    states = [
        state_entry(b.item, b.kind, b.parameter, b.stages, summed=b.summed) for b in training.states
    ]
    return Training(
        loss=_loss_entry(prepared.loss),
        optimizer=training.spec.optimizer,
        states={state.name: state for state in states},
        compute=prepared.compute,
        tensors=prepared.selection.outcome(prepared.unreached),
        notices=tuple(prepared.notices),
        spec=asdict(training.spec),
    )


def _loss_entry(info: LossInfo) -> Loss:
    count = info.count
    size = count if count is None or isinstance(count, int) else dim_str(count)
    return Loss(info.spec.kind, info.labels, info.spec.ignore_index, size)
