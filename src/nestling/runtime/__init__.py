"""Give it an input and a deadline; get the best answer that could be computed, on time.

In: a network or a run's folder. Out: a Runtime, whose `answer(x, deadline)` comes back by the deadline with the best stage
that was done, whose `answers(x)` yields every stage, and whose answers can be refined later. How deadlines are kept is in
nestling.anytime, which needs no torch; here are the engines that do, and what a run's folder knows.
"""

from nestling.runtime.runtime import Runtime

__all__ = ["Runtime"]
