"""A process that is kept apart where a folder that it reads has another mount within it: tells what it could do."""

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fl_privacy.site.gate import linux_calls as kernel
from fl_privacy.site.gate.isolation import Wishes, keep_apart

MOUNT = "a mount \udcff"  # not UTF-8


def changed(folder: Path) -> list[str] | None:
    """Return the changes that went through; ``None`` where nothing can be mounted."""
    user, group = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
        kernel.mount("", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError:
        return None
    read, temporary = folder / "read", folder / "cell" / "work"
    for place in (read / MOUNT, read / "under", temporary, folder / "cell" / "root"):
        place.mkdir(parents=True)
    for place in (read / "under", read / MOUNT, read / MOUNT):  # the last lies over another
        kernel.mount("tmpfs", str(place), "tmpfs", kernel.MS_NOSUID if place.name == "under" else 0)
        (place / "file").write_text("the user's")
    for name in ("source", "file"):  # a mount of a single file, as containers have them in /usr
        (read / name).write_text("the user's" if name == "source" else "")
    kernel.mount(str(read / "source"), str(read / "file"), None, kernel.MS_BIND)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(read / MOUNT / "socket"))
    listener.listen()
    files = [read / MOUNT / "file", read / "under" / "file", read / "file"]
    if not keep_apart(Wishes(temporary=str(temporary), reads=(str(read),))).is_all:
        return None
    assert [file.read_text() for file in files] == ["the user's"] * 3
    tries: dict[str, Callable[[Path], object]] = {
        "mode": lambda file: file.chmod(0o777),
        "times": lambda file: os.utime(file, (0, 0)),
        "content": lambda file: file.write_text("the app's"),
        "another": lambda file: file.with_name("another").touch(),
    }
    found = []
    for what, change in tries.items():
        for file in files:
            try:
                change(file)
            except OSError:
                continue
            found.append(f"{what} of {file.parent.name}")
    with suppress(OSError), socket.socket(socket.AF_UNIX) as wire:
        wire.connect(str(read / MOUNT / "socket"))
        found.append("a call")
    return found


if __name__ == "__main__":
    print(json.dumps(changed(Path(sys.argv[1]))), flush=True)
