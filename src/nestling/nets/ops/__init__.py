"""The operations a network is made of, one file each. To add one: a file, a line in OPS, a test.

`operation.py` says what is asked of an operation, `weighted_op.py` answers for all that have a masked weight. Nothing here
needs torch before something is computed.
"""

from nestling.nets.ops.attention import Scores, Weigh
from nestling.nets.ops.batchnorm import BatchNorm
from nestling.nets.ops.cat import Cat
from nestling.nets.ops.computed import Computed
from nestling.nets.ops.conv import Conv
from nestling.nets.ops.conv1d import Conv1d
from nestling.nets.ops.conv_transpose2d import ConvTranspose2d
from nestling.nets.ops.covariance import Covariance, Mingle
from nestling.nets.ops.flatten import Flatten
from nestling.nets.ops.groupnorm import GroupNorm
from nestling.nets.ops.headwise import Headwise
from nestling.nets.ops.input import Input
from nestling.nets.ops.join import Join
from nestling.nets.ops.layernorm import LayerNorm
from nestling.nets.ops.linear import Linear
from nestling.nets.ops.map import Map
from nestling.nets.ops.mean import Mean
from nestling.nets.ops.merge import Merge
from nestling.nets.ops.module import Module
from nestling.nets.ops.opaque import Opaque
from nestling.nets.ops.operation import Operation
from nestling.nets.ops.pixel_linear import PixelLinear
from nestling.nets.ops.prelu import PReLU
from nestling.nets.ops.rearrange import Rearrange
from nestling.nets.ops.scale import Scale
from nestling.nets.ops.select import Select
from nestling.nets.ops.tokens import Tokens
from nestling.nets.ops.zip import Zip

__all__ = [
    "OPS",
    "BatchNorm",
    "Cat",
    "Computed",
    "Conv",
    "Covariance",
    "Flatten",
    "GroupNorm",
    "Headwise",
    "Input",
    "Join",
    "LayerNorm",
    "Linear",
    "Map",
    "Mean",
    "Merge",
    "Mingle",
    "Module",
    "Opaque",
    "Operation",
    "PReLU",
    "PixelLinear",
    "Rearrange",
    "Scale",
    "Scores",
    "Select",
    "Tokens",
    "Weigh",
    "Zip",
]

OPS: dict[str, type[Operation]] = {
    "input": Input,
    "conv": Conv,
    "conv1d": Conv1d,
    "convtranspose2d": ConvTranspose2d,
    "linear": Linear,
    "batchnorm": BatchNorm,
    "groupnorm": GroupNorm,
    "layernorm": LayerNorm,
    "prelu": PReLU,
    "map": Map,
    "mean": Mean,
    "module": Module,
    "scale": Scale,
    "computed": Computed,
    "opaque": Opaque,
    "zip": Zip,
    "select": Select,
    "cat": Cat,
    "join": Join,
    "flatten": Flatten,
    "rearrange": Rearrange,
    "scores": Scores,
    "weigh": Weigh,
    "covariance": Covariance,
    "mingle": Mingle,
    "headwise": Headwise,
    "merge": Merge,
    "tokens": Tokens,
    "pixellinear": PixelLinear,
}
