"""The command line: COMMANDS, and how each is parsed, run, shown and refused.

A command is a module of this room with two functions. `command(recipe: str, run: str = "", set: tuple[str, ...] = ())` is
also the Python API: it does the work and returns a dict that JSON can hold; parameters without a default or
before a `/` are positional, the others --options, tuples are repeated, the docstring (with "Args:") is the help.
`show(result)` returns a rich renderable for people. A result whose "incomplete" says what is missing is shown, and
the command has failed; whatever fails has an "error" for --json. Progress goes to stderr. A module is imported
only when its command is called; this file knows nothing of what a command does.
"""

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from nestling import __version__
from nestling.commands.waiting import heard_of
from nestling.errors import CtrlC, NestlingError, nearest, tell
from nestling.files import to_text


@dataclass(frozen=True)
class Command:
    module: str  # holds `command` and `show`
    summary: str


COMMANDS: dict[str, Command] = {
    name: Command(f"nestling.commands.{name}", summary)
    for name, summary in {
        "demo": "train small nests on the digits and write a report, in minutes",
        "describe": "show a network's stages, births and costs",
        "data": "fetch or check a data set",
        "train": "train a recipe into a run folder, or resume one",
        "sweep": "train a recipe with several values of some fields, many runs at a time",
        "evaluate": "error, loss and calibration of each stage of a run",
        "profile": "measure the latency of each stage of a run",
        "predict": "answer images, stage by stage, until a deadline",
        "serve": "answer over HTTP and gRPC, by each request's deadline",
        "export": "write each stage for other engines",
        "report": "write run folders up as HTML, Markdown and pictures",
        "paper": "set results beside the paper's",
    }.items()
}

SPEAK = ("demo", "train", "sweep", "serve", "paper")  # these say themselves how far they are, once they have begun

EVERYWHERE = (
    ("--json", 'print one JSON document on stdout and nothing else there ({"error": ...} where there is no result)'),
    ("--traceback", "show the whole traceback when something fails"),
    ("--help", "show help for a command"),
    ("--version", "show the version"),
)


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 (failed), 2 (wrong usage), 130 (interrupted) or 143 (SIGTERM)."""
    # These two are taken out before parsing so that they work in every place and for every command.
    as_json, with_traceback = "--json" in arguments, "--traceback" in arguments
    words = [word for word in arguments if word not in ("--json", "--traceback")]
    try:
        try:
            return run(words, as_json)
        except BrokenPipeError:
            raise  # nobody is left to tell
        except (Exception, KeyboardInterrupt) as error:
            return failed(error, as_json, with_traceback)
    except BrokenPipeError:
        # The reader (such as `head`) has gone: not an error, but Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def failed(error: BaseException, as_json: bool, with_traceback: bool) -> int:
    """Tell why a command failed; the exit code that says so."""
    if isinstance(error, KeyboardInterrupt):
        tell(str(error) or "interrupted", as_json)
        return int(getattr(error, "code", 130))
    if with_traceback:
        traceback.print_exception(error)
    if CtrlC.came():  # in the middle of an import, say, which then fails for another reason
        tell("interrupted", as_json)
        return 130
    expected = isinstance(error, NestlingError | OSError)
    message = str(error) if expected else f"{type(error).__name__}: {error} (unexpected; --traceback shows where)"
    tell(message, as_json, said=with_traceback)
    return 1


def run(words: Sequence[str], as_json: bool) -> int:
    """Run the command that the first word names with the others as its arguments, and show what it returns."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        overview()
        return 0
    if name == "--version":
        print(f"nestling {__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        tell(f"unknown command {name!r}; did you mean {near}? See nestling --help", as_json)
        return 2
    with contextlib.nullcontext() if name == "serve" else heard_of(name):  # whose lines on stderr are JSON
        import tyro  # here, because the overview should not wait for it

        module = importlib.import_module(COMMANDS[name].module)
    style = (tyro.conf.PositionalRequiredArgs, tyro.conf.UseAppendAction, tyro.conf.FlagCreatePairsOff)
    try:
        call = tyro.cli(
            later(module.command),
            args=words[1:],
            prog=f"nestling {name}",
            description=helptext(module.command),
            config=style,
        )
    except SystemExit as stop:  # tyro has printed the help (0) or what is wrong with the usage (2)
        if stop.code:
            right = f"nestling {name} --help lists the right ones"
            tell(f"wrong arguments (stderr says which); {right}", as_json, said=True)
        return stop.code if isinstance(stop.code, int) else 2
    told = contextlib.nullcontext() if name in SPEAK else heard_of(name)
    with told, stdout_to_stderr() if as_json else contextlib.nullcontext():
        result = call()
    if not result:
        return 0  # one of several ranks that has nothing of its own to say
    missing = result.get("incomplete")
    if as_json:
        print(to_text({**result, "error": missing} if missing else result), flush=True)
    else:
        Console(markup=False, emoji=False).print(module.show(result))  # names are shown as they are
        sys.stdout.flush()
    if missing:
        tell(missing, as_json=False)  # the document that was printed says it, too
        return 1
    return 0


def later(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """function's own signature, but calling it only binds: parsing and running stay two steps.

    Positional arguments are shown by their name (RECIPE) instead of their type (STR).
    """
    import tyro

    def bind(*positional: Any, **named: Any) -> Callable[[], Any]:
        return lambda: function(*positional, **named)

    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in signature.parameters.items():
        required, many = parameter.default is inspect.Parameter.empty, get_origin(hints[name]) is tuple
        if required or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            shown = name.upper() + ("..." if many else "")
            hint = "(one or more)" if required and many else None  # tyro would show an empty default
            arg = tyro.conf.arg(metavar=shown if required else f"[{shown}]", help_behavior_hint=hint)
            hints[name] = Annotated[hints[name], arg]
        elif hints[name] is bool:  # its name says what it does; its default would be the opposite of --no-NAME
            hints[name] = Annotated[hints[name], tyro.conf.arg(help_behavior_hint="")]
    parameters = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]
    bind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    bind.__annotations__ = hints
    bind.__name__, bind.__doc__ = function.__name__, unwrapped(inspect.getdoc(function) or "")
    return bind


def unwrapped(text: str) -> str:
    """Each argument on one line: where one goes on with anything but a letter, tyro would begin a new line."""
    head, mark, arguments = text.partition("\nArgs:\n")
    return head + mark + re.sub(r"\n {5,}", " ", arguments)


def helptext(function: Callable[..., Any]) -> str:
    text = (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()
    return f"{text}\n\nWith --json, {EVERYWHERE[0][1]}; with --traceback, {EVERYWHERE[1][1]}."


def overview() -> None:
    """Print what `nestling --help` shows."""
    console = Console()
    console.print("usage: nestling COMMAND [arguments] [--json] [--traceback]\n", markup=False, highlight=False)
    console.print("Anytime neural networks for PyTorch.\n")
    for rows in ([(name, command.summary) for name, command in COMMANDS.items()], EVERYWHERE):
        table = Table.grid(padding=(0, 2))
        for left, right in rows:
            table.add_row(f"  [bold]{left:<11}[/]", right)
        console.print(table)
        console.print()
    console.print("nestling COMMAND --help says more about one command.")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What anything prints on stdout meanwhile goes to stderr: Python, C libraries and child processes."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
