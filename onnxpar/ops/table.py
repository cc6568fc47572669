"""The one table of all operators."""

from onnxpar.ops.attention.rotary import DEFS as ROTARY
from onnxpar.ops.attention.standard import DEFS as ATTENTION
from onnxpar.ops.collective.barrier import DEFS as BARRIER
from onnxpar.ops.collective.rank_operators import DEFS as RANK_OPERATORS
from onnxpar.ops.collective.stage_sum import DEFS as STAGE_SUM
from onnxpar.ops.contraction.det import DEFS as DET
from onnxpar.ops.contraction.einsum import DEFS as EINSUM
from onnxpar.ops.contraction.experts import DEFS as EXPERTS
from onnxpar.ops.contraction.matmul import DEFS as MATMUL
from onnxpar.ops.control.operators import DEFS as CONTROL
from onnxpar.ops.elementwise.cast import DEFS as CAST
from onnxpar.ops.elementwise.elementwise import DEFS as ELEMENTWISE
from onnxpar.ops.expanded_operators import DEFS as OWN_BODIES
from onnxpar.ops.fused.activations import DEFS as FUSED
from onnxpar.ops.fused.backward import DEFS as FUSED_BACKWARD
from onnxpar.ops.fused.updates import DEFS as UPDATES
from onnxpar.ops.image.resize import DEFS as RESIZE
from onnxpar.ops.image.sample import DEFS as SAMPLE
from onnxpar.ops.index.arg_max import DEFS as ARG_MAX
from onnxpar.ops.index.gather import DEFS as GATHER
from onnxpar.ops.index.scatter import DEFS as SCATTER
from onnxpar.ops.loss.cross_entropy import DEFS as LOSS
from onnxpar.ops.norm.batch_norm import DEFS as BATCH_NORM
from onnxpar.ops.norm.group_norm import DEFS as GROUP_NORM
from onnxpar.ops.norm.skip_norm import DEFS as SKIP_NORM
from onnxpar.ops.norm.softmax_layer_norm import DEFS as ROW_NORM
from onnxpar.ops.quantized.block_weights import DEFS as BLOCK_QUANTIZED
from onnxpar.ops.quantized.linear import DEFS as QUANTIZED
from onnxpar.ops.random.draws import DEFS as RANDOM
from onnxpar.ops.recurrent.recurrent import DEFS as RECURRENT
from onnxpar.ops.reduce.cumulative import DEFS as CUMULATIVE
from onnxpar.ops.reduce.reduce import DEFS as REDUCE
from onnxpar.ops.registry import Registry
from onnxpar.ops.replicated_operators import DEFS as REPLICATED_OPERATORS
from onnxpar.ops.sequence.sequence import DEFS as SEQUENCE
from onnxpar.ops.signal.fourier import DEFS as SIGNAL
from onnxpar.ops.sizes.size_operators import DEFS as SHAPE
from onnxpar.ops.view.pad import DEFS as PAD
from onnxpar.ops.view.rearrange import DEFS as REARRANGE
from onnxpar.ops.view.reshape import DEFS as RESHAPE
from onnxpar.ops.view.slice import DEFS as SLICE
from onnxpar.ops.window.conv import DEFS as CONV
from onnxpar.ops.window.conv_backward import DEFS as CONV_BACKWARD
from onnxpar.ops.window.deform import DEFS as DEFORM
from onnxpar.ops.window.global_pool import DEFS as GLOBAL_POOL
from onnxpar.ops.window.pool import DEFS as POOL
from onnxpar.ops.window.pool_backward import DEFS as POOL_BACKWARD

REGISTRY = Registry.join(
    (
        MATMUL,
        ELEMENTWISE,
        EINSUM,
        RESHAPE,
        SHAPE,
        SLICE,
        GATHER,
        SCATTER,
        CAST,
        REARRANGE,
        REDUCE,
        CUMULATIVE,
        ARG_MAX,
        DET,
        ROW_NORM,
        LOSS,
        PAD,
        RANDOM,
        ATTENTION,
        ROTARY,
        FUSED,
        BLOCK_QUANTIZED,
        EXPERTS,
        BATCH_NORM,
        GROUP_NORM,
        SKIP_NORM,
        CONV,
        CONV_BACKWARD,
        DEFORM,
        POOL,
        POOL_BACKWARD,
        GLOBAL_POOL,
        CONTROL,
        RECURRENT,
        SEQUENCE,
        QUANTIZED,
        RESIZE,
        SAMPLE,
        SIGNAL,
        OWN_BODIES,
        REPLICATED_OPERATORS,
        FUSED_BACKWARD,
        BARRIER,
        STAGE_SUM,
        RANK_OPERATORS,
        UPDATES,
    )
)
