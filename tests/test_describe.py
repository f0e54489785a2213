"""`nestling describe`: counts per stage as a table and as JSON, planning errors, and a picture that shows the plan."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from nestling.commands.cli import main
from nestling.commands.describe import amount, as_text, command, show
from nestling.errors import NestlingError
from nestling.nets import NETS, plan
from nestling.nets.births import depth_links
from nestling.nets.blocks import survey
from nestling.nets.svg import colour, draw
from nestling.recipes import RECIPES
from nestling.recipes.recipe import NetworkRecipe, Recipe, flat, keys, override
from nestling.runs.folder import shipped
from nestling.runs.open import resolve

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def test_json_has_the_promised_shape(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "width-resnet42", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["network"] == "width-resnet42"
    first = found["stages"][0]
    keys = ["stage", "size", "new_macs", "macs", "new_params", "params"]
    # by hand, 8/16/32 channels: the stem, 3 groups of 14 convolutions (two of them narrower on one side), the head
    macs = 27 * 8 * 1024 + 14 * 576 * 1024 + (1152 + 13 * 2304) * 256 + (4608 + 13 * 9216) * 64 + 320
    params = 216 + 14 * 576 + 1152 + 13 * 2304 + 4608 + 13 * 9216 + 330 + 2 * (14 * 8 + 8 + 13 * 16 + 16 + 13 * 32 + 32)
    assert [first[key] for key in keys] == [1, "w1", macs, macs, params, params]
    assert [row["size"] for row in found["stages"]] == ["w1", "w2", "w4"]
    assert found["unnested"]["macs"] == pytest.approx(387.8e6, rel=0.05)
    assert found["stages"][-1]["macs_share"] == pytest.approx(0.688, abs=0.001)


def test_a_recipe_is_described_with_every_field_that_set_changes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "digits-depth", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["network"], found["recipe"]) == ("depth-digits", "digits-depth")
    assert found["stages"] == command("depth-digits")["stages"]
    assert [row["key"] for row in found["fields"]] == list(keys())
    fields = {row["key"]: row for row in found["fields"]}
    assert fields["train.epochs"] == {"key": "train.epochs", "value": 30, "expected": "a whole number, at least 0"}
    assert "sgd-sum" in fields["strategy.name"]["expected"] and fields["strategy.name"]["value"] == "osgd"
    assert main(["describe", "digits-depth"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert all(any(f" {key} " in line for line in lines) for key in keys())
    assert "fields" not in command("depth-digits")
    changed = {row["key"]: row["value"] for row in command("digits-width", growth="w")["fields"]}
    assert changed["network.growth"] == "w", "what is changed for the stages is changed for the fields"


@pytest.mark.parametrize("name", RECIPES)
def test_the_values_of_a_recipe_are_shown_as_set_takes_them(name: str) -> None:
    recipe = RECIPES[name]()
    assert override(Recipe("other"), [f"{key}={as_text(value)}" for key, value in flat(recipe).items()]) == recipe


def test_stages_add_up() -> None:
    for name in ("width-digits", "alternate-digits", "depth-digits", "cascade-digits"):
        stages = command(name)["stages"]
        assert [row["stage"] for row in stages] == list(range(1, len(stages) + 1))
        for total, new in (("macs", "new_macs"), ("params", "new_params")):
            so_far = 0
            for row in stages:
                so_far += row[new]
                assert row[total] == so_far


def test_connections_dropped() -> None:
    """Two equal stripes lose a quarter of a layer's connections, two quarters and a half lose 5 of 16; depth loses none."""
    narrow, both = command("width-resnet42", growth="w", widths="32,32,32")["stages"]
    assert narrow["dropped_connections"] == 0
    assert both["dropped_share"] == pytest.approx(1 / 4, abs=0.01)
    assert command("width-resnet42")["stages"][2]["dropped_share"] == pytest.approx(5 / 16, abs=0.01)
    assert all(row["dropped_connections"] == 0 for row in command("depth-sparse98")["stages"])


def test_networks_can_be_changed() -> None:
    found = command(
        "width-digits", growth="w,w,w", stripes="1,1,1,1", widths="8,8", blocks="1,1", classes=3, shape="3,16,16"
    )
    assert found["shape"] == [3, 16, 16] and found["classes"] == 3
    assert [row["size"] for row in found["stages"]] == ["w1", "w2", "w3", "w4"]
    assert len(command("width-digits", alone=2)["stages"]) == 1
    assert command("width-digits", alone=3)["stages"][0]["macs_share"] == 1
    ensemble = command("width-digits", ensemble=True)["stages"]
    assert [row["new_macs"] for row in ensemble] == [
        command("width-digits", alone=s)["stages"][0]["macs"] for s in (1, 2, 3)
    ]


def test_people_get_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(width=100, record=True)
    console.print(show(command("depth-sparse98")))
    text = console.export_text()
    assert "d8" in text and "224.6 M" in text and "100.0%" in text and "un-nested, all connections" in text
    assert "dropped: of the connections that a network of the stage's size has by itself" in text
    assert [amount(n) for n in (999, 9999, 24_600, 1_810_000, 2_850_000_000)] == [
        "999",
        "9,999",
        "24.6 k",
        "1.81 M",
        "2.85 G",
    ]


@pytest.mark.parametrize(
    "words, error",
    [
        (["width-resnet"], "unknown network 'width-resnet'; did you mean"),
        (["width-resnet42", "--growth", "w,,w"], "stage 3 is empty"),
        (["width-resnet42", "--growth", "w,d"], "grows in width only"),
        (["width-resnet42", "--widths", "30,60,120"], "cannot be cut into stripes"),
        (["depth-sparse98", "--blocks", "16,15,16"], "cannot be halved"),
        (["width-resnet42", "--stripes", "1,a"], "network.stripes"),
        (["width-resnet42", "--shape", "32,32"], "expected channels, height and width"),
        (["width-resnet42", "--classes", "-1"], "classes -1; expected how many"),
        (["width-digits", "--draw", "picture.png"], "a name that ends in .svg"),
        (["width-digits", "--draw", "no/such/folder/picture.svg"], "there is no folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], error: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", *words]) == 1
    out, err = capfd.readouterr()
    assert out == "" and error in err and "Traceback" not in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("name", shipped())
def test_a_trained_network_is_described_by_its_name(name: str) -> None:
    found, results = command(name), resolve(name).results
    for described, measured in zip(found["stages"], results["stages"], strict=True):
        assert [described[key] for key in ("size", "macs", "params")] == [
            measured[key] for key in ("size", "macs", "params")
        ]
    assert (
        found["shape"] == results["shape"] and found["classes"] == len(results["classes"]) and found["network"] == name
    )
    assert command(name, classes=3, shape="3,64,64")["shape"] == [3, 64, 64]
    assert command(str(resolve(name).path)) == {**found, "network": str(resolve(name).path)}, "as any run's folder is"


# --- the picture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_network_can_be_drawn(name: str, tmp_path: Path) -> None:
    file = tmp_path / "nest.svg"
    found = command(name, draw=str(file))
    assert found["picture"] == str(file)
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    words = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    for row in found["stages"]:
        assert row["size"] in words and f"born at stage {row['stage']}" in words
    inside(root)


def inside(root: ElementTree.Element) -> None:
    """Nothing is drawn beyond the edges."""
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        if "%" not in rect.attrib["width"]:
            assert 0 <= float(rect.attrib["x"]) <= width - float(rect.attrib["width"])
            assert 0 <= float(rect.attrib["y"]) <= height - float(rect.attrib["height"])
    for path in root.iter(f"{SVG}path"):
        x, y = map(float, re.findall(r"-?[\d.]+", path.attrib["d"])[:2])
        assert 0 <= x <= width and 0 <= y <= height


def test_colours_are_births() -> None:
    """Every stripe of every block is there, in the colour of its birth and as tall as its share of the channels."""
    drawn = plan(NetworkRecipe(name="alternate-digits"))
    root = ElementTree.fromstring(draw(drawn))
    found = Counter(
        r.attrib["fill"] for g in root.iter(f"{SVG}g") if "clip-path" in g.attrib for r in g.iter(f"{SVG}rect")
    )
    blocks = [block for block in survey(drawn).blocks if block.kind != "head"]
    assert found == Counter(colour(birth) for block in blocks for birth, _ in block.stripes)
    assert len({colour(stage) for stage in range(1, 9)}) == 8


def test_the_survey_sees_blocks_and_their_links() -> None:
    seen = survey(plan(NetworkRecipe(name="depth-sparse98")))
    assert sum(block.kind == "block" for block in seen.blocks) == 1 + 3 * 16
    assert sum(block.kind == "join" for block in seen.blocks) == 3 * 4
    assert [block.kind for block in seen.blocks[-4:]] == ["head"] * 4
    for number, wanted in enumerate(depth_links(16, 4), start=1):
        reads = {link.source for link in seen.links if link.reader == f"group2.block{number}"}
        inner = {int(r.removeprefix("group2.block")) for r in reads if r.startswith("group2.block")}
        assert inner == set(wanted) - {0}
        assert len(reads) == len(wanted)


@pytest.mark.parametrize("name", ["width-resnet42", "depth-sparse98", "alternate-sparse98", "cascade-sparse98"])
def test_pictures_in_the_documentation_are_current(name: str) -> None:
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == draw(plan(NetworkRecipe(name=name)))


def test_drawing_is_refused_without_a_network() -> None:
    with pytest.raises(NestlingError, match="unknown network"):
        command("nothing", draw="x.svg")
