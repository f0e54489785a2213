"""Ray, where it is installed: the cluster of RAY_ADDRESS, the one that runs here, or one for the time being.

In: nothing. Out: the module, and whether a cluster or a connection was begun, which whoever began it ends. Nodes look for
modules where this process was told to.
"""

import os
from typing import Any

from nestling.errors import NestlingError

HANDED_ON = ("PYTHONPATH", "NESTLING_TOKEN", "RAY_SERVE_")  # what begins so


def engine() -> Any:
    """Ray, if it is installed."""
    try:
        import ray
    except ImportError as error:
        raise NestlingError("--on ray needs Ray, which is not installed; pip install 'nestling[ray]'") from error
    return ray


def connect(ray: Any) -> bool:
    """See to it that there is a cluster; whether that was not so before, and is to be ended with `ray.shutdown`."""
    if ray.is_initialized():
        return False
    try:
        ray.init(log_to_driver=False, logging_level="warning", include_dashboard=False, runtime_env=findable())
    except Exception as error:  # Ray raises Exception itself where a node does not start within its 30 seconds
        why, address = str(error).strip().partition("\n")[0], os.environ.get("RAY_ADDRESS")
        place = f"reach the cluster at {address} (RAY_ADDRESS)" if address else "start here"
        raise NestlingError(f"Ray did not {place}: {why}; try again where that is mended") from error
    return True


def findable() -> dict[str, Any]:
    """What processes on nodes are told of this one's environment."""
    found = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON) and value}
    return {"env_vars": found} if found else {}
