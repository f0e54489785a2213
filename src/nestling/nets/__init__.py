"""Nested networks from one rule: a channel born at stage s reads only channels born at or before s.

births.py and plan.py are pure planning, ops/ holds the operations, one file each; draft.py makes plans; resnet.py,
sparse.py and cascade.py are the paper's networks, registry.py has them by name; blocks.py and svg.py show plans. None
of these needs torch. layers.py and net.py run a plan with torch; nest.py, exits.py and keep.py take your own
module, which reading/ reads.
"""

from typing import TYPE_CHECKING, Any

from nestling.nets.plan import Plan
from nestling.nets.registry import NETS, build, plan

if TYPE_CHECKING:
    from nestling.nets.net import Alone, NestedNet, Stage

__all__ = ["NETS", "Alone", "NestedNet", "Plan", "Stage", "build", "plan"]


def __getattr__(name: str) -> Any:
    if name in ("Alone", "NestedNet", "Stage"):  # imported when first used: planning does not wait for torch
        from nestling.nets import net

        return getattr(net, name)
    raise AttributeError(f"module 'nestling.nets' has no attribute {name!r}")
