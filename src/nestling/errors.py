"""The one error a user may cause, how trouble is told, Ctrl-C, and the words "did you mean" needs.

NestlingError carries a message that says what was found, what was expected and what to do. The command line
prints it without a traceback; anything else that is raised is a bug of ours. This room knows nothing else.
"""

import difflib
import json
import os
import signal
import sys
from collections.abc import Iterable


class NestlingError(Exception):
    """Bad input: a wrong name, value, file or folder. Its message says what was found, expected and to do."""


def tell(message: str, as_json: bool, said: bool = False) -> None:
    """Why a command failed: to people on stderr, unless it is said there already, and to programs as JSON on stdout."""
    if not said:
        print(f"nestling: {message}", file=sys.stderr, flush=True)
    # Of several ranks that fail together the first one speaks: stdout holds one document.
    if as_json and ("TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0"):
        print(json.dumps({"error": message}, indent=2), flush=True)


_said: set[str] = set()


def say_once(message: str) -> None:
    """A message on stderr, the first time only: six runs side by side fall back together."""
    if message not in _said:
        _said.add(message)
        print(f"nestling: {message}", file=sys.stderr, flush=True)


class CtrlC:
    """What the command line does on Ctrl-C: the first raises KeyboardInterrupt, the next ends the process at once."""

    def __init__(self) -> None:
        self.raised, self.process = False, os.getpid()

    def __call__(self, number: int, frame: object) -> None:
        self.once(number)
        raise KeyboardInterrupt

    def once(self, number: int) -> None:
        """Comes back only the first time: whatever is under way then can be cleaned up once."""
        if os.getpid() != self.process:  # a forked worker has nothing to say
            os._exit(128 + number)
        if self.raised:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
            os._exit(128 + number)
        self.raised = True

    @classmethod
    def listen(cls) -> None:
        """From now on; not where somebody else listens, or told us not to."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, cls())
            sys.unraisablehook = unless_interrupted

    @staticmethod
    def came() -> bool:
        """Whether it was pressed: what fails afterwards fails because of it."""
        heard = signal.getsignal(signal.SIGINT)
        return isinstance(heard, CtrlC) and heard.raised


def unless_interrupted(problem: "sys.UnraisableHookArgs") -> None:
    """Python tells of errors in places that cannot raise any; of Ctrl-C there is nothing to tell."""
    if not isinstance(problem.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(problem)


def explain_missing(error: ModuleNotFoundError) -> str:
    """What to do about a package that is not there; a module of our own that is not there is a bug, and raised again."""
    package = (error.name or "").partition(".")[0]
    if package == "nestling":
        raise error
    return (
        f"{package} is not installed; run: pip install nestling, which brings what it needs. Installed with --no-deps, only "
        "nestling.runtime.portable works"
    )


def nearest(word: str, valid: Iterable[str], most: int = 3) -> str:
    """The valid names closest to word, closest first, as text for a message: "a, b or c"; all where none is close.

    A dotted name is also compared by its last part, so that "epochs" finds "train.epochs".
    """
    names = sorted(set(valid))
    if not names:
        return "(there are none)"
    wanted = word.lower()

    def closeness(name: str) -> float:
        forms = {name.lower(), name.lower().rpartition(".")[2]}
        ratios = (difflib.SequenceMatcher(None, wanted, form).ratio() for form in forms)
        starts = wanted != "" and any(form.startswith(wanted) for form in forms)
        return max(ratios) + (0.5 if starts else 0.0)

    ranked = sorted(names, key=closeness, reverse=True)
    close = [name for name in ranked if closeness(name) >= 0.5][:most]
    # Nothing close: the whole list tells more than three arbitrary names. (Of a thousand run folders, its beginning.)
    return join(close) if close else join(names[:60], more=len(names) > 60)


def join(names: list[str], more: bool = False) -> str:
    """["a", "b", "c"] as "a, b or c"; with more as "a, b, c, ..."."""
    if more:
        return ", ".join([*names, "..."])
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
