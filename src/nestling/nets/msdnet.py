"""MSDNet (Huang et al. 2018), the network that users of anytime prediction know, as a nest that grows by its exits.

In: channels of each scale, layers of each part, and after how many layers each exit stands. Out: a plan. Every layer has
features at several scales, each dense in those before it; the finest is given up from part to part. A layer's finer scales
are born with the first exit that needs them, which is what its authors call lazy evaluation.
"""

from nestling.errors import NestlingError
from nestling.nets.cascade import stage_of
from nestling.nets.draft import Draft
from nestling.nets.ops import Cat
from nestling.nets.plan import Plan

GROWTH = 6  # channels that a layer adds at the finest scale
BOTTLENECK = (1, 2, 4)  # channels before a 3x3 convolution, as multiples of what it gives, by the scale it reads
KEPT = 0.5  # of the channels when a scale is given up


def msdnet(
    name: str,
    exits: tuple[int, ...],
    widths: tuple[int, ...],
    layers: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    exit_width: int,
) -> Plan:
    """`layers` of each part: in the first all scales are there, in the last only the coarsest."""
    scales, many = len(widths), sum(layers)
    if list(exits) != sorted(set(exits)) or not exits or exits[0] < scales or exits[-1] != many:
        raise NestlingError(
            f"{name}: exits after layers {exits}; expected rising numbers from {scales} on that end at the last layer, {many}."
        )
    if scales > len(BOTTLENECK) or any(width != widths[0] * 2**scale for scale, width in enumerate(widths)):
        raise NestlingError(
            f"{name}: widths {widths}; expected at most three scales, each twice as wide as the finer one"
        )
    draft = Draft(name, shape)
    made = enter_first(draft, widths)  # scale -> what its layers have given so far
    channels, heads, layer = widths[0], [], 0  # channels of the finest scale; a coarser one has 2, 4 times as many
    for part, count in enumerate(layers):
        for place in range(count):
            layer += 1
            born = {scale: stage_of(layer + scales - 1 - scale, exits) for scale in range(part, scales)}
            made = {scale: enter_layer(draft, f"layer{layer}", made, scale, born[scale]) for scale in born}
            channels += GROWTH
            if part and not place:
                channels = int(channels * KEPT)
                for scale, x in made.items():
                    at = f"layer{layer}.scale{scale}.fewer"
                    made[scale] = enter_conv(draft, at, x, channels * 2**scale, born[scale], kernel=1)
            if layer in exits:
                heads.append(enter_exit(draft, made[scales - 1], stage_of(layer, exits), classes, exit_width))
    return draft.finish(heads, tuple(f"d{after}" for after in exits))


def enter_first(draft: Draft, widths: tuple[int, ...]) -> dict[int, str]:
    """The first features of every scale: each from the finer one."""
    made: dict[int, str] = {}
    for scale, width in enumerate(widths):
        read = made[scale - 1] if scale else "input"
        made[scale] = enter_conv(draft, f"stem{scale}", read, width, 1, stride=2 if scale else 1)
    return made


def enter_layer(draft: Draft, at: str, made: dict[int, str], scale: int, born: int) -> str:
    """What is there at a scale, and what the layer adds to it: half of it from the finer scale where that is still there."""
    new, mine, finer = GROWTH * 2**scale, made[scale], made.get(scale - 1)
    at = f"{at}.scale{scale}"
    if finer is None:
        return draft.enter(at, Cat(), [mine, enter_new(draft, f"{at}.same", mine, new, BOTTLENECK[scale], born)])
    down = enter_new(draft, f"{at}.down", finer, new // 2, BOTTLENECK[scale - 1], born, stride=2)
    same = enter_new(draft, f"{at}.same", mine, new // 2, BOTTLENECK[scale], born)
    return draft.enter(at, Cat(), [mine, down, same])


def enter_new(draft: Draft, at: str, x: str, width: int, bottleneck: int, born: int, stride: int = 1) -> str:
    """A 1x1 convolution to fewer channels, then a 3x3 one."""
    inner = min(len(draft.births(x)), bottleneck * width)
    return enter_conv(draft, at, enter_conv(draft, f"{at}.inner", x, inner, born, kernel=1), width, born, stride=stride)


def enter_conv(draft: Draft, at: str, x: str, width: int, born: int, kernel: int = 3, stride: int = 1) -> str:
    """A convolution, batch norm and relu."""
    return draft.relu(draft.norm(f"{at}.norm", draft.conv(f"{at}.conv", x, (born,) * width, kernel, stride)))


def enter_exit(draft: Draft, x: str, stage: int, classes: int, width: int) -> str:
    """Two strided convolutions and a head."""
    for i in (1, 2):
        x = enter_conv(draft, f"exit{stage}.{i}", x, width, stage, stride=2)
    return draft.head(stage, x, classes)
