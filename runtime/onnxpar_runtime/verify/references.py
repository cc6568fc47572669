"""Runs the undivided program."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.manifest import FILE_NAME
from onnxpar_runtime.errors import DirectoryError, InputError
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.options import register_libraries
from onnxpar_runtime.tensors import to_host, to_ort

Array = NDArray[Any]
Undivided = Path | Mapping[str, Path]
"""A directory for one device, or the ONNX model of each program."""
NEWEST_IR = 13  # the newest that onnxruntime 1.31 reads; onnx 1.23 writes 14


class Reference(Protocol):
    """Runs the undivided program on whole arrays."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""

    def close(self) -> None:
        """Frees what it holds."""


def _readable(path: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """Returns the model's path, or its bytes if its file format is too new for onnxruntime.

    The IR versions up to the newest that onnx knows only add annotations, so they can be lowered.
    """
    model = onnx.load(path, load_external_data=False)
    if not NEWEST_IR < model.ir_version <= onnx.IR_VERSION:
        return str(path)
    model.ir_version = NEWEST_IR
    folder = "session.model_external_initializers_file_folder_path"
    options.add_session_config_entry(folder, str(path.resolve().parent))
    data: bytes = model.SerializeToString()
    return data


class ModelReference:
    """An ONNX model in onnxruntime on the CPU."""

    def __init__(self, path: Path, custom_ops: Sequence[str | Path] = ()) -> None:
        """Loads the model.

        Raises:
            DirectoryError: onnxruntime cannot load it.
            LaunchError: A custom-op library cannot be loaded.
        """
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        register_libraries(options, custom_ops)
        try:
            self._session = onnxruntime.InferenceSession(
                _readable(path, options), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            text = str(error).splitlines()[0]
            raise DirectoryError(f"{path}: onnxruntime cannot load it: {text}") from None
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._inputs = [i.name for i in self._session.get_inputs()]

    def check_inputs(self, path: Path, names: Sequence[str]) -> None:
        """Raises InputError unless the model's inputs are among those of the program."""
        if not {*self._inputs} <= {*names}:
            raise InputError(
                f"{path}: expected a model with the inputs {list(names)}, got {self._inputs}"
            )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, to_ort(array))
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        results = zip(self._outputs, binding.get_outputs(), strict=True)
        return {name: to_host(value) for name, value in results}

    def close(self) -> None:
        """Frees the session."""
        self._session = None


def undivided_directory(directory: str | Path) -> Manifest:
    """Returns the manifest of a directory for one device.

    Raises:
        DirectoryError: It cannot be read, or is for several devices.
    """
    manifest = Manifest.load(directory)
    if manifest.devices != 1:
        raise DirectoryError(
            f"{directory}: expected a model, or a directory for 1 device, got {manifest.devices} "
            "devices"
        )
    return manifest


class DirectoryReference:
    """A directory for one device: the reference of a model that draws random numbers."""

    def __init__(
        self, directory: Path, program: str, custom_ops: Sequence[str | Path] = ()
    ) -> None:
        """Reads the manifest; raises DirectoryError unless it is for one device."""
        undivided_directory(directory)
        self._start = partial(ThreadsGroup, directory, program=program, custom_ops=custom_ops)
        self._group: ThreadsGroup | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        group = self._group or self._start()
        # A group cannot be used after a rank has failed, so it is kept only after success.
        self._group = None
        try:
            outputs = group.run_global(feeds)
        except BaseException:
            group.close()
            raise
        self._group = group
        return outputs

    def close(self) -> None:
        """Ends the one rank."""
        if self._group is not None:
            self._group.close()


def undivided_path(models: Undivided, program: str) -> Path:
    """Returns the model of a program, or the directory for one device.

    Raises:
        InputError: There is no model of this program.
    """
    if not isinstance(models, Mapping):
        return models
    if program not in models:
        raise InputError(
            f"program {program!r}: expected its undivided model as well, got only those of "
            f"{sorted(models)}"
        )
    return models[program]


def open_reference(
    models: Undivided, manifest: Manifest, program: str, custom_ops: Sequence[str | Path] = ()
) -> Reference:
    """Returns the reference of a program.

    Args:
        models: An ONNX model for each program, or a directory for one device.
        manifest: The manifest of the partitioned program.
        program: Name of the program.
        custom_ops: Further custom-op libraries.

    Raises:
        InputError: There is no such file, or the model has other inputs or draws random numbers.
        DirectoryError: The model cannot be loaded, or the directory is for several devices.
    """
    model = undivided_path(models, program)
    if not model.exists():
        raise InputError(f"{model}: no such file")
    if (model / FILE_NAME).is_file():
        return DirectoryReference(model, program, custom_ops)
    parts = [manifest.program(name) for name in manifest.parts(program)]
    if any(entry.counter is not None for part in parts for entry in part.system_inputs):
        # onnxruntime's generators have hidden state, so two runs of a model draw other numbers.
        raise InputError(
            f"the program draws random numbers, and {model} would draw differently: use "
            "`onnxpar shard --devices 1` and give that directory as --model"
        )
    found = ModelReference(model, custom_ops)
    found.check_inputs(model, [value.name for value in manifest.program(program).inputs])
    return found


def undivided_fails(values: Mapping[str, int], error: Exception) -> InputError:
    """Returns the error for an undivided model that cannot be run."""
    shown = ", ".join(f"{k}={v}" for k, v in values.items())
    text = " ".join(str(error).split())
    return InputError(
        f"the undivided model fails at {shown or 'these inputs'}: {text[:500]} (choose other "
        "values with --symbol, or give inputs with --inputs)"
    )


def reference_run(
    reference: Reference, feeds: Mapping[str, Array], values: Mapping[str, int]
) -> dict[str, Array]:
    """Returns the outputs of the undivided model; raises InputError if it fails."""
    try:
        return reference.run(feeds)
    except Exception as error:  # onnxruntime has no class of its own for a node that fails
        raise undivided_fails(values, error) from None
