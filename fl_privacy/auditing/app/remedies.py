"""Errors of an app that its sandbox may cause."""

import re
from collections.abc import Iterable


def remedies(problems: Iterable[str]) -> list[str]:
    """Return a sentence with the remedy for each kind of ``problems`` that the sandbox may cause."""
    text = "\n".join(problems)
    return [sentence for words, sentence in _OF_THE_SANDBOX if words.search(text)]


def with_remedies(problems: Iterable[str]) -> list[str]:
    """Return ``problems``, each followed by its remedy, if that is new."""
    found, said = list[str](), set[str]()
    for problem in problems:
        new = [sentence for sentence in remedies([problem]) if sentence not in said]
        found.append(" ".join([f"{problem.rstrip('.')}.", *new]) if new else problem)
        said.update(new)
    return found


_OF_THE_SANDBOX: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"connect|network|unreachable|resol(ve|ution)|getaddrinfo|gaierror|Name or service|offline|reach .*hub|"
            r"https?://|URLError|MaxRetry|Timeout|socket|LocalEntryNotFound|HubHTTP|\bhub\b",
            re.IGNORECASE,
        ),
        "The sandbox has no network: name a folder of data by --mirror DIR, and of what was downloaded by --reads DIR.",
    ),
    (
        re.compile(r"FileNotFound|No such file|not found|does not exist|doesn't exist|is no directory", re.IGNORECASE),
        "The sandbox shows the app its own folder, --mirror, caches of data and --reads DIR, and no other file.",
    ),
    (
        re.compile(r"PermissionError|Permission denied|not permitted|Read-only|read-only", re.IGNORECASE),
        "The sandbox lets the app write its temporary folder alone, and neither mount nor call what is outside.",
    ),
    (
        re.compile(
            r"MemoryError|allocate|out of memory|No space left|Resource temporarily|Too many open|File too large|"
            r"new thread|BlockingIOError|bus error",
            re.IGNORECASE,
        ),
        "The sandbox limits memory, files and processes: say --limits 'memory_mib=16384 processes=256' for more.",
    ),
)
