"""Options that several commands have, each defined once."""

from pathlib import Path
from typing import Annotated

import typer

Artifacts = Annotated[Path, typer.Argument(metavar="DIR", help="What `onnxpar shard` wrote.")]
TrainingArtifacts = Annotated[
    Path, typer.Argument(metavar="DIR", help="What `onnxpar shard --train` wrote.")
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:NUMBER, a GPU.")
]
Transport = Annotated[str, typer.Option(metavar="TRANSPORT", help="auto, mpi, nccl or threads.")]
LogDir = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write rank0000.log, rank0001.log, … to this folder."),
]
Ort = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="An option of onnxruntime; may be repeated."),
]
CustomOps = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A custom-op library of the model; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Number of devices, where the strategy does not say.")
]
Constraints = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:CONSTRAINTS",
        help="Constraints on a symbol, as in batch:divisor=8,max=512; may be repeated.",
    ),
]
TRAINING = "Training"
"""Title of the options of training where a command has others."""
LabelInput = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Input of the model that has the labels. Default: a new input, labels.",
        rich_help_panel=TRAINING,
    ),
]
IgnoreIndex = Annotated[
    int | None,
    typer.Option(
        help="Label that does not count, for softmax_cross_entropy.", rich_help_panel=TRAINING
    ),
]
Trainable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Train these tensors too, though they may be constants or --freeze matches them; may "
        "be repeated.",
        rich_help_panel=TRAINING,
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Do not train these parameters; may be repeated.",
        rich_help_panel=TRAINING,
    ),
]
Tie = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A=B",
        help="Train these two tensors of equal elements, maybe transposed, as one, A; may be "
        "repeated.",
        rich_help_panel=TRAINING,
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="float16 or bfloat16: compute products of a float32 model in it; parameters stay "
        "float32. bfloat16 runs on CUDA alone.",
        rich_help_panel=TRAINING,
    ),
]
OptimizerParallelLevel = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=3,
        metavar="LEVEL",
        help="What replicas of a parameter share, instead of holding it all: 1 moments, 2 "
        "gradients too, 3 parameters too; 0 nothing. Default: what the strategy says, else 0.",
    ),
]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="What the backward pass computes again instead of keeping it: a pattern of nodes, "
        "layers (all that repeat), layers=K (each K-th), or auto=BYTES (the least with which a "
        "device holds so much); may be repeated. Default: what the strategy says, else nothing.",
    ),
]
RecomputeCommunication = Annotated[
    str,
    typer.Option(
        metavar="keep|recompute",
        help="Whether results of collectives among what is recomputed are kept.",
    ),
]
