"""The log as TensorBoard scalars, for those who like to watch it there. An extra: nothing depends on it.

In: lines of the log. Out: event files in the run folder. The log itself stays the record.
"""

from pathlib import Path
from typing import Any

from nestling.errors import NestlingError


class Board:
    """Writes one line of the log at a time; opened late, so that torch's own import cost is paid only when asked for."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise NestlingError(
                "train.tensorboard=true, but tensorboard is not installed; pip install 'nestling[tensorboard]', "
                "or leave it off: log.jsonl has the same numbers."
            ) from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def add(self, line: dict[str, Any]) -> None:
        for key in ("train_loss", "test_error", "test_loss"):
            for stage, value in enumerate(line.get(key, ()), start=1):
                self.writer.add_scalar(f"{key}/stage{stage}", value, line["epoch"])
        for key in ("lr", "images_per_second"):
            self.writer.add_scalar(key, line[key], line["epoch"])
        self.writer.flush()
