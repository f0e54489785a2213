"""The command line: tables or one JSON document, errors in one line, exit codes; every command has its parts."""

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

import pytest
from conftest import finding

from nestling import __version__
from nestling.__main__ import entry
from nestling.commands import cli, waiting
from nestling.commands.cli import COMMANDS, Command, main
from nestling.nets import NETS
from nestling.recipes import RECIPES
from nestling.runs.folder import shipped

# A command as any other: it works, talks on stdout (by itself and through a child) and fails on request.
SAMPLE = '''
import subprocess, time
from nestling.commands import waiting
from nestling.errors import NestlingError

def command(recipe: str, extra: tuple[str, ...], run: str = "", set: tuple[str, ...] = (), quick: bool = False) -> dict:
    """Try things out.

    Args:
        recipe: what to try
        extra: more of it
        set: key=value, may be repeated
    """
    print("working")
    subprocess.run(["echo", "child at work"])
    if recipe == "refused":
        raise NestlingError("found this [bold], expected that, do so")
    if recipe == "broken":
        raise ValueError("oh no")
    if recipe == "missing":
        open("/no/such/file")
    if recipe == "stopped":
        stop = KeyboardInterrupt("stopped after epoch 1; go on")
        stop.code = 143
        raise stop
    if recipe == "long":
        waiting.at("trying")
        time.sleep(0.25)
    if recipe == "slow":
        time.sleep(60)
    if recipe == "half":
        return {"recipe": recipe, "incomplete": "found half of it, expected all, do the rest"}
    return {"recipe": recipe, "extra": extra, "set": set, "quick": quick, "loss": float("nan")}

def show(result: dict) -> str:
    return f"tried {result['recipe']}"
'''


@pytest.fixture(autouse=True)
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_command.py").write_text(SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sample_command", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "sample", Command("sample_command", "try things out"))


@pytest.mark.parametrize("name", ["runs/[old]", "[/x]", ":dog:"])
def test_names_are_shown_as_they_are(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Of folders and classes, which anybody may have called something that rich would read as markup, or as an emoji."""
    assert main(["sample", name, "x"]) == 0
    assert f"tried {name}" in capfd.readouterr().out


def test_who_waits_hears_of_a_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waiting, "FIRST", 0.1)
    assert main(["sample", "long", "x"]) == 0 and capfd.readouterr().err == "", "nobody looks on"
    monkeypatch.setattr(waiting, "somebody_waits", lambda: True)
    assert main(["sample", "long", "x", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["recipe"] == "long"
    assert "nestling sample: trying (0 s so far)\n" in err
    assert main(["sample", "long", "x"]) == 0 and main(["sample", "now", "x"]) == 0
    assert capfd.readouterr().err.count("so far") == 1


def test_people_get_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "a"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "tried a"


@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_json_is_one_document_and_all_else_goes_to_stderr(capfd: pytest.CaptureFixture[str], place: int) -> None:
    words = ["sample", "a", "b", "--set", "x=1", "--set", "y=2", "--quick"]
    words.insert(place, "--json") if place != 5 else words.append("--json")
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "recipe": "a", "extra": ["b"], "set": ["x=1", "y=2"], "quick": True, "loss": None,
    }  # fmt: skip
    assert "working" in err
    assert "child at work" in err


def test_a_refusal_is_one_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "refused"]) == 1
    out, err = capfd.readouterr()
    assert out == "working\nchild at work\n"
    assert err.splitlines()[-1] == "nestling: found this [bold], expected that, do so"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["sample", "refused"], 1, "found this [bold], expected that, do so"),
        (["sample", "broken"], 1, "ValueError: oh no (unexpected; --traceback shows where)"),
        (["sample", "broken", "--traceback"], 1, "ValueError: oh no (unexpected; --traceback shows where)"),
        (["sample", "missing"], 1, "[Errno 2] No such file or directory: '/no/such/file'"),
        (["sample", "stopped"], 143, "stopped after epoch 1; go on"),
        (["sampel"], 2, "unknown command 'sampel'; did you mean sample or paper? See nestling --help"),
        (["sample"], 2, "wrong arguments (stderr says which); nestling sample --help lists the right ones"),
        (
            ["sample", "a", "--quik"],
            2,
            "wrong arguments (stderr says which); nestling sample --help lists the right ones",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_is_json_too(words: list[str], code: int, error: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    for_people = capfd.readouterr().err
    assert main([*words, "--json"]) == code
    out, err = capfd.readouterr()
    assert json.loads(out) == {"error": error}
    assert for_people and err.endswith(for_people), "people are told the same with --json"


def test_of_several_ranks_the_first_one_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    for rank, documents in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["sample", "refused", "--json"]) == 1
        out, err = capfd.readouterr()
        assert out.count("error") == documents and "found this" in err


def test_what_is_not_installed_is_said_in_json_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "nestling.commands.cli")
    monkeypatch.setattr(sys, "argv", ["nestling", "train", "--json"])
    with pytest.raises(SystemExit) as stop:
        entry()
    out, err = capfd.readouterr()
    message = json.loads(out)["error"]
    assert message.startswith("rich is not installed; run: pip install nestling")
    assert (stop.value.code, err) == (1, f"nestling: {message}\n")


def test_what_is_incomplete_is_shown_and_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    for form in ([], ["--json"]):
        assert main(["sample", "half", *form]) == 1
        out, err = capfd.readouterr()
        assert json.loads(out)["recipe"] == "half" if form else out.splitlines()[-1] == "tried half"
        assert err.splitlines()[-1] == "nestling: found half of it, expected all, do the rest"


def test_unexpected_errors_are_short_too_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "broken"]) == 1
    assert capfd.readouterr().err == "nestling: ValueError: oh no (unexpected; --traceback shows where)\n"
    assert main(["sample", "missing"]) == 1
    assert "No such file or directory: '/no/such/file'" in capfd.readouterr().err
    assert main(["sample", "broken", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_wrong_usage_exits_with_2_and_names_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sampel"]) == 2
    assert "unknown command 'sampel'; did you mean sample" in capfd.readouterr().err
    assert main(["sample"]) == 2
    assert "RECIPE" in capfd.readouterr().err
    assert main(["sample", "a", "--quik"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--quick" in err


def test_help_shows_arguments_by_name_and_what_they_mean(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--help"]) == 0
    out = capfd.readouterr().out
    for word in ("nestling sample", "Try things out.", "RECIPE", "EXTRA...", "what to try", "--json", "--traceback"):
        assert word in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_says_each_argument_in_one_piece_and_no_default_that_is_none(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An argument that must be given has no default; a flag's default would read as the contrary of --no-NAME."""
    command = importlib.import_module(COMMANDS[name].module).command
    assert main([name, "--help"]) == 0
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capfd.readouterr().out).split())
    assert "(default: )" not in shown and "(default: True)" not in shown
    lines = cli.unwrapped(inspect.getdoc(command) or "").partition("\nArgs:\n")[2].splitlines()
    assert len(lines) == len(inspect.signature(command).parameters)


def test_overview_lists_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(words) == 0
        out = capfd.readouterr().out
        assert all(f"  {name} " in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"nestling {__version__}\n"


def test_the_overview_does_not_wait_for_torch() -> None:
    code = "import sys; from nestling.commands.cli import main; main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_m_nestling_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "nestling", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown command 'nothing'" in done.stderr


def test_threads_that_wait_sleep_unless_told_otherwise() -> None:
    """Known before torch is imported: its threads read it then. Where they spin, a busy machine stands still."""
    told = "print(os.environ['OMP_WAIT_POLICY'])"
    code = f"import nestling.__main__ as m, os, sys; sys.argv[1:] = ['--version']\ntry: m.entry()\nfinally: {told}"
    for chosen, found in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **chosen})
        assert done.stdout.splitlines()[-1] == found


START = (
    "import sys; from nestling.commands import cli; cli.COMMANDS['sample'] = cli.Command('sample_command', '');"
    "sys.exit(cli.main(sys.argv[1:]))"
)


def test_an_interrupt_ends_cleanly_with_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", START, "sample", "slow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=finding(tmp_path),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    assert process.stdout.readline() == "child at work\n"
    time.sleep(0.2)  # past the child, into the sleep
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "nestling: interrupted\n"


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -c "{START}" sample a | true'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=finding(tmp_path))
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


# Every real command, present and future


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_command_show_types_and_help(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[name].module)
    assert callable(module.command)
    assert callable(module.show)
    assert inspect.getdoc(module.command)
    hints = get_type_hints(module.command)
    assert set(hints) == {*inspect.signature(module.command).parameters, "return"}
    assert main([name, "--help"]) == 0
    out = capfd.readouterr().out
    for parameter in inspect.signature(module.command).parameters.values():
        required = parameter.default is inspect.Parameter.empty
        shown = parameter.name.upper() if required else parameter.name.replace("_", "-")
        assert shown.lower() in out.lower()


@pytest.mark.parametrize(
    ("name", "known"), [("train", [*RECIPES]), ("describe", [*NETS, *shipped()])], ids=["recipes", "networks"]
)
def test_every_recipe_and_network_is_listed_by_the_help_and_once_by_a_hopeless_mistake(
    name: str, known: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    listed = re.split(r"[^\w-]+", capfd.readouterr().out)
    assert set(known) <= set(listed)
    assert main([name, "xyzzy"]) == 1
    said = re.split(r"[^\w-]+", capfd.readouterr().err)
    assert all(said.count(each) <= 1 for each in known) and sum(said.count(each) for each in known) >= 14


@pytest.mark.parametrize("wrong", [["--workers", "-3"], ["--repeats", "0"]])
def test_the_demo_refuses_wrong_numbers_before_it_trains(
    wrong: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), *wrong]) == 1
    assert "expected at least 0 and at least 1" in capfd.readouterr().err and not (tmp_path / "demo").exists()
