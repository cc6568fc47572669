"""onnxruntime's own operators: their domain, and schemas that ONNX lacks."""

import onnx
from onnx.defs import OpSchema

MICROSOFT = "com.microsoft"


def correct_schemas() -> None:
    """Registers with ONNX, once per process, an operator of onnxruntime in ONNX's own domain.

    onnxruntime's optimiser and its exporters of language models use SimplifiedLayerNormalization
    there, which ONNX's checker would otherwise refuse.
    """
    if onnx.defs.has(_SIMPLIFIED):
        return
    floats = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]
    parameter, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    defaults = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
    onnx.defs.register_schema(
        OpSchema(
            _SIMPLIFIED,
            "",
            1,
            "Division by the root of the mean square, and a scale (onnxruntime's own).",
            inputs=[parameter("X", "T"), parameter("scale", "V")],
            outputs=[parameter("Y", "V"), parameter("inv_std_dev", "U", param_option=optional)],
            type_constraints=[(name, floats, "") for name in ("T", "U", "V")],
            attributes=[
                OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
                for name, value in defaults.items()
            ],
        )
    )


_SIMPLIFIED = "SimplifiedLayerNormalization"
