"""The documentation: links lead somewhere, code blocks run, public names are listed, and the site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nestling

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# What a reader of a page already has when the first block begins.
GIVEN = {
    "coming.md": """
import torch
from torch import nn
model = nn.ModuleDict({"trunk": nn.Sequential(nn.Linear(6, 8), nn.Tanh()), "a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 6)
features = model["trunk"]
heads = lambda f: [model["a"](f).pow(2).mean(), model["b"](f).pow(2).mean()]
losses = lambda x: heads(features(x))
""",
    "gradients.md": """
import torch, nestling
from nestling.nets import build
net = build(nestling.NetworkRecipe(name="width-digits"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = torch.nn.functional.cross_entropy
batches = [(torch.randn(4, 1, 8, 8), [torch.randint(0, 10, (4,))] * 3) for _ in range(2)]
""",
    "nest.md": """
import torch
layers, width = [], 3
for _ in range(5):
    layers += [torch.nn.Conv2d(width, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    width = 8
module = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10))
x = torch.randn(2, 3, 32, 32)
""",
    "serving.md": """
import numpy as np
image = np.zeros((3, 32, 32), dtype=np.uint8)
""",
    "runtime.md": """
import numpy as np, nestling
image = np.zeros((3, 32, 32), dtype=np.uint8)
""",
    "export.md": """
import numpy as np
image = np.zeros((3, 32, 32), dtype=np.uint8)
from pathlib import Path
import subprocess, sys
Path("runs/cifar10-width").mkdir(parents=True)
subprocess.run([sys.executable, "-m", "nestling", "export", "width-resnet42-cifar10", "--out", "runs/cifar10-width/export-onnx"],
               check=True, capture_output=True)
""",
}
# Where a page says "...", or trains for hours.
SHORTER = {
    "gradients.md": [
        ("order=[0, 1]", "order=[0, 1, 2]"),
        ("epochs=200)", "epochs=1)"),
        ("* 200)", "* 1)"),
        ("    ...\n", "    losses = [criterion(out, t) for out, t in zip(net(x), targets)]\n"),
    ],
    "tasks.md": [("epochs=15", "epochs=2"), ("width=32", "width=8"), ("epochs=5", "epochs=1")],
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", each).lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)} links to {target}, which is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name(page)} links to {target}; that page has {sorted(anchors(there))}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent == ROOT / "docs" and blocks(p)], ids=name)
def test_code_blocks_run_one_after_another(page: Path, tmp_path: Path) -> None:
    code = "\n".join(blocks(page))
    for long, short in SHORTER.get(page.name, []):
        code = code.replace(long, short)
    script = tmp_path / "page.py"
    script.write_text(GIVEN.get(page.name, "") + code)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_public_name_is_listed_and_no_other() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(nestling.__all__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "backward" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_what_contributing_names_is_there() -> None:
    """Every row of its table: the folder of the new file, and the registry in the file that is said to have it."""
    source = ROOT / "src" / "nestling"
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:4] for row in text.splitlines() if row.startswith("| a")]
    assert len(rows) >= 12
    for _, new, lines in rows:
        for path in re.findall(r"`([^`]+/[^`]+)`", new):
            assert (source / path).parent.is_dir(), path
        for registry, path in re.findall(r"`(\w+)`(?: or its like)? in `([^`]+)`", lines):
            assert re.search(rf"^(class )?{registry}\b", (source / path).read_text(encoding="utf-8"), re.MULTILINE), (
                registry
            )
    for path in re.findall(r"`([\w/]+\.(?:py|md))`", text):
        assert (
            (source / path).is_file() or (ROOT / path).is_file() or "NAME" in path or "DATA" in path or "XX" in path
        ), path
