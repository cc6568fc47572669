"""`onnxpar checkpoint`: converts checkpoints for another mesh or another program."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxpar.cli.grouped_help import example
from onnxpar.cli.options import AsJson, takes_options
from onnxpar.core.errors import OnnxparError
from onnxpar_format.option import Option

if TYPE_CHECKING:
    from onnxpar.api.runtime import Exported, Made

app = typer.Typer(no_args_is_help=True, help="Reshard, merge or export checkpoints.")

SourceFolder = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="A checkpoint, or a folder whose last complete checkpoint is used."
    ),
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint to write.")]
Verify = Annotated[
    bool,
    Option(
        "Compare the SHA-256 of SRC's files, not only the checksum of each tensor.",
        flags=("--verify",),
    ),
]
_MODULE = Option(
    "A function that returns the nn.Module, or the module and its optimizer.", "MODULE:FUNCTION"
)


@app.command(epilog=example("checkpoint reshard"))
@takes_options
def reshard(
    source: SourceFolder,
    target: Target,
    to: Annotated[Path, Option("Output of `onnxpar shard --train` for the new mesh.", "DIR")],
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Reshard a checkpoint for another mesh."""
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    _print(runtime.reshard(source, target, to, verify=verify), as_json)


@app.command(epilog=example("checkpoint merge"))
@takes_options
def merge(
    source: SourceFolder, target: Target, verify: Verify = False, as_json: AsJson = False
) -> None:
    """Merge the shards of a checkpoint into complete tensors."""
    from onnxpar.api import runtime

    _print(runtime.merge(source, target, verify=verify), as_json)


@app.command(epilog=example("checkpoint export"))
@takes_options
def export(
    source: SourceFolder,
    output: Annotated[
        Path | None, Option("A .onnx or .safetensors file.", "FILE", flags=("-o", "--output"))
    ] = None,
    model: Annotated[
        Path | None, Option("For .onnx: the model that was sharded and trained.", "MODEL")
    ] = None,
    tie: Annotated[
        Sequence[str], Option("For .onnx: the same --tie as for `shard`; may be repeated.", "A=B")
    ] = (),
    state_dict: Annotated[
        Path | None,
        Option("Write PyTorch's state dict of the module, with all of its names.", "FILE"),
    ] = None,
    optimizer_state: Annotated[
        Path | None, Option("Write PyTorch's state dict of Adam or AdamW.", "FILE")
    ] = None,
    module: Annotated[str | None, _MODULE] = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Write the trained parameters to a .onnx or .safetensors file, or for PyTorch.

    The .safetensors file has the trained tensors by name. A state dict has all that
    load_state_dict needs.
    """
    if (state_dict is None) == (output is None):
        raise OnnxparError("checkpoint export: expected one of --output and --state-dict")
    if state_dict is None:
        if module is not None or optimizer_state is not None:
            raise OnnxparError("--module and --optimizer-state: expected --state-dict as well")
        assert output is not None
        from onnxpar.api import runtime

        made, exported = runtime.export_checkpoint(source, output, model, tie, verify=verify)
        if exported is None:
            _print(made, as_json)
        elif as_json:
            _print_json(exported, step=made.step)
        else:
            typer.echo(f"{exported}; after step {made.step}")
        return
    if module is None or model is not None or tie:
        raise OnnxparError("--state-dict: expected --module, and neither --model nor --tie")
    from onnxpar.api.pytorch.files import export_files

    step = export_files(source, module, state_dict, optimizer_state, verify=verify)
    paths = [str(path) for path in (state_dict, optimizer_state) if path is not None]
    if as_json:
        typer.echo(json.dumps({"paths": paths, "step": step}, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{', '.join(paths)}: after step {step}")


@app.command(name="import", epilog=example("checkpoint import"))
@takes_options
def import_(
    target: Target,
    to: Annotated[Path, Option("Output of `onnxpar shard --train` for the module.", "DIR")],
    module: Annotated[str, _MODULE],
    state_dict: Annotated[
        Path,
        Option(
            "PyTorch's state dict of the module: a file, or a folder of torch.distributed.", "PATH"
        ),
    ],
    optimizer_state: Annotated[
        Path | None,
        Option("That of Adam or AdamW, likewise. Without one, moments are zero.", "PATH"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with what PyTorch has trained, for train --resume."""
    from onnxpar.api.pytorch.files import import_files

    _print(import_files(target, to, module, state_dict, optimizer_state), as_json)


def _print(made: "Made", as_json: bool) -> None:
    """Prints which files were written."""
    if as_json:
        _print_json(made)
        return
    files = "1 file" if made.files == 1 else f"{made.files} files"
    typer.echo(
        f"{made.path}: {made.tensors} tensors in {files}, {made.bytes:,} bytes; after step "
        f"{made.step}"
    )


def _print_json(what: "Made | Exported", **more: int) -> None:
    """Prints the fields of what was written as JSON."""
    paths = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(what).items()}
    typer.echo(json.dumps(paths | more, indent=2, ensure_ascii=False))
