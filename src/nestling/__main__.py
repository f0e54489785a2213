"""`nestling` and `python -m nestling`: the command line."""

import os
import sys

from nestling.errors import CtrlC, explain_missing, tell


def entry() -> None:
    """Run the command line, or say in one line what it lacks here, and exit."""
    CtrlC.listen()
    # Threads of torch's that wait for one another sleep, where by default they spin: beside other programs a training
    # took at least three times as long by that. Before torch is imported, and unless it has been chosen otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from nestling.commands.cli import main
    except ModuleNotFoundError as error:
        tell(explain_missing(error), as_json="--json" in sys.argv)
        sys.exit(1)
    except BaseException:
        if not CtrlC.came():
            raise
        tell("interrupted", as_json="--json" in sys.argv)
        sys.exit(130)
    code = main(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Under torchrun: gloo's threads may still be winding up, and tearing them down while the interpreter exits aborts
        # the process now and then (seen in one of fifteen starts). All files are written: leave without the teardown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
