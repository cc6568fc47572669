"""Shape inference by `onnx-shape-inference`, with corrections from the records of operators.

A wrong size is worse than an unknown size, since the sharding of all later values follows from it.
The slots `infer` and `values` of an operator's record correct the library.
"""

from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import onnx_ir as ir
from onnx_shape_inference import (
    OpShapeInferenceRegistry,
    ShapeInferenceContext,
    registry,
)
from onnx_shape_inference import _engine as _library_engine

from onnxpar.ops.elementwise.inference import infer_broadcast
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.sizes.computed_sizes import forget_large, put_values, small
from onnxpar.ops.slots import InferFn, Library, LibraryFn
from onnxpar.ops.view.inference import check_rank


class _Corrected:
    """Our functions of corrected operators; the library's functions of all others.

    The library is asked each time, so that functions that a user registers later are found.
    """

    def __init__(self) -> None:
        self.own = OpShapeInferenceRegistry()

    def collect(self) -> None:
        """Loads the library's functions; its engine calls this."""
        registry.collect()

    def get(self, domain: str, op_type: str, version: int) -> LibraryFn | None:
        """Returns the function of an operator at a version of its domain, or None."""
        source = self.own if self.own.has(domain, op_type) else registry
        found: LibraryFn | None = source.get(domain, op_type, version)
        return None if found is None else partial(_bounded, found)


def _engine(functions: _Corrected) -> ModuleType:
    """A copy of the library's engine that looks functions up in `functions`.

    The engine takes no registry as an argument. It uses a global one, which other code in the
    process may use as well.
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
    """The correction of an operator; operators that broadcast share one."""
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


def _bounded(infer: LibraryFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Infers the results of a node, and forgets elements and sizes whose formulas are too large.

    A chain of nodes may double a formula, or the number of elements, with each of them.
    """
    check_rank(node)
    infer(context, node)
    for value in node.outputs:
        forget_large(context, value)
        if value.shape is not None and not value.shape.is_static():
            dims = [d if small(d) else context.new_symbolic_dim() for d in value.shape]
            if any(made is not d for made, d in zip(dims, value.shape, strict=True)):
                value.shape = ir.Shape(dims)


class Inference:
    """Shape inference by a table of operators.

    Attributes:
        functions: The registry of the functions by which shapes are inferred.
    """

    def __init__(self, operators: Registry) -> None:
        """Collects the corrections in the records, for each version that the library knows."""
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
            ShapeInferenceError: The operands of a node do not fit together.
            OpUsageError: A node is not legal.
            ValueError: A node is not legal, in functions of the library that raise this.
        """
        self._engine.infer_symbolic_shapes(
            model, warn_on_missing=False, adopt_declared_symbols=False
        )


@cache
def inference(operators: Registry) -> Inference:
    """Returns shape inference by a table of operators; it is made only once."""
    return Inference(operators)
