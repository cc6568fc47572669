"""`onnxpar train`: epochs over a source of data."""

from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import CustomOps, Device, LogDir, Ort, TrainingArtifacts, Transport


def command(
    directory: TrainingArtifacts,
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="digits (scikit-learn's handwritten digits), npz:FILE (arrays named as the "
            "inputs), idx:DIR (MNIST's files) or module:function (an iterator of dicts).",
        ),
    ],
    lr: Annotated[float, typer.Option(metavar="X", help="Learning rate.")],
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", help="Samples in a step, of all ranks together.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(metavar="E", help="Epochs. Default: 1, or what --steps takes.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="K", help="End after so many steps, of all epochs.")
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="S", min=0, help="Seed of the order of samples and of dropout.")
    ] = 0,
    momentum: Annotated[
        float | None, typer.Option(metavar="M", help="Momentum of the optimizer momentum: 0.9.")
    ] = None,
    dampening: Annotated[
        float | None, typer.Option(metavar="D", help="Dampening of the optimizer momentum: 0.")
    ] = None,
    betas: Annotated[
        str | None, typer.Option(metavar="A,B", help="Of adam, adamw and lamb: 0.9,0.999.")
    ] = None,
    eps: Annotated[
        float | None, typer.Option(metavar="E", help="Of adam and adamw: 1e-8; of lamb: 1e-6.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(metavar="W", help="Of adamw and lamb: 0.01; otherwise 0.")
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(metavar="C", help="Largest 2-norm of all gradients together; else none."),
    ] = None,
    loss_scale: Annotated[
        str | None,
        typer.Option(
            metavar="dynamic|N",
            help="Of 16-bit computation. Default: dynamic for float16, 1 for bfloat16.",
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Micro-batches of a step; else as many as a pipeline was cut for, or 1.",
        ),
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="KIND", help="constant, linear or cosine.")
    ] = "constant",
    warmup: Annotated[
        int, typer.Option(metavar="K", help="Steps in which the learning rate rises from 0.")
    ] = 0,
    evaluate: Annotated[
        bool,
        typer.Option(
            "--eval", help="Evaluate after each epoch, on the test part of SOURCE if it has one."
        ),
    ] = False,
    eval_data: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Evaluate after each epoch, on this; of any kind."),
    ] = None,
    parameters: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Begin with these, as --save wrote them.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the trained parameters, whole, as safetensors."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write checkpoints to this folder.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(metavar="K", help="Write one after each K-th step (100), and the last one."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the last N checkpoints (2).")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Continue from a checkpoint, or from the last one in a folder."
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JSON line for each step.")
    ] = None,
    print_every: Annotated[
        int, typer.Option(metavar="K", min=0, help="Print each K-th step of an epoch; 0: none.")
    ] = 1,
    log_every: Annotated[
        int,
        typer.Option(
            metavar="K",
            min=1,
            help="Read and check the loss of each K-th step only, and print and log no other: a "
            "GPU is not waited for in between.",
        ),
    ] = 1,
    check_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="After every K-th step compare replicas of some parameters and moments, bit for "
            "bit: for debugging.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write when the stages of a pipeline computed, for chrome://tracing or Perfetto.",
        ),
    ] = None,
    device: Device = "auto",
    transport: Transport = "auto",
    log_dir: LogDir = None,
    ort: Ort = None,
    custom_ops: CustomOps = None,
) -> None:
    """Train on a source of data: `mpirun -n N onnxpar train DIR …`."""
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    code = runtime.train(
        directory,
        data,
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        seed=seed,
        loss_scale=loss_scale,
        accumulate=accumulate,
        schedule=schedule,
        warmup=warmup,
        momentum=momentum,
        dampening=dampening,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        evaluate=evaluate,
        eval_data=eval_data,
        parameters=parameters,
        save=save,
        checkpoint=checkpoint,
        every=every,
        keep=keep,
        resume=resume,
        log=log,
        print_every=print_every,
        log_every=log_every,
        check_replicas=check_replicas,
        trace=trace,
        device=device,
        transport=transport,
        log_dir=log_dir,
        ort=ort or (),
        custom_ops=custom_ops or (),
    )
    raise typer.Exit(code)
