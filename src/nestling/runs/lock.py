"""A lock on a folder, so that two processes do not write one run: it ends with the process that holds it, however that ends.

In: a folder. Out: a Lock until it is released, or a NestlingError that says who holds it. The kernel keeps it, by a file in
the folder that is removed afterwards; one that a kill leaves behind locks nothing. A forked process does not hold what its
parent does. Where there are no locks on files (Windows, some network drives) nothing is locked.
"""

import contextlib
import os
import socket
from pathlib import Path

from nestling.errors import NestlingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
HELD: set[Path] = set()  # by this process, to which the kernel would give each of them once more


class FolderHeld(NestlingError):
    """Another process has the folder."""


class Lock:
    """Holds a folder until `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.process = folder, folder.resolve() / LOCK, os.getpid()
        self.descriptor: int | None = None
        self.held = False
        if self.path in HELD:
            raise self.refusal(f"process {self.process}, which is this one")
        while self.descriptor is None and fcntl is not None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                raise self.refusal(holder or "another process") from None
            except OSError:  # this file system knows no locks
                os.close(descriptor)
                break
            if same_file(descriptor, self.path):
                self.descriptor = descriptor
            else:  # it was released and removed while we came
                os.close(descriptor)
        if self.descriptor is not None:
            with contextlib.suppress(OSError):  # on a full disk it is held without a name
                os.ftruncate(self.descriptor, 0)
                os.write(self.descriptor, f"process {self.process} on {socket.gethostname()}".encode())
        HELD.add(self.path)
        self.held = True

    def refusal(self, holder: str) -> FolderHeld:
        return FolderHeld(
            f"{self.folder} is being trained by {holder}; wait for it, stop it, or train into another folder"
        )

    def release(self) -> None:
        if os.getpid() != self.process or not self.held:
            return
        self.held = False
        HELD.discard(self.path)
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()  # before it is let go, so that nobody locks a file that is about to be removed
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        self.release()


def same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
