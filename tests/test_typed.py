"""The front door is typed: what a user imports from nestling, type checkers see."""

import ast
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import nestling
from nestling import NestlingError, override
from nestling.nets import build
from nestling.recipes import named
from nestling.recipes.recipe import NetworkRecipe

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "nestling"
SCRIPT = Path(__file__).with_name("typed_user.py")


def for_checkers() -> dict[str, tuple[str, ...]]:
    """What stands under `if TYPE_CHECKING` in the package's __init__: names by module."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(lines) == len(block.body)
    return {str(line.module): tuple(alias.name for alias in line.names) for line in lines}


def test_what_checkers_see_is_what_there_is() -> None:
    assert for_checkers() == nestling._ROOMS
    names = [name for names in nestling._ROOMS.values() for name in names]
    assert sorted(names) == sorted(nestling.__all__) and len(set(names)) == len(names)
    assert dir(nestling) == sorted([*nestling.__all__, "__version__"])
    for name in nestling.__all__:
        assert getattr(nestling, name) is not None
    assert not hasattr(nestling, "shelf")


def test_a_star_gives_the_public_names_and_no_others() -> None:
    program = "before = set(dir()); from nestling import *; print(sorted(set(dir()) - before - {'before'}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ast.literal_eval(done.stdout) == sorted(nestling.__all__)


def test_importing_nestling_does_not_wait_for_torch() -> None:
    program = "import sys, nestling; nestling.NestlingError, nestling.Answer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_users_script_uses_every_public_name() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    [line] = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "nestling"]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {alias.name for alias in line.names} == set(nestling.__all__) <= used


def check(script: Path) -> subprocess.CompletedProcess[str]:
    """mypy --strict on a script as a user has it: of nestling only the types count, not whether it is strict itself."""
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", str(script)]
    words += [f"--cache-dir={ROOT / '.mypy_cache' / 'user'}", "--ignore-missing-imports"]
    return subprocess.run(words, cwd=ROOT / "src", capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path: Path) -> None:
    done = check(SCRIPT)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import nestling\nnestling.load(3)\nnestling.lode('x')\nwith nestling.Runtime('x') as r:\n    r.answer(0, 0.005)\n"
    )
    found = [line.split("[")[-1].rstrip("]") for line in check(wrong).stdout.splitlines() if "error:" in line]
    assert found == ["arg-type", "attr-defined", "call-arg"]


def test_the_package_says_that_it_is_typed_and_its_wheel_holds_all_of_it(tmp_path: Path) -> None:
    assert (SOURCE / "py.typed").is_file()
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if name.startswith("nestling/")}
        [metadata] = [name for name in file.namelist() if name.endswith("METADATA")]
        text = file.read(metadata).decode()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/nestling"]
    there = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert held == {name.removeprefix("src/") for name in there if (ROOT / name).is_file()}
    assert "nestling/py.typed" in held
    fields, _, readme = text.partition("\n\n")
    assert readme.startswith("# nestling") and "Description-Content-Type: text/markdown" in fields
    assert "Classifier: Typing :: Typed" in fields and "Provides-Extra: serve" in fields


# --- stages count from 1, tasks from 0 --------------------------------------------------------------------------------


def test_a_task_is_not_taken_for_a_stage_nor_a_stage_for_a_task() -> None:
    net = build(NetworkRecipe(name="width-digits"))
    assert net.plan.answering == (1, 2, 3)
    for wrong in (0, 4):
        for count in (net.plan.macs, net.plan.params, net.subnet):
            with pytest.raises(NestlingError, match=rf"has no stage {wrong}; .*stages"):
                count(wrong)
    for wrong in (-1, 3):
        with pytest.raises(NestlingError, match=rf"has no task {wrong}; its tasks are 0 to 2"):
            net.plan.task_params(wrong)
    losses = [nn.functional.cross_entropy(logits, torch.tensor([0])) for logits in net.eval()(torch.zeros(1, 1, 8, 8))]
    with pytest.raises(NestlingError, match=r"permutation of the tasks 0 to 2.*stages.* count from 1, tasks from 0"):
        nestling.backward(losses, net, nestling.OSGD(order=[1, 2, 3]))
    with pytest.raises(NestlingError, match=r"strategy.order"):
        override(named("digits-width"), ["strategy.order=0,1,2"])
