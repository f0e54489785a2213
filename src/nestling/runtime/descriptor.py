"""An open file of the kernel's that is closed once, by its owner or with it."""

import os


class Descriptor:
    """Whoever opens `file` keeps it here; -1 is none."""

    file = -1

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()
