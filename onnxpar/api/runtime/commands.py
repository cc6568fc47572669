"""Running and training what has been divided, as the commands do."""

import sys
from collections.abc import Sequence
from pathlib import Path

from onnxpar_runtime import commands
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.supervisor import Job, supervise
from onnxpar_runtime.training import commands as training
from onnxpar_runtime.training.checkpoints import Saving
from onnxpar_runtime.training.hyper import Settings, parse_betas


def run(
    directory: Path,
    inputs: Path,
    outputs: Path,
    *,
    device: str = "auto",
    transport: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Runs this process's rank of an artifact directory once; returns the exit code.

    Args:
        directory: The artifact directory.
        inputs: `.npz` file of global arrays named as the inputs.
        outputs: `.npz` file to write.
        device: `auto`, `cpu`, `cuda` or `cuda:NUMBER`.
        transport: `auto`, `mpi`, `nccl` or `threads`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    return commands.run(
        directory,
        inputs,
        outputs,
        device=device,
        transport=transport,
        log_dir=log_dir,
        ort_options=parse_pairs(ort),
        custom_ops=custom_ops,
    )


def train(
    directory: Path,
    data: str,
    *,
    lr: float,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    accumulate: int | None = None,
    loss_scale: str | None = None,
    schedule: str = "constant",
    warmup: int = 0,
    momentum: float | None = None,
    dampening: float | None = None,
    betas: str | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    evaluate: bool = False,
    eval_data: str | None = None,
    parameters: Path | None = None,
    save: Path | None = None,
    checkpoint: Path | None = None,
    every: int | None = None,
    keep: int | None = None,
    resume: Path | None = None,
    log: Path | None = None,
    print_every: int = 1,
    log_every: int = 1,
    check_replicas: int | None = None,
    trace: Path | None = None,
    device: str = "auto",
    transport: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Trains with this process's rank of an artifact directory; returns the exit code.

    Args:
        directory: A directory that was cut for training.
        data: The source: `digits`, `npz:FILE`, `idx:DIR` or `module:function`.
        lr: Base learning rate.
        batch_size: Samples in a step, of all ranks together.
        epochs: Epochs.
        steps: Steps of all epochs together after which it ends.
        seed: What the order of samples and the model's random numbers depend on.
        accumulate: Micro-batches in a step; None for as many as a pipeline was cut for, or one.
        loss_scale: `dynamic` or a number, where the artifact computes in 16 bits.
        schedule: `constant`, `linear` or `cosine`.
        warmup: Warm-up steps.
        momentum: Factor of the velocity; None for the optimizer's default, as for what follows.
        dampening: Share of the gradient that does not enter the velocity.
        betas: Decay rates of the two moments, as a text `0.9,0.999`.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        clip_norm: Largest 2-norm of all gradients together.
        evaluate: Whether to evaluate after each epoch.
        eval_data: The source to evaluate on, which implies `evaluate`; None for that of `data`.
        parameters: Safetensors file of global parameters to begin with.
        save: Safetensors file for the trained global parameters.
        checkpoint: Folder for checkpoints.
        every: After how many steps one is written; None for 100.
        keep: How many are kept; None for 2.
        resume: Checkpoint, or folder of checkpoints, to continue from.
        log: File of JSON lines.
        print_every: Print every so many steps of an epoch; 0 prints none.
        log_every: Of every so many steps the loss is read, checked, printed and logged.
        check_replicas: Compare replicas of states every so many steps; None: never.
        trace: File for when the stages of a pipeline computed.
        device: `auto`, `cpu`, `cuda` or `cuda:NUMBER`.
        transport: `auto`, `mpi`, `nccl` or `threads`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    settings = Settings(
        momentum=momentum,
        dampening=dampening,
        betas=None if betas is None else parse_betas(betas),
        eps=eps,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    wanted = training.TrainingRun(
        data=data,
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        seed=seed,
        accumulate=accumulate,
        loss_scale=loss_scale,
        schedule=schedule,
        warmup=warmup,
        settings=settings,
        evaluate=evaluate,
        eval_data=eval_data,
        parameters=parameters,
        save=save,
        checkpoints=_saving(checkpoint, every, keep),
        resume=resume,
        log=log,
        print_every=print_every,
        log_every=log_every,
        check_replicas=check_replicas,
        trace=trace,
    )
    how = training.Execution(device, transport, log_dir, parse_pairs(ort), custom_ops)
    return training.train(directory, wanted, how)


def _saving(folder: Path | None, every: int | None, keep: int | None) -> Saving | None:
    """Returns when checkpoints are written; LaunchError for settings of none."""
    given = {name: n for name, n in (("every", every), ("keep", keep)) if n is not None}
    if folder is not None:
        return Saving(folder, **given)
    for name in given:
        raise LaunchError(f"--{name}: expected with --checkpoint FOLDER")
    return None


def launch(
    arguments: Sequence[str],
    *,
    ranks: int | None = None,
    retries: int = 0,
    fallbacks: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> int:
    """Runs `train` under mpirun and a supervisor; returns the exit code.

    Args:
        arguments: The command of each rank: `train DIR …`.
        ranks: Number of ranks; None for that of the directory.
        retries: How often it is started again when a rank has died.
        fallbacks: Directories with which it goes on when retries are used up.
        options: Further options of mpirun.

    Raises:
        LaunchError: As `onnxpar_runtime.supervisor.supervise`.
        ArtifactError: Likewise.
    """
    program = (sys.executable, "-m", "onnxpar.cli")
    return supervise(Job(program, arguments, ranks, retries, fallbacks, options))


def evaluate(
    directory: Path,
    data: str,
    *,
    batch_size: int | None = None,
    parameters: Path | None = None,
    metric: str | None = None,
    as_json: bool = False,
    device: str = "auto",
    transport: str = "auto",
    log_dir: Path | None = None,
    ort: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> int:
    """Evaluates with this process's rank of an artifact directory; returns the exit code.

    Args:
        directory: A directory that was cut for training.
        data: The source, of whose halves the one for testing is taken.
        batch_size: Samples in a batch, of all ranks together.
        parameters: Safetensors file of global parameters, or None for those of the directory.
        metric: `accuracy` to insist on it, or None for what there is.
        as_json: Print JSON.
        device: `auto`, `cpu`, `cuda` or `cuda:NUMBER`.
        transport: `auto`, `mpi`, `nccl` or `threads`.
        log_dir: Folder for a log file of each rank, or None.
        ort: `key=value` options of onnxruntime.
        custom_ops: Further custom-op libraries.

    Raises:
        LaunchError: An option is malformed, or MPI cannot be used.
    """
    how = training.Execution(device, transport, log_dir, parse_pairs(ort), custom_ops)
    return training.evaluation(
        directory,
        data,
        how,
        batch_size=batch_size,
        parameters=parameters,
        metric=metric,
        as_json=as_json,
    )
