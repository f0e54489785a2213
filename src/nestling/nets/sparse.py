"""Sparse ResNets (SparseNet, sum form), nested in depth, in width, or in both in any order.

In: a growth order, channels and blocks per group. Out: a plan. A block outputs F(sum of what it reads); what it reads is
the sparse rule inside the ordered list of its own level, so that every D_l is itself a sparse ResNet. A group's input and
output are kept per level: otherwise outer blocks would leak into inner ones.
"""

from nestling.nets.births import Births, Growth, block_levels, depth_links, output_links
from nestling.nets.draft import Draft
from nestling.nets.plan import Plan
from nestling.nets.resnet import enter_stem


def sparse_resnet(
    name: str,
    growth: Growth,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    stem: str = "small",
) -> Plan:
    draft = Draft(name, shape)
    outputs = [enter_stem(draft, growth, widths[0], stem)] * growth.levels  # one per level; all share the stem
    for g, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        if g > 1:
            outputs = [draft.halve(x) for x in outputs]
        outputs = enter_group(draft, growth, f"group{g}", outputs, width, count)
    features = [draft.relu(draft.norm(f"{x}_norm", x)) for x in outputs]
    heads = [draft.head(s, features[growth.level_at(s) - 1], classes) for s in range(1, growth.stages + 1)]
    return draft.finish(heads, growth.sizes)


def enter_group(draft: Draft, growth: Growth, at: str, inputs: list[str], width: int, count: int) -> list[str]:
    """Blocks of one group; takes and returns one tensor per level."""
    stripes = [growth.stripe_of(len(draft.births(x))) for x in inputs]
    births = [growth.channel_births(width, level, what=at) for level in range(1, growth.levels + 1)]
    widened = [
        draft.widen(f"{at}.input{lv}", inputs[lv - 1], births[lv - 1], stripes[lv - 1], growth.stripe_of(width))
        for lv in range(1, growth.levels + 1)
    ]
    made: dict[int, str] = {}
    levels = block_levels(count, growth.levels)
    for b, (level, links) in enumerate(zip(levels, depth_links(count, growth.levels), strict=True), start=1):
        # The block that reads nothing but the group's input takes it before zero channels are added to it.
        group_input = (inputs if links == (0,) else widened)[level - 1]
        reads = [made[link] if link else group_input for link in links]
        x = draft.add(f"{at}.block{b}.fetch", reads)
        made[b] = enter_block(draft, f"{at}.block{b}", x, births[level - 1])
    outputs = []
    for level, links in enumerate(output_links(count, growth.levels), start=1):
        reads = [made[link] if link else widened[level - 1] for link in links]
        outputs.append(draft.add(f"{at}.output{level}", reads))
    return outputs


def enter_block(draft: Draft, at: str, x: str, births: Births) -> str:
    """Two pre-activated 3x3 convolutions."""
    y = draft.relu(draft.norm(f"{at}.norm1", x))
    y = draft.conv(f"{at}.conv1", y, births)
    y = draft.relu(draft.norm(f"{at}.norm2", y))
    return draft.conv(f"{at}.conv2", y, births)
