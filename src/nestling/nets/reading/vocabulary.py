"""Torch's words: which of its functions and modules are nested, by kind, and the reasons why others are not.

Tables that read.py looks things up in: layers that an operation knows, functions and modules that treat every channel by
itself, functions of two tensors, reshapes, joins and splits; and for well-known operations that mix channels, what to say.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nestling.nets.ops import OPS, Operation
from nestling.nets.ops.calls import Function
from nestling.nets.ops.groupnorm import ACROSS
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.reading.watcher import put_at

CHANNELWISE: set[type[nn.Module]] = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Hardshrink,
    nn.Softshrink, nn.Tanhshrink, nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.ZeroPad1d, nn.ConstantPad1d,
    nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
}  # fmt: skip
# The layers with parameters, and the functions on given weights, that an operation reads.
LAYERS: dict[Any, type[Operation]] = {getattr(nn, name): op for op in OPS.values() for name in op.modules}
ON_WEIGHTS: dict[Any, type[WeightedOp]] = {
    getattr(place, name): op
    for op in OPS.values()
    if issubclass(op, WeightedOp)
    for name in op.functions
    for place in (F, torch)
    if hasattr(place, name)
}

POINTWISE: set[Function] = {
    F.relu, torch.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
    F.hardtanh, F.softplus, F.softsign, F.logsigmoid, F.threshold, torch.sigmoid, F.sigmoid, torch.tanh, F.tanh,
    torch.clamp, torch.clamp_min, torch.clamp_max, torch.abs, torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2,
    torch.log10, torch.log1p, torch.erf, torch.erfc, torch.sin, torch.cos, torch.atan, torch.sinh, torch.cosh, torch.asinh,
    torch.rsqrt, torch.reciprocal, torch.sign, torch.floor, torch.ceil, torch.round, torch.trunc, torch.nan_to_num,
    torch.detach, torch.ones_like, torch.full_like, F.tanhshrink, F.softshrink, F.hardshrink, torch.sqrt,
    torch.square, torch.neg, operator.neg, torch.pow, operator.pow,
    F.max_pool2d, F.avg_pool2d, F.lp_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate,
}  # fmt: skip
BINARY: dict[Function, str] = {  # of two tensors, or of a tensor and a number
    operator.add: "add", torch.add: "add", operator.sub: "sub", torch.sub: "sub", operator.mul: "mul", torch.mul: "mul",
    operator.truediv: "div", torch.div: "div", torch.maximum: "max", torch.minimum: "min",
}  # fmt: skip
IN_PLACE: dict[Function, Function] = {
    operator.iadd: torch.add, operator.isub: torch.sub, operator.imul: torch.mul, operator.itruediv: torch.div,
    torch.relu_: torch.relu, torch.sigmoid_: torch.sigmoid, torch.tanh_: torch.tanh, torch.clamp_: torch.clamp,
}  # fmt: skip
SYNONYMS: dict[Function, Function] = {
    torch.swapaxes: torch.transpose, torch.swapdims: torch.transpose, torch.moveaxis: torch.movedim, torch.clip: torch.clamp,
    torch.absolute: torch.abs, torch.negative: torch.neg, torch.multiply: torch.mul, torch.subtract: torch.sub,
    torch.divide: torch.div, torch.true_divide: torch.div, torch.narrow_copy: torch.narrow, operator.abs: torch.abs, **IN_PLACE
}  # fmt: skip
REDUCTIONS: set[Function] = {torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var}
EXTREMES: dict[Function, Function] = {
    torch.max: torch.maximum,
    torch.min: torch.minimum,
}  # of two tensors, or along one
COMPARISONS: set[Function] = {
    getattr(place, word) for place in (torch, operator) for word in ("gt", "ge", "lt", "le", "eq", "ne")
}
RESHAPES: set[Function] = {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten}
SHAPING: set[Any] = {*RESHAPES, operator.getitem, "expand", "expand_as"}  # what leaves the numbers of a constant alone
JOINS: set[Function] = {torch.cat, torch.concat, torch.concatenate}
SPLITS: set[Function] = {torch.chunk, torch.split, torch.tensor_split}
DROPOUTS: dict[Function, type[nn.Module]] = {
    F.dropout: nn.Dropout, torch.dropout: nn.Dropout, F.dropout2d: nn.Dropout2d, F.alpha_dropout: nn.AlphaDropout
}  # fmt: skip

# Methods of tensors, as the functions they stand for.
METHODS: dict[Any, Function] = {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "clamp": torch.clamp, "abs": torch.abs,
    "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "square": torch.square, "neg": torch.neg, "pow": torch.pow,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "relu_": torch.relu_, "sigmoid_": torch.sigmoid_, "tanh_": torch.tanh_, "clamp_": torch.clamp_,
    "add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv,
    "std": torch.std, "var": torch.var, "mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin,
    "view": torch.reshape, "reshape": torch.reshape, "flatten": torch.flatten, "squeeze": torch.squeeze,
    "unsqueeze": torch.unsqueeze, "contiguous": torch.reshape, "clone": torch.reshape, "chunk": torch.chunk,
    "split": torch.split, "softmax": torch.softmax, "log_softmax": torch.log_softmax,
    "permute": torch.permute, "transpose": torch.transpose, "swapaxes": torch.transpose, "swapdims": torch.transpose,
    "matmul": torch.matmul,
    "roll": torch.roll, "addcmul": torch.addcmul, "type": torch.reshape,
    "reshape_as": torch.reshape, "view_as": torch.reshape, "float": torch.reshape,
    "unbind": torch.unbind, "unflatten": torch.reshape, "type_as": torch.reshape, "to": torch.reshape,
    "moveaxis": torch.movedim, "clip": torch.clamp,
}  # fmt: skip
METHODS |= {
    word: getattr(torch, word)
    for word in (
        "clamp_min", "clamp_max", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "sin", "cos", "atan", "sinh",
        "cosh", "asinh", "rsqrt", "reciprocal", "sign", "floor", "ceil", "round", "trunc", "nan_to_num", "detach", "max", "min",
        "gt", "ge", "lt", "le", "eq", "ne", "where", "tensor_split", "movedim", "narrow", "index_select", "flip", "maximum",
        "minimum", "repeat_interleave",
    )
}  # fmt: skip

# Allowed after the classifier, where all channels are born together; refused before it.
MIXES = "it mixes channels, so that early channels would depend on later ones"
SOFTMAXES: set[Function] = {F.softmax, torch.softmax}
MIXING: dict[Any, str] = dict.fromkeys(
    (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, F.softmax, torch.softmax, F.log_softmax, torch.log_softmax, F.normalize),
    MIXES,
)

MOVES = "it moves channels to other places, so that stripes would be mixed"
RANDOM = "it draws random numbers while running; only dropout may"
ALWAYS = (
    "it drops in evaluation, too, where each stage and the whole network would draw otherwise. Say when: F.dropout(x, p, "
    "training=self.training)"
)
CONVOLUTIONS = [name for op in OPS.values() for name in op.modules if name.startswith("Conv")]
OTHERS = f"of convolutions only {', '.join(CONVOLUTIONS)} {'are' if len(CONVOLUTIONS) > 1 else 'is'} nested"
REASONS: dict[Any, str] = {
    **dict.fromkeys((nn.LocalResponseNorm, F.local_response_norm), ACROSS),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, torch.permute), MOVES),
    **dict.fromkeys((torch.transpose, torch.roll, F.channel_shuffle), MOVES),
    **dict.fromkeys((torch.rand, torch.randn, torch.rand_like, torch.bernoulli, torch.empty, nn.RReLU), RANDOM),
    **dict.fromkeys((torch.matmul, operator.matmul, torch.bmm, torch.einsum, nn.MultiheadAttention), MIXES),
    **dict.fromkeys((nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), OTHERS),
    put_at: "it puts numbers into a part of a tensor (x[...] = y), which only nestling.exits follows",
    **dict.fromkeys(
        (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell),
        "recurrent layers mix channels over time; use attention or convolutions there, or nestling.exits",
    ),
}
