"""A file from the web, once: resumable, checked against its known checksum.

Comes in: an address, a place and an md5. Goes out: the whole, checked file at that place. What has arrived
lies in PLACE.part, so that a broken connection or a killed process loses nothing: the next call asks only for
the rest. Knows nothing about what is in the file.
"""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from nestling.errors import NestlingError
from nestling.files import saying

CHUNK = 1 << 18
Say = Callable[[str], None]
Show = Callable[[int, int | None], None]  # bytes that are here, bytes in all if the site tells


class Broken(Exception):
    """The network failed: nobody answered, or the connection ended."""


def unseen(done: int, total: int | None) -> None:
    """Progress that nobody watches."""


def download(
    url: str, path: Path, md5: str, say: Say, timeout: float = 10.0, retries: int = 3, show: Show = unseen
) -> Path:
    """path, holding url's content with that md5; `show` is told of every piece that arrives.

    NestlingError when the site cannot be reached, when the connection keeps breaking, or when the content is
    not what it should be.
    """
    part = path.with_name(path.name + ".part")
    with saying(path, 0, "nothing was downloaded"):
        path.parent.mkdir(parents=True, exist_ok=True)
    resumed = size_of(part) > 0
    if resumed:
        say(f"going on after the {size_of(part):,} bytes that {part} holds already")
    arrive(url, part, say, timeout, retries, show)
    if resumed and digest(part, "md5") != md5:
        say(f"{part} was not the beginning of this file; starting again")
        part.unlink()
        arrive(url, part, say, timeout, retries, show)
    found = digest(part, "md5")
    if found != md5:
        size = size_of(part)
        part.unlink()
        raise NestlingError(
            f"wrong checksum: {url} gave {size:,} bytes with md5 {found}, expected {md5}; they were deleted. "
            "Run it again; if it happens again, something between here and there changes the file"
        )
    os.replace(part, path)
    return path


def arrive(url: str, part: Path, say: Say, timeout: float, retries: int, show: Show) -> None:
    """Fetch into part until it is whole, going on where a connection broke; `retries` times without progress.

    A site that does not answer the first time is not asked again: another source may be quicker.
    """
    left, connected = retries, False

    def arrived_so_far(done: int, total: int | None) -> None:
        nonlocal connected
        connected = True
        show(done, total)

    while True:
        before = size_of(part)
        try:
            return rest(url, part, timeout, arrived_so_far)
        except Broken as error:
            if not connected:
                raise NestlingError(f"{url} is not reachable ({error})") from error
            arrived = size_of(part)
            left = retries if arrived > before else left - 1
            if left < 0:
                raise NestlingError(
                    f"{url} broke off after {arrived:,} bytes ({error}); run it again to go on from there"
                ) from error
            say(f"{error} after {arrived:,} bytes; going on")
            time.sleep(0.2)


def rest(url: str, part: Path, timeout: float, show: Show) -> None:
    """One connection: append to part what it lacks. Broken if the connection ends before all is there."""
    have = size_of(part)
    headers = {"User-Agent": "nestling", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            return  # nothing comes after what we have; the checksum says whether it is the file
        raise NestlingError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Broken(reason(error)) from error
    with response:
        # A server that ignores Range sends everything again, with status 200.
        start = have if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        show(start, total)
        with saying(part, total or 0, "what has arrived is kept"), open(part, "ab") as file:
            file.truncate(start)
            for chunk in chunks(response):
                file.write(chunk)
                show(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and size_of(part) < total:
        raise Broken("the connection ended early")


def chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What arrives, with the network's errors told apart from the disk's."""
    while True:
        try:
            chunk = response.read1(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(reason(error)) from error
        if not chunk:
            return
        yield chunk


def digest(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def reason(error: BaseException) -> str:
    """Why the network failed, in few words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(cause) or type(error).__name__
