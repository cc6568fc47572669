"""Shape inference by the library's functions, and by those of records that correct them.

A size that is wrong is worse than one that is unknown, since the split of everything behind it
follows from it. What corrects `onnx-shape-inference` is the slot `infer` of an operator's record.
"""

from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import onnx_ir as ir
from onnx_shape_inference import OpShapeInferenceRegistry, ShapeInferenceContext, registry
from onnx_shape_inference import _engine as _library_engine

from onnxpar.ops.elementwise.inference import infer_broadcast
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.sizes.computed_sizes import put_values
from onnxpar.ops.slots import InferFn, Library, LibraryFn


class _Corrected:
    """The functions of operators that are corrected; of all others what the library has by now.

    So shape inference that a user registers with the library is found, whenever that is done.
    """

    def __init__(self) -> None:
        self.own = OpShapeInferenceRegistry()

    def collect(self) -> None:
        """Loads the library's functions, as its engine asks for."""
        registry.collect()

    def get(self, domain: str, op_type: str, version: int) -> LibraryFn | None:
        """Returns the function of an operator at a version of its domain, or None."""
        source = self.own if self.own.has(domain, op_type) else registry
        found: LibraryFn | None = source.get(domain, op_type, version)
        return found


def _engine(functions: _Corrected) -> ModuleType:
    """A copy of the library's engine that looks functions up in the registry given.

    The engine takes no registry: it looks up a global one, which other code of the process may use.
    """
    spec = spec_from_file_location(
        f"{_library_engine.__name__}_of_onnxpar", _library_engine.__file__
    )
    assert spec is not None and spec.loader is not None
    engine = module_from_spec(spec)
    spec.loader.exec_module(engine)
    vars(engine)["_registry"] = SimpleNamespace(registry=functions)
    return engine


def _infer_fn(definition: OpDef) -> InferFn | None:
    """The correction of an operator; that of operators that broadcast is derived."""
    if definition.infer is not None:
        return definition.infer
    return infer_broadcast if definition.broadcasts else None


def _no_inference(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The library has no function of the operator."""


def _function(definition: OpDef, library: Library) -> LibraryFn:
    correct = _infer_fn(definition)
    infer = library.infer if correct is None else partial(correct, library)
    return infer if definition.values is None else partial(_with_values, definition, infer)


def _with_values(
    definition: OpDef, infer: LibraryFn, context: ShapeInferenceContext, node: ir.Node
) -> None:
    infer(context, node)
    assert definition.values is not None
    put_values(context, node, definition.values)


class Inference:
    """Shape inference by a table of operators.

    Attributes:
        functions: The registry of the functions by which shapes are inferred.
    """

    def __init__(self, operators: Registry) -> None:
        """Collects what the records correct; of all versions that the library tells apart."""
        registry.collect()
        self.functions = _Corrected()
        self._engine = _engine(self.functions)
        for op in operators.defs:
            if op.values is None and _infer_fn(op) is None:
                continue
            for version in registry.version_boundaries(op.domain, op.op_type) or (1,):
                if version < op.since_version and op is not operators.oldest(op):
                    continue
                known = registry.get(op.domain, op.op_type, version) or _no_inference
                function = _function(op, Library(known, self._engine._process_graph))
                self.functions.own.register(op.domain, op.op_type, version)(function)

    def infer_shapes(self, model: ir.Model) -> None:
        """Infers the shapes of all values of a model, which is changed.

        Raises:
            ShapeInferenceError: A node's operands do not fit one another.
            OpUsageError: A node is not what its operator allows.
            ValueError: As these.
        """
        self._engine.infer_symbolic_shapes(
            model, warn_on_missing=False, adopt_declared_symbols=False
        )


@cache
def inference(operators: Registry) -> Inference:
    """Returns shape inference by a table of operators, which is made once."""
    return Inference(operators)
