"""What the site adds to the pages: the reference behind api.md, the tree of files, and links that leave docs/.

In: Markdown as it stands in docs/. Out: Markdown for mkdocs. Nothing here is needed to read the pages as they are.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "nestling"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name == "api.md":
        markdown += reference()
    if name == "files.md":
        markdown += tree()
    return re.sub(
        r"\[([^\]]*)\]\((?:\.\./)+(results[^)]*|[a-z]+/[^)]*|[A-Z]+\.md)\)", r"\1 (`\2`)", markdown
    )  # the site holds docs/ alone


def reference() -> str:
    """The documentation of every public name, where it is defined."""
    import nestling

    parts = []
    for name in nestling.__all__:
        found = getattr(nestling, name)
        home = found.__module__ if callable(found) else nestling._ROOM_OF[name]
        path = f"{home}.{getattr(found, '__qualname__', name)}"
        parts.append(f"\n\n::: {path}\n")
    return "\n\n## Reference\n" + "".join(parts)


def tree() -> str:
    """Every file of the package with the first sentence of its docstring."""
    lines = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "__init__.py" and path.parent == SOURCE:
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{path.relative_to(SOURCE)}` | {first_sentence(text)} |")
    return "\n\n| file | what it is |\n|---|---|\n" + "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)])\. ", line)[0].rstrip(".").replace("|", "\\|")
