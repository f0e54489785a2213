"""Nested networks from one rule: a channel born at stage s reads only channels born at or before s.

births.py and plan.py are pure planning; draft.py draws plans; resnet.py, sparse.py and cascade.py are the paper's
networks; layers.py and net.py run a plan with torch; registry.py holds the networks by name; nest.py nests your own.
"""

from nestling.nets.net import Alone, NestedNet, Stage
from nestling.nets.plan import Plan
from nestling.nets.registry import NETS, build, plan

__all__ = ["NETS", "Alone", "NestedNet", "Plan", "Stage", "build", "plan"]
