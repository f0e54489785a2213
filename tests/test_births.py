"""Planning without tensors: growth orders, links, births, counts by hand, and every planning error, with torch out of
reach."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.errors import NestlingError
from nestling.nets import NETS, plan
from nestling.nets.births import block_levels, depth_links, grow, level_lists, output_links
from nestling.nets.draft import Draft
from nestling.nets.ops import Conv, Flatten, Input, Map, Operation, Select
from nestling.nets.plan import Node, Plan
from nestling.nets.settle import check
from nestling.recipes.recipe import NetworkRecipe

# --- no torch -----------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "matplotlib"):
            raise ImportError(f"{name} is out of reach")
sys.meta_path.insert(0, Wall())
import nestling.nets.births, nestling.nets.plan, nestling.nets.reading.ties
from nestling.nets import NETS, plan
from nestling.commands.describe import command
from nestling.nets.svg import draw
from nestling.recipes.recipe import NetworkRecipe
for name in NETS:
    small = {"blocks": (8,) * len(NETS[name].blocks)} if NETS[name].kind == "sparse" else {}
    drawn = plan(NetworkRecipe(name=name, **small))
    assert drawn.programs and drawn.owners and draw(drawn).startswith("<svg")
print(command("width-resnet42")["stages"][-1]["macs"])
assert "torch" not in sys.modules
"""


def test_planning_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "266897600"


# --- growth orders ------------------------------------------------------------------------------------------------


def test_growth_orders_name_their_stages() -> None:
    assert grow("w,w").sizes == ("w1", "w2", "w4")
    assert grow("w,w,w", (1, 1, 1, 1)).sizes == ("w1", "w2", "w3", "w4")
    assert grow("d,d,d").sizes == ("d1", "d2", "d4", "d8")
    assert grow("w,d,w,d").sizes == ("w1d1", "w2d1", "w2d2", "w4d2", "w4d4")
    assert grow("wd,wd").sizes == grow("dw , wd").sizes == ("w1d1", "w2d2", "w4d4")
    assert grow("").sizes == ("full",)


def test_a_layer_is_cut_into_stripes() -> None:
    assert grow("w,w").channel_births(8) == (1, 1, 2, 2, 3, 3, 3, 3)
    assert grow("w,w,w", (1, 1, 1, 1)).channel_births(4) == (1, 2, 3, 4)
    assert grow("d,d").channel_births(2, level=2) == (2, 2)


def test_width_and_depth_in_turn() -> None:
    """ "w,d,w,d" with 16 blocks a group: stripes w1 w2 w4 are born at 1 2 4, block levels d1 d2 d4 at 1 3 5."""
    growth = grow("w,d,w,d")
    assert growth.stripe_births == (1, 2, 4)
    assert growth.level_births == (1, 3, 5)
    lists = level_lists(16, growth.levels)
    assert lists[0] == (1, 5, 9, 13)
    assert set(lists[1]) - set(lists[0]) == {3, 7, 11, 15}
    assert set(lists[2]) - set(lists[1]) == set(range(2, 17, 2))
    assert growth.channel_births(4, level=1) == (1, 2, 4, 4)
    assert growth.channel_births(4, level=2) == (3, 3, 4, 4)  # w1 and w2 channels are born together and read each other
    assert growth.channel_births(4, level=3) == (5, 5, 5, 5)


def test_stage_4_of_the_alternating_net_adds_the_w4_channels_of_d1_and_d2_blocks() -> None:
    drawn = plan(NetworkRecipe(name="alternate-sparse98"))
    born = {n.name for n in drawn.nodes if n.op.weighted and 4 in n.births}
    levels = block_levels(16, 3)
    expected = {
        f"group{g}.block{b}.conv{c}" for g in (1, 2, 3) for b in range(1, 17) for c in (1, 2) if levels[b - 1] < 3
    }
    assert born == expected | {"stem", "head4.linear"}
    for name in expected:
        node = drawn.by_name[name]
        assert node.births.count(4) == node.channels // 2
    head = drawn.by_name["head4.linear"]
    assert drawn.by_name[head.reads[0]].births == (3,) * 32 + (4,) * 32, "stage 4 reads the output of its own level, d2"


@given(st.lists(st.sampled_from(["w", "d", "wd"]), max_size=5), st.integers(1, 3))
def test_births_rise_with_stripe_and_level(order: list[str], unit: int) -> None:
    growth = grow(",".join(order))
    assert growth.stages == len(order) + 1
    for level in range(1, growth.levels + 1):
        births = growth.channel_births(growth.units * unit, level)
        assert list(births) == sorted(births) and min(births) >= growth.level_births[level - 1]
        for stage in range(growth.level_births[level - 1], growth.stages + 1):
            assert sum(b <= stage for b in births) == growth.width_at(stage) * unit


# --- links in depth -----------------------------------------------------------------------------------------------

LINKS_16 = {
    1: [0], 2: [0, 1], 3: [0, 1], 4: [0, 2, 3], 5: [0, 1], 6: [2, 4, 5], 7: [0, 3, 5], 8: [0, 4, 6, 7], 9: [0, 1],
    10: [2, 6, 8, 9], 11: [3, 7, 9], 12: [4, 8, 10, 11], 13: [0, 5, 9], 14: [6, 10, 12, 13], 15: [0, 7, 11, 13],
    16: [0, 8, 12, 14, 15],
}  # fmt: skip
LINKS_8 = {1: [0], 2: [0, 1], 3: [0, 1], 4: [0, 2, 3], 5: [0, 1], 6: [2, 4, 5], 7: [0, 3, 5], 8: [0, 4, 6, 7]}


def test_links_of_16_blocks() -> None:
    assert {b: list(links) for b, links in enumerate(depth_links(16, 4), start=1)} == LINKS_16
    assert [set(links) for links in output_links(16, 4)] == [{9, 1}, {13, 9, 1}, {15, 13, 9, 1}, {16, 15, 13, 9, 1}]
    assert block_levels(16, 4) == (1, 4, 3, 4, 2, 4, 3, 4, 1, 4, 3, 4, 2, 4, 3, 4)


def test_links_of_8_blocks() -> None:
    assert {b: list(links) for b, links in enumerate(depth_links(8, 3), start=1)} == LINKS_8
    assert [set(links) for links in output_links(8, 3)] == [{5, 1}, {7, 5, 1}, {8, 7, 5, 1}]
    assert block_levels(8, 3) == (1, 3, 2, 3, 1, 3, 2, 3)


@pytest.mark.parametrize("name, links", [("depth-sparse98", LINKS_16), ("depth-sparse66", LINKS_8)])
def test_networks_read_exactly_these_blocks(name: str, links: dict[int, list[int]]) -> None:
    drawn = plan(NetworkRecipe(name=name))
    for group in range(1, len(NETS[name].widths) + 1):
        for block, wanted in links.items():
            found = fetched(drawn, f"group{group}.block{block}.norm1")
            blocks = [n.split(".block")[1].split(".")[0] for n in found if n.startswith(f"group{group}.block")]
            assert sorted(map(int, blocks)) == [b for b in wanted if b]
            assert len(found) == len(wanted), "and the group's input where 0 is listed"


def fetched(drawn: Plan, name: str) -> tuple[str, ...]:
    """The terms of the sum that a block begins with."""
    read = drawn.by_name[drawn.by_name[name].reads[0]]
    return read.reads if read.name.endswith(".fetch") else (read.name,)


@given(st.integers(1, 5), st.integers(1, 4))
def test_every_level_is_a_sparse_resnet_of_its_own(levels: int, times: int) -> None:
    blocks = times * 2 ** (levels - 1)
    links, outputs = depth_links(blocks, levels), output_links(blocks, levels)
    for level, members in enumerate(level_lists(blocks, levels), start=1):
        place = {0: 0, **{b: i for i, b in enumerate(members, start=1)}}
        alone = depth_links(len(members), 1)
        for b in members:
            if block_levels(blocks, levels)[b - 1] == level:
                assert tuple(place[r] for r in links[b - 1]) == alone[place[b] - 1]
        assert tuple(place[r] for r in outputs[level - 1]) == output_links(len(members), 1)[0]


# --- counts -------------------------------------------------------------------------------------------------------


def tiny() -> Plan:
    """Two layers of 2 and 3 channels on a 4x4 image, two stages, 10 classes."""
    draft = Draft("tiny", (1, 4, 4))
    x = draft.relu(draft.norm("norm", draft.conv("one", "input", (1, 2))))
    x = draft.conv("two", x, (1, 2, 2), kernel=1)
    return draft.finish([draft.head(1, x, 10), draft.head(2, x, 10)], ("w1", "w3"))


def test_counts_by_hand() -> None:
    drawn = tiny()
    # stage 1: 9 weights of `one`, 2 of the norm, 1 of `two`, a head of 10 weights and 10 biases
    assert drawn.new_params(1) == 9 + 2 + 1 + 20
    assert drawn.new_macs(1) == 9 * 16 + 1 * 16 + 10
    # stage 2: the same again, but its two channels of `two` read two channels each and its head reads three
    assert drawn.new_params(2) == 9 + 2 + 2 * 2 + 40
    assert drawn.new_macs(2) == 9 * 16 + 2 * 2 * 16 + 30
    assert drawn.params(2) == 32 + 55 and drawn.macs(2) == 170 + 238
    assert drawn.task_params(0) == 32
    assert drawn.task_params(1) == 87 - 20, "D_2 without the head of stage 1"
    assert drawn.dense() == (87 + 1, 170 + 238 + 16), "one connection is dropped: from the late to the early channel"


def test_owners_by_hand() -> None:
    owners = tiny().owners
    assert owners["one"] == (0b11, 0b10)
    assert owners["two"] == (0b11, 0b10, 0b10)
    assert set(owners["head1.linear"]) == {0b01}
    assert set(owners["head2.linear"]) == {0b10}


def test_programs_by_hand() -> None:
    first, second = tiny().programs
    assert [step.node.name for step in first.steps if step.node.op.weighted] == ["one", "two", "head1.linear"]
    assert first.takes == (("input", 1),)
    assert set(first.leaves) == set(second.takes) == {("input", 1), ("norm.relu", 1), ("two.mean", 1)}
    assert second.leaves == ()


@pytest.mark.parametrize(
    "name, millions",
    [
        ("width-resnet42", (24.4, 73.0, 266.9)),
        ("even-resnet42", (24.4, 73.0, 145.8, 242.7)),
        ("depth-sparse98", (26.4, 54.7, 111.3, 224.6)),
    ],
)
def test_macs_are_the_known_ones(name: str, millions: tuple[float, ...]) -> None:
    drawn = plan(NetworkRecipe(name=name))
    assert [drawn.macs(s) / 1e6 for s in range(1, drawn.stages + 1)] == pytest.approx(millions, rel=0.05)


def test_the_unnested_net_has_the_known_macs() -> None:
    alone = plan(NetworkRecipe(name="width-resnet42", alone=3))
    assert alone.macs(1) / 1e6 == pytest.approx(387.8, rel=0.05)
    assert alone.dense() == (alone.params(1), alone.macs(1)), "nothing is dropped in it"


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_channel_reads_only_what_is_born(name: str) -> None:
    small: dict[str, Any] = {"blocks": (8,) * len(NETS[name].blocks)} if NETS[name].kind == "sparse" else {}
    drawn = plan(NetworkRecipe(name=name, **small))
    for node in drawn.nodes:
        for row, birth in enumerate(node.births):
            for read, channels in drawn.parents(node, row):
                assert all(drawn.by_name[read].births[c] <= birth for c in channels)
    births = Counter(b for n in drawn.nodes if n.op.weighted for b in n.births)
    assert sorted(births) == list(range(1, drawn.stages + 1)), "no stage is empty"


# --- planning errors ----------------------------------------------------------------------------------------------

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"name": "width-resnet4"}, "unknown network 'width-resnet4'; did you mean width-resnet42"),
    ({"growth": "w,,w"}, "stage 3 is empty and would add nothing"),
    ({"growth": "w,x"}, r"stage 3 reads 'x'; expected w \(width\), d \(depth\) or wd \(both\)"),
    ({"growth": "ww"}, "stage 2 reads 'ww'"),
    ({"growth": "w,d"}, "identity shortcuts grows in width only"),
    ({"growth": "w,w", "stripes": (1, 1)}, "has 3 widths but 2 stripes"),
    ({"stripes": (1, 1, 3)}, "32 channels cannot be cut into stripes .* expected a multiple of 5"),
    ({"widths": (32, 64, 126)}, "126 channels cannot be cut into stripes .* expected a multiple of 4"),
    ({"widths": (32, 64)}, "2 widths .* but 3 block counts"),
    ({"alone": 4}, "stage 4 does not exist: this network has stages 1 to 3"),
    ({"alone": 1, "ensemble": True}, "exclude each other"),
    ({"name": "depth-sparse98", "blocks": (16, 12, 16)}, "12 blocks a group cannot be halved into 4 levels"),
    ({"name": "depth-sparse98", "growth": "d,d,d,d,d"}, "16 blocks a group cannot be halved into 6 levels .* multiple of 32"),
    ({"name": "cascade-sparse98", "growth": "d"}, "grows by its exits; it takes no growth order"),
    ({"name": "cascade-sparse98", "blocks": (8, 8, 8)}, "expected rising numbers that end at the last block, 24"),
    ({"name": "cascade-sparse98", "alone": 5}, "this cascade has stages 1 to 4"),
    ({"name": "msdnet", "growth": "d"}, "grows by its exits; it takes no growth order"),
    ({"name": "msdnet", "blocks": (6, 6, 6)}, "expected rising numbers from 3 on that end at the last layer, 18"),
    ({"name": "msdnet", "widths": (16, 32, 48)}, "each twice as wide as the finer one"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", ERRORS)
def test_planning_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NestlingError, match=words):
        plan(NetworkRecipe(**{"name": "width-resnet42", **changes}))


def test_a_stripe_needs_width() -> None:
    with pytest.raises(NestlingError, match="every stripe needs at least one unit of width"):
        grow("w,w", (1, 0, 1))


def test_images_that_shrink_away_are_refused() -> None:
    with pytest.raises(NestlingError, match="the input is too small for this network"):
        plan(NetworkRecipe(name="depth-sparse98"), shape=(3, 2, 2))


def rows(name: str, op: Operation, reads: tuple[str, ...], births: tuple[int, ...]) -> Node:
    return Node(name, op, reads, births, (2, 2))


RELU = Map("relu")
BROKEN: list[tuple[list[Node], str]] = [
    ([rows("a", Conv(), ("nobody",), (1,))], "a reads 'nobody', which no node before it gives"),
    ([rows("late", Conv(), ("input",), (2,)), rows("a", Conv(), ("late",), (1, 2))], "born at stage 1, before anything"),
    ([rows("late", Conv(), ("input",), (2,)), rows("a", RELU, ("late",), (1,))], "born at stage 1, reads channel 0 of late"),
    ([rows("wide", Conv(), ("input",), (1, 2)), rows("a", Conv(), ("wide",), (1, 1))], "work would be wasted"),
    ([rows("a", Conv(), ("input",), (1, 1))], "stage 2 adds nothing"),
]  # fmt: skip


@pytest.mark.parametrize("nodes, words", BROKEN)
def test_a_plan_that_breaks_the_rule_is_refused(nodes: list[Node], words: str) -> None:
    last = nodes[-1].name
    heads = [Node(f"head{s}", Flatten(), (last,), (s,) * 4 * nodes[-1].channels, ()) for s in (1, 2)]
    broken = Plan("broken", (Node("input", Input(), (), (1,), (2, 2)), *nodes, *heads), ("head1", "head2"), ("a", "b"))
    with pytest.raises(NestlingError, match=words):
        check(broken)


def test_groups_that_stripes_cut_through_are_refused() -> None:
    nodes = (
        Node("input", Input(), (), (1,), (2, 2)),
        rows("a", Conv(), ("input",), (1, 2, 2, 2)),
        rows("b", Conv(groups=2), ("a",), (1, 2, 2, 2)),
        rows("take", Select((0,)), ("b",), (1,)),
        rows("head1", Conv(), ("take",), (1,)),
        rows("head2", Conv(), ("b",), (2,)),
    )
    with pytest.raises(NestlingError, match="the 2 groups of b do not grow alike at stage 2"):
        check(Plan("broken", nodes, ("head1", "head2"), ("a", "b")))
