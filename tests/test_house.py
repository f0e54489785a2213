"""The house: rooms import only from rooms above them, nothing unpickles, every file says what it is, and the README's tree of
rooms is the disk's."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "nestling"

# From the top of the house to the bottom; a line may import from its own and earlier lines.
FLOW = """
    errors
    files
    recipes
    data
    nets
    kernels
    gradients
    runs
    train
    export
    runtime
    serve
    studies
    report
    commands
    __main__
"""
ROOMS = {room: depth for depth, line in enumerate(FLOW.split("\n")) for room in line.split()}
# Who speaks beside commands/: how trouble is told, and how far a training is, which may take days, also when Python began it.
SPEAKERS = {"errors.py", "train/progress.py"}
# Names that two files may have: a command has the name of what it calls, a figure that of its section, a recipe that of its data
# set; a class, where each entry of one registry has its own.
SHARED_FILES = {
    "answers.py": {"report/figures", "report/sections"},
    "choosing.py": {"report/figures", "report/sections"},
    "cifar10.py": {"data", "recipes"},
    "cost.py": {"report/figures", "report/sections"},
    "deadlines.py": {"report/figures", "report/sections"},
    "digits.py": {"data", "recipes"},
    "evaluate.py": {"commands", "runs"},
    "profile.py": {"commands", "studies"},
    "training.py": {"report/figures", "report/sections"},
}
SHARED_CLASSES = {"Tiles": {"kernels/backends/sm80.py", "kernels/backends/sm90.py", "kernels/backends/triton.py"}}
AT_HOME = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Containerfile", "LICENSE", "Makefile", "README.md", "benchmarks",
    "constraints.txt", "docs", "examples", "mkdocs.yml", "pyproject.toml", "results", "src", "tests",
}  # fmt: skip
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
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            found = {part.lineno for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)}
            lines = {line for _, line in imported_rooms(path)}
            assert checkers or not found & lines, "the package's own __init__ exports lazily, by name"
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
        "import nestling.train\nfrom ..data import load\nfrom . import plan\ndef f():\n    from nestling import files\n"
    )
    (source / "nets" / "net.py").write_text(text)
    assert imported_rooms(source / "nets" / "net.py") == {("train", 1), ("data", 2), ("nets", 3), ("files", 5)}


def speaks(path: Path) -> list[str]:
    """Where a file prints, or uses rich to."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        prints = isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "print",
            "sys.stdout.write",
            "sys.stderr.write",
        )
        if prints or any(name.partition(".")[0] == "rich" for name in names):
            found.append(f"{path}:{getattr(node, 'lineno', 0)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_commands_speak(path: Path) -> None:
    inside = path.relative_to(SOURCE)
    if inside.parts[0] == "commands" or str(inside) in SPEAKERS:
        assert inside.parts[0] == "commands" or speaks(path), (
            f"{inside} does not speak any more: take it out of SPEAKERS"
        )
        return
    assert not speaks(path), "a room returns data; commands/ shows it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is_in_at_most_eight_lines(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree)
    assert text, f"{path} has no docstring"
    assert len(text.splitlines()) <= 8, f"{path}: the docstring is longer than eight lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_that_a_docstring_names_are_there(path: Path) -> None:
    """Beside the file or one folder up, or with their folder's name."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for name in re.findall(r"[\w/]*\w\.(?:py|cuh?)\b", text):
        homes = [SOURCE, ROOT] if "/" in name else [path.parent, path.parent.parent]
        there = any((home / name).is_file() for home in homes) or name.startswith("my_")  # a user's
        assert there, f"{path} names {name}, which is not there"


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


def test_the_folder_holds_nothing_that_was_left_behind() -> None:
    """A report, a run or a profile that somebody made here and committed with the rest."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert found <= AT_HOME, f"{sorted(found - AT_HOME)} at the root: take it out, or name it here"


def test_the_readme_shows_every_room_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```text\nsrc/nestling/\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    shown = [line.split()[0].removesuffix("/").removesuffix(".py") for line in block.splitlines()]
    assert shown == [room for room in FLOW.split() if room != "__main__"], "the README's tree of rooms is not FLOW"
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert rooms == set(ROOMS)


def types_of(path: Path) -> set[str]:
    """The classes of a file, and its names of types: capitalised, but not constants."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    assigned = [node.targets[0] for node in nodes if isinstance(node, ast.Assign)]
    names = {node.id for node in assigned if isinstance(node, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", node.id)}
    return names | {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def test_no_name_is_given_twice() -> None:
    files: dict[str, set[str]] = {}
    classes: dict[str, set[str]] = {}
    for path in MODULES:
        inside = path.relative_to(SOURCE)
        if path.name != "__init__.py":
            files.setdefault(path.name, set()).add(inside.parent.as_posix())
        for name in types_of(path):
            classes.setdefault(name, set()).add(inside.as_posix())
    assert {name: homes for name, homes in files.items() if len(homes) > 1} == SHARED_FILES
    assert {name: homes for name, homes in classes.items() if len(homes) > 1} == SHARED_CLASSES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
