"""The cascade baseline (the paper's EANN): a sparse ResNet with early exits, nested only as a prefix of its own depth.

In: channels and blocks per group, and after how many blocks each exit stands. Out: a plan. Early exits have two
convolutions of stride 2 before they pool, because early features are too local for a bare pool; the last has none.
"""

from nestling.errors import NestlingError
from nestling.nets.births import grow, sparse_links
from nestling.nets.draft import Draft
from nestling.nets.plan import Plan
from nestling.nets.resnet import enter_stem
from nestling.nets.sparse import enter_block


def cascade(
    name: str,
    exits: tuple[int, ...],
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    shape: tuple[int, int, int],
    classes: int,
    exit_width: int,
) -> Plan:
    """`exits` counts blocks from the input: (6, 12, 24, 48) with 16 blocks a group are exits in groups 1, 1, 2 and 3."""
    if list(exits) != sorted(set(exits)) or not exits or exits[0] < 1 or exits[-1] != sum(blocks):
        raise NestlingError(
            f"{name}: exits after blocks {exits}; expected rising numbers that end at the last block, {sum(blocks)}."
        )
    draft = Draft(name, shape)
    x = enter_stem(draft, grow(""), widths[0], "small")
    heads: list[str] = []
    done = 0
    for g, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        members = tuple(range(1, count + 1))
        narrow = draft.halve(x) if g > 1 else x
        births = (stage_of(done + 1, exits),) * width
        made = {0: draft.widen(f"group{g}.input", narrow, births, (0,) * len(draft.births(narrow)), (0,) * width)}
        for b in members:
            at = f"group{g}.block{b}"
            born = stage_of(done + b, exits)
            links = sparse_links(members, b)
            reads = [narrow] if links == (0,) else [made[link] for link in links]
            made[b] = enter_block(draft, at, draft.add(f"{at}.fetch", reads), (born,) * width)
            if done + b in exits:
                x = draft.add(f"exit{born}.fetch", [made[i] for i in sparse_links(members, b + 1)])
                heads.append(enter_exit(draft, x, born, classes, exit_width if done + b < exits[-1] else 0))
        done += count
        if done not in exits:
            x = draft.add(f"group{g}.output", [made[i] for i in sparse_links(members, count + 1)])
    return draft.finish(heads, tuple(f"d{2**s}" for s in range(len(exits))))


def stage_of(block: int, exits: tuple[int, ...]) -> int:
    """The first stage whose exit stands at or after this block."""
    return 1 + sum(block > after for after in exits)


def enter_exit(draft: Draft, x: str, stage: int, classes: int, width: int) -> str:
    """A head, after two strided convolutions of `width` channels where width is not 0."""
    at = f"exit{stage}"
    if width:
        for i in (1, 2):
            y = draft.relu(draft.norm(f"{at}.norm{i}", x))
            x = draft.conv(f"{at}.conv{i}", y, (stage,) * width, stride=2)
    return draft.head(stage, draft.relu(draft.norm(f"{at}.norm", x)), classes)
