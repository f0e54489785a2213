"""The downloader against a real server on loopback: broken, slow and lying ones, and a process that is killed."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nestling.data.download import download
from nestling.errors import NestlingError

CONTENT = os.urandom(1 << 20) * 3  # 3 MiB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Site:
    """A web server with one file and the habits a test gives it."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.ranges = True  # whether it understands Range
        self.cut = 0  # close the connection after so many bytes, without a word
        self.pause = 0.0  # seconds between blocks of 64 KiB
        self.status = 0  # answer this and nothing else
        self.asked: list[str] = []  # the Range header of each request
        self.pages: dict[str, bytes] | None = None  # these instead of the one file
        site = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/file.bin"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def page(self, request: BaseHTTPRequestHandler, content: bytes | None) -> None:
        if content is None:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.pages is not None:
            self.page(request, self.pages.get(request.path))
            return
        asked = request.headers.get("Range", "")
        self.asked.append(asked)
        if self.status:
            request.send_error(self.status)
            return
        found = re.fullmatch(r"bytes=(\d+)-", asked) if self.ranges else None
        start = int(found[1]) if found else 0
        if start >= len(self.content):
            request.send_error(416)
            return
        request.send_response(206 if found else 200)
        if found:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        request.send_header("Content-Length", str(len(self.content) - start))
        request.end_headers()
        end = start + self.cut if self.cut else len(self.content)
        try:
            for here in range(start, min(end, len(self.content)), 1 << 16):
                request.wfile.write(self.content[here : min(here + (1 << 16), end)])
                time.sleep(self.pause)
        except OSError:
            pass  # the other side is gone


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.shutdown()
    made.server.server_close()


def fetch(site: Site, path: Path, md5: str = MD5) -> list[str]:
    """Download, and give back what was said meanwhile."""
    said: list[str] = []
    assert download(site.url, path, md5, said.append, timeout=5) == path
    assert path.read_bytes() == CONTENT
    assert not part_of(path).exists()
    return said


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def test_a_file_arrives_whole(site: Site, tmp_path: Path) -> None:
    assert fetch(site, tmp_path / "new" / "file.bin") == []
    assert site.asked == [""]


def test_a_killed_download_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    site.pause = 0.05
    code = (
        "import sys; from pathlib import Path; from nestling.data.download import download; "
        "download(sys.argv[1], Path(sys.argv[2]), sys.argv[3], print)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, site.url, str(path), MD5])
    deadline = time.monotonic() + 30
    while not part_of(path).exists() or part_of(path).stat().st_size < 300_000:
        assert time.monotonic() < deadline and child.poll() is None, "the child ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = part_of(path).stat().st_size
    assert 300_000 <= there < len(CONTENT) and not path.exists()
    site.pause = 0.0
    said = fetch(site, path)
    assert site.asked == ["", f"bytes={there}-"]
    assert f"{there:,} bytes" in said[0]


def test_a_server_without_ranges_starts_over(site: Site, tmp_path: Path) -> None:
    site.ranges = False
    part_of(tmp_path / "file.bin").write_bytes(CONTENT[:1000])
    fetch(site, tmp_path / "file.bin")
    assert site.asked == ["bytes=1000-"]


def test_a_connection_that_keeps_breaking_gets_there(site: Site, tmp_path: Path) -> None:
    site.cut = 1_000_000
    said = fetch(site, tmp_path / "file.bin")
    assert site.asked == ["", "bytes=1000000-", "bytes=2000000-", "bytes=3000000-"]
    assert said[0] == "the connection ended early after 1,000,000 bytes; going on"


def test_a_connection_that_makes_no_progress_gives_up_and_keeps_what_came(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    site.ranges, site.cut = False, 200_000  # it always starts over and never gets further
    with pytest.raises(NestlingError, match=r"broke off after 200,000 bytes .*run it again to go on from there"):
        download(site.url, path, MD5, lambda _: None, timeout=5, retries=1)
    assert part_of(path).read_bytes() == CONTENT[:200_000]
    site.ranges, site.cut = True, 0
    fetch(site, path)


def test_a_complete_part_needs_only_its_checksum(site: Site, tmp_path: Path) -> None:
    part_of(tmp_path / "file.bin").write_bytes(CONTENT)
    fetch(site, tmp_path / "file.bin")


@pytest.mark.parametrize("length", [1000, len(CONTENT), len(CONTENT) + 5])
def test_a_part_of_something_else_is_thrown_away(site: Site, tmp_path: Path, length: int) -> None:
    part_of(tmp_path / "file.bin").write_bytes(b"x" * length)
    said = fetch(site, tmp_path / "file.bin")
    assert "was not the beginning of this file; starting again" in said[-1]


def test_a_wrong_checksum_is_told_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    site.content = CONTENT[:-1] + b"x"
    found = hashlib.md5(site.content).hexdigest()
    with pytest.raises(
        NestlingError, match=f"wrong checksum: .* gave 3,145,728 bytes with md5 {found}, expected {MD5}"
    ):
        download(site.url, tmp_path / "file.bin", MD5, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_told(site: Site, tmp_path: Path) -> None:
    site.status = 404
    with pytest.raises(NestlingError, match="answered 404 Not Found"):
        download(site.url, tmp_path / "file.bin", MD5, lambda _: None)


@pytest.mark.parametrize("there", [0, 1000])
def test_an_unreachable_site_fails_at_once(tmp_path: Path, there: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/file.bin"
        if there:
            part_of(tmp_path / "file.bin").write_bytes(CONTENT[:there])
        began = time.monotonic()
        with pytest.raises(NestlingError, match=f"{url} is not reachable"):
            download(url, tmp_path / "file.bin", MD5, lambda _: None)
        assert time.monotonic() - began < 5
    assert not there or part_of(tmp_path / "file.bin").stat().st_size == there


def test_a_silent_site_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        with pytest.raises(NestlingError, match=r"is not reachable \(timed out\)"):
            download(url, tmp_path / "file.bin", MD5, lambda _: None, timeout=0.5)


def test_a_full_disk_is_told_and_what_arrived_is_kept(site: Site, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here (it needs root)")
    try:
        with pytest.raises(NestlingError, match=r"the disk is full: .*file\.bin\.part needs 3,145,728 bytes"):
            download(site.url, tmp_path / "file.bin", MD5, lambda _: None)
        assert part_of(tmp_path / "file.bin").stat().st_size > 500_000
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
