"""The house: rooms import only from rooms above them, nothing unpickles, every file says what it is, the README's
tree is the disk's."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "nestling"

# From the top of the house to the bottom; a line may import from its own and earlier lines.
FLOW = """
    errors
    files
    recipe
    provenance device
    rundir
    data
    nets
    fused
    gradients
    combine
    evaluate shelf
    recipes describe
    train
    cost
    deadline
    anytime confidence
    runtime portable export profile predict serve
    report paper
    demo
    cli
    __main__
"""
ROOMS = {room: depth for depth, line in enumerate(FLOW.split("\n")) for room in line.split()}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def dotted(path: Path) -> list[str]:
    """src/nestling/nets/plan.py as ["nestling", "nets", "plan"]; a package's __init__ as the package."""
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_rooms(path: Path) -> set[tuple[str, int]]:
    """The rooms a file imports from, wherever in the file, with the line that does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = dotted(path) if path.name == "__init__.py" else dotted(path)[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "nestling" and len(parts) > 1 and parts[1] != "__version__":
                found.add((parts[1], node.lineno))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_only_from_rooms_above(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        assert imported_rooms(path) == set(), "the package's own __init__ exports lazily, by name"
        return
    own = dotted(path)[1]
    assert own in ROOMS, f"{own} is a new room: say in FLOW where in the house it stands"
    for room, line in imported_rooms(path):
        assert room in ROOMS, f"{path}:{line} imports {room}, which FLOW does not know"
        assert ROOMS[room] <= ROOMS[own], f"{path}:{line}: {own} imports from {room}, which stands below it"


def test_imports_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "nestling"
    (source / "nets").mkdir(parents=True)
    monkeypatch.setitem(globals(), "SOURCE", source)
    text = (
        "import nestling.train\nfrom ..data import load\nfrom . import plan\ndef f():\n    from nestling import cli\n"
    )
    (source / "nets" / "net.py").write_text(text)
    assert imported_rooms(source / "nets" / "net.py") == {("train", 1), ("data", 2), ("nets", 3), ("cli", 5)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is_in_at_most_eight_lines(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree)
    assert text, f"{path} has no docstring"
    assert len(text.splitlines()) <= 8, f"{path}: the docstring is longer than eight lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_ever_unpickled(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {module.split(".")[0], *(alias.name.split(".")[0] for alias in node.names)}
            forbidden = names & {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
            assert not forbidden, f"{path}:{node.lineno} imports {forbidden}"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "torch.load", f"{path}:{node.lineno} calls torch.load"
            assert not any(word.arg == "allow_pickle" for word in node.keywords), f"{path}:{node.lineno}"


# The README's tree: a fenced block with one file or folder a line, indented under its folder (which ends in "/"),
# then what it is: "    births.py   when each channel first exists".


def tree_lines(readme: str) -> dict[str, str]:
    """Path -> comment, of the fenced block that shows src/nestling/."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    [block] = [each for each in blocks if re.search(r"^[│├└─\s]*(src/)?nestling/(\s|$)", each, flags=re.MULTILINE)]
    open_folders: list[tuple[int, str]] = []
    found = {}
    for line in block.splitlines():
        bare = re.sub("[│├└─]", " ", line)
        if not bare.strip():
            continue
        indent = len(bare) - len(bare.lstrip())
        name, _, comment = bare.strip().partition(" ")
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        path = "".join(folder for _, folder in open_folders) + name
        if name.endswith("/"):
            open_folders.append((indent, name))
        found[path] = comment.strip(" #")
    return found


def test_tree_lines_reads_both_ways_of_drawing() -> None:
    drawn = (
        "```\nsrc/\n├── nestling/    the package\n│   ├── nets/     nets\n│   │   └── plan.py   # plans\n"
        "└── tests/  tests\n```\n"
    )
    plain = "```text\nsrc/\n    nestling/ the package\n        nets/ nets\n            plan.py plans\n    tests/ tests\n```\n"
    expected = {
        "src/": "", "src/nestling/": "the package", "src/nestling/nets/": "nets",
        "src/nestling/nets/plan.py": "plans", "src/tests/": "tests",
    }  # fmt: skip
    assert tree_lines(plain) == expected
    assert tree_lines(drawn) == expected


def test_the_readme_tree_is_the_disk() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    lines = tree_lines(readme.read_text(encoding="utf-8"))
    gone = [path for path in lines if not (ROOT / path).exists()]
    assert not gone, f"the README's tree lists what is not there: {gone}"
    files = [str(path.relative_to(ROOT)) for path in MODULES if path.name != "__init__.py"]
    missing = [path for path in files if path not in lines]
    assert not missing, f"the README's tree lacks {missing}"
    silent = [path for path, text in lines.items() if path.endswith(".py") and not text]
    assert not silent, f"the README's tree does not say what these are: {silent}"
