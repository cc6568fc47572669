"""The errors that a user can cause. Each one names what is wrong, expected and got.

Every class derives from `OnnxparError`; the command line prints its message without a traceback and
exits with `exit_code` (2: the user's mistake, 1: a check that does not hold).
"""


class OnnxparError(Exception):
    """A mistake that the user can mend; the message says how."""

    exit_code = 2


class ModelError(OnnxparError):
    """The ONNX model cannot be read or is not valid."""


class NodeError(ModelError):
    """A node that no runtime can run: an attribute or a constant operand that is not legal."""


class StrategyError(OnnxparError):
    """A strategy file, preset, annotation or numeric tuple that does not fit model or mesh."""


class MeshError(OnnxparError):
    """A device mesh that cannot be built, or device matrices that no common refinement has."""


class MachineError(OnnxparError):
    """A machine file that is malformed, or a machine that nobody described."""


class SymbolError(OnnxparError):
    """A symbolic dimension whose value or constraint does not hold."""


class CallError(OnnxparError):
    """An array given to a sharded function that is missing or does not fit it."""


class RuleError(OnnxparError):
    """A sharding rule whose text is malformed or does not fit the node."""


class ShardingError(OnnxparError):
    """A sharding that is not legal for its tensor, or a reshard that cannot be carried out."""


class ArtifactError(OnnxparError):
    """Output that cannot be written, or a directory that does not match its manifest."""
