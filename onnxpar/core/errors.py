"""The errors that a user can cause. Each names what is wrong, and says what was expected and got.

Every class derives from `OnnxparError`; the command line prints its message without a traceback and
exits with `exit_code` (2: the user's mistake, 1: a failed check).
"""


class OnnxparError(Exception):
    """A mistake that the user can correct; the message says how."""

    exit_code = 2


class ModelError(OnnxparError):
    """The ONNX model cannot be read or is not valid."""


class NodeError(ModelError):
    """A node that no runtime can run: an illegal attribute or constant operand."""


class StrategyError(OnnxparError):
    """A strategy file, preset, annotation or numeric tuple that does not fit the model or mesh."""


class MeshError(OnnxparError):
    """A device mesh that cannot be built, or device matrices without a common refinement."""


class MachineError(OnnxparError):
    """A malformed machine file, or an unknown machine."""


class SymbolError(OnnxparError):
    """A symbol whose value violates its constraint, or a malformed size or constraint."""


class CallError(OnnxparError):
    """An array that a call of a sharded function lacks, or that does not fit the function."""


class RuleError(OnnxparError):
    """A sharding rule whose text is malformed or does not fit the node."""


class ShardingError(OnnxparError):
    """A sharding that is illegal for its tensor, or an impossible reshard."""


class DialectError(OnnxparError):
    """A collective that cannot be written in the words of another runtime."""


class DirectoryError(OnnxparError):
    """Output that cannot be written, or a directory that does not match its manifest."""


def short(value: object) -> str:
    """Returns a value as text that fits into a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
