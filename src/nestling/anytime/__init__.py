"""Answers before a deadline: the part of the runtime that needs no torch, only numpy.

answer.py is what a caller gets; engine.py what a stage engine must offer; worker.py runs stages (work.py) in a thread of
its own and decides which; caller.py is the caller's side, with mailbox.py, bell.py and prompt.py to wake up on time; pace.py and
forecast.py predict; spec.py and inputs.py say what goes in; manifest.py and onnx.py run exported stages.
"""

from nestling.anytime.answer import Answer
from nestling.anytime.caller import Anytime, Pending
from nestling.anytime.engine import Abandoned, Engine, Stop
from nestling.anytime.pace import Pace
from nestling.anytime.spec import Spec

__all__ = ["Abandoned", "Answer", "Anytime", "Engine", "Pace", "Pending", "Spec", "Stop"]
