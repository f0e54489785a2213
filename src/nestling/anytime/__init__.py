"""Answers before a deadline: the part of the runtime that needs no torch, only numpy.

answer.py is what a caller gets; engine.py what a stage engine must offer; worker.py runs stages in a thread of its own
and decides which; caller.py is the caller's side, with its clock; pace.py predicts how long stages take on a machine
that may get busy; spec.py and inputs.py say what goes in; manifest.py and onnx.py run exported stages in ONNX Runtime.
"""

from nestling.anytime.answer import Answer
from nestling.anytime.caller import Anytime, Pending
from nestling.anytime.engine import Abandoned, Engine, Stop
from nestling.anytime.pace import Pace
from nestling.anytime.spec import Spec

__all__ = ["Abandoned", "Answer", "Anytime", "Engine", "Pace", "Pending", "Spec", "Stop"]
