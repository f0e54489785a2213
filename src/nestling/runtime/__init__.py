"""Give it an input and a deadline; get the best answer that could be computed, on time.

answer.py is what a caller gets; engine.py what a stage engine must offer, engines/ those there are; worker.py runs stages
(work.py) in a thread of its own and decides which; caller.py is the caller's side, with mailbox.py, bell.py and prompt.py to
wake up on time; pace.py and forecast.py predict; inputs.py says what goes in; portable.py answers with exported stages. All this
needs numpy only. runtime.py and build.py answer with a trained network, and verified.py exports one, with torch.
"""

from typing import TYPE_CHECKING, Any

from nestling.export.spec import Spec
from nestling.runtime.answer import Answer
from nestling.runtime.caller import Anytime
from nestling.runtime.engine import Abandoned, Engine, Stop
from nestling.runtime.pace import Pace
from nestling.runtime.question import Question

if TYPE_CHECKING:
    from nestling.runtime.runtime import Runtime

__all__ = ["Abandoned", "Answer", "Anytime", "Engine", "Pace", "Question", "Runtime", "Spec", "Stop"]


def __getattr__(name: str) -> Any:
    if name == "Runtime":  # imported when first used: exported stages are answered without torch
        from nestling.runtime.runtime import Runtime

        return Runtime
    raise AttributeError(f"module 'nestling.runtime' has no attribute {name!r}")
