"""Width-nested ResNets: pre-activation basic blocks (ResNet-42 for CIFAR) and bottlenecks (ResNet-50 for ImageNet).

In: a growth order of widths, channels and blocks per group. Out: a plan. Shortcuts between groups have no parameters in
basic nets (average pool and zero channels) and are 1x1 convolutions in bottleneck nets, as in the originals.
"""

from nestling.errors import NestlingError
from nestling.nets.births import Growth
from nestling.nets.draft import Draft
from nestling.nets.plan import Plan


def resnet(
    name: str,
    growth: Growth,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    stem: str = "small",
    bottleneck: int = 1,
) -> Plan:
    """`bottleneck` is how much narrower the 3x3 convolutions are than the stream (1: basic blocks)."""
    if growth.levels > 1:
        raise NestlingError(
            f"{name}: a ResNet with identity shortcuts grows in width only, but the growth order adds depth. "
            "Use a sparse ResNet (depth-sparse98, alternate-sparse98, ...) to grow in depth."
        )
    draft = Draft(name, shape)
    stem_width = widths[0] // bottleneck
    stream = enter_stem(draft, growth, stem_width, stem)
    for g, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        for b in range(1, count + 1):
            stride = 2 if g > 1 and b == 1 else 1
            at = f"group{g}.block{b}"
            stream = (
                basic_block(draft, growth, at, stream, width, stride)
                if bottleneck == 1
                else bottleneck_block(draft, growth, at, stream, width, bottleneck, stride)
            )
    features = draft.relu(draft.norm("head.norm", stream))
    heads = [draft.head(stage, features, classes) for stage in range(1, growth.stages + 1)]
    return draft.finish(heads, growth.sizes)


def enter_stem(draft: Draft, growth: Growth, width: int, kind: str) -> str:
    """small: one 3x3 convolution. imagenet: 7x7 of stride 2, then a 3x3 max pool of stride 2."""
    births = growth.channel_births(width, what=f"{draft.name} stem")
    if kind == "small":
        return draft.conv("stem", "input", births)
    x = draft.conv("stem", "input", births, kernel=7, stride=2)
    x = draft.relu(draft.norm("stem_norm", x))
    return draft.map("stem_pool", x, "maxpool3")


def basic_block(draft: Draft, growth: Growth, at: str, x: str, width: int, stride: int) -> str:
    births = growth.channel_births(width, what=at)
    y = draft.relu(draft.norm(f"{at}.norm1", x))
    y = draft.conv(f"{at}.conv1", y, births, stride=stride)
    y = draft.relu(draft.norm(f"{at}.norm2", y))
    y = draft.conv(f"{at}.conv2", y, births)
    return draft.add(f"{at}.sum", [y, shortcut(draft, growth, at, x, width, stride)])


def shortcut(draft: Draft, growth: Growth, at: str, x: str, width: int, stride: int) -> str:
    """The identity, made smaller by average pooling and wider by zero channels inside each stripe."""
    if stride == 2:
        x = draft.halve(x, up=True)  # as a convolution of stride 2 rounds
    births = growth.channel_births(width, what=at)
    return draft.widen(f"{at}.widen", x, births, growth.stripe_of(len(draft.births(x))), growth.stripe_of(width))


def bottleneck_block(draft: Draft, growth: Growth, at: str, x: str, width: int, narrow: int, stride: int) -> str:
    inner = growth.channel_births(width // narrow, what=f"{at}.inner")
    outer = growth.channel_births(width, what=at)
    y = draft.relu(draft.norm(f"{at}.norm1", x))
    short = x
    if stride == 2 or len(draft.births(x)) != width:
        short = draft.conv(f"{at}.project", y, outer, kernel=1, stride=stride, padding=0)
    y = draft.conv(f"{at}.conv1", y, inner, kernel=1)
    y = draft.conv(f"{at}.conv2", draft.relu(draft.norm(f"{at}.norm2", y)), inner, stride=stride)
    y = draft.conv(f"{at}.conv3", draft.relu(draft.norm(f"{at}.norm3", y)), outer, kernel=1)
    return draft.add(f"{at}.sum", [y, short])
