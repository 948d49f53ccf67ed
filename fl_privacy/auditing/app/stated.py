"""Find values of scripts' options and environment variables in a project's pages and settings files."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.files.foreign import open_regular, read_text

MOST_BYTES, MOST_TOGETHER, MOST_LISTED, MOST_SETTINGS = 4 << 20, 1 << 25, 100_000, 1000
"""Largest size of a file and of all, and numbers of files and of settings files."""

LARGEST_PROJECT = 1 << 20  # size of a ``pyproject.toml`` in bytes

LEFT_OUT = {"venv", "env", "site-packages", "node_modules", "__pycache__", "tests", "test"}

_PAGES = ("*.md", "*.rst", "*.sh", "Dockerfile", "Makefile")
_RUN = r"(?:(?<![\w-]){0}\.py|-m (?:[\w.]+\.)?{0}) ([^;&|\n]*)"
_GIVEN = re.compile(r"""(?<!\S)(--?\w[\w-]*)[ =]+(["']?)((?:\./)?\w[\w./:-]{,200})\2(?![^\s`"')])""")
_FLAG = re.compile(r"(?<!\S)(--[a-z][\w-]*)(?=\s*(?:$|--|#))")
_SET = re.compile(r"""^\s*(?:export|ENV)\s+(\w+)[= ](["']?)([\w./:-]{1,200})\2\s*$""", re.MULTILINE)
_PAIR = re.compile(r"""([\w.-]+) *= *["']?([\w./:-]{1,200})""")
_BLANK = "path file dir folder name n num number int float str value"
_SETTINGS = re.compile(r"(^|[-_])(config|cfg|conf|settings|params)([-_](file|path))?$")
_OF_SETTINGS = ("*.yaml", "*.yml", "*.json", "*.cfg", "*.ini", "*.conf")
_OF_TOOLS = re.compile(r"docker|compose$|environment|conda|package|tsconfig|mkdocs|codecov|(setup|tox|pytest|mypy)$")


@dataclass(frozen=True)
class OptionsStated:
    """Finds values of the options of ``script`` in the project's pages, such as a README."""

    folder: Path
    script: Path

    def values(self, flags: Sequence[str]) -> list[str]:
        """Return the values of an option, spelled like any of ``flags``, in commands in the project's documents."""
        values = [value for flag in flags for value in self._given.get(flag, ())]
        if values or not _SETTINGS.search(flags[-1]):
            return [*dict.fromkeys(values)]
        words = {*re.split(r"[-_]", f"{self.script.stem}_{flags[-1].lstrip('-')}_fed_default"), "fl"} - {"config"}

        def rank(path: Path) -> tuple[int, bool, int]:
            stem = path.stem.lower()
            return -sum(word in stem for word in words), not _SETTINGS.search(stem), len(path.parts)

        return [path.relative_to(self.folder).as_posix() for path in sorted(self._settings, key=rank)[:1]]

    @cached_property
    def variables(self) -> dict[str, list[str]]:
        """Return each environment variable that the project's commands set, with its values; those in scripts first."""
        found = dict[str, list[str]]()
        for _, text in sorted(self._pages.items(), key=lambda page: page[0].suffix in {".md", ".rst"}):
            for name, _, value in _SET.findall(text):
                found.setdefault(name, []).extend(allowed([value], name.lower(), "", ()))
        return found

    def configured(self, option: str) -> dict[str, list[str]]:
        """Return each key that ``option``, such as ``--node-config``, sets in commands, with its values."""
        found, quoted = dict[str, list[str]](), re.compile(rf"{option}[ =]+(['\"])(.+?)\1")
        for _, given in chain.from_iterable(map(quoted.findall, self._pages.values())):
            for key, value in _PAIR.findall(given):
                found.setdefault(key, []).extend(allowed([value], key.lower(), "", ()))
        return found

    @cached_property
    def commands(self) -> list[str]:
        """Return what follows the script's name in commands in the project's documents."""
        own = re.compile(_RUN.format(re.escape(self.script.stem)))
        return [each for text in self._pages.values() for each in own.findall(text.replace("\\\n", " "))]

    @cached_property
    def flags(self) -> list[str]:
        """Return the options without a value in the first command that has one."""
        return next(filter(None, map(_FLAG.findall, self.commands)), [])

    @cached_property
    def _given(self) -> dict[str, list[str]]:
        found = dict[str, list[str]]()
        for flag, _, value in chain.from_iterable(map(_GIVEN.findall, self.commands)):
            found.setdefault(flag, []).append(value)
        return found

    @cached_property
    def _pages(self) -> dict[Path, str]:
        found, room = dict[Path, str](), MOST_TOGETHER
        for path in _listed(self.folder, _PAGES):
            with (
                suppress(OSError, UserError),
                os.fdopen(open_regular(path), encoding="utf-8", errors="replace") as page,
            ):
                found[path] = page.read(min(room, MOST_BYTES))
                room -= len(found[path])
        return found

    @cached_property
    def _settings(self) -> list[Path]:
        found = islice(_listed(self.folder, _OF_SETTINGS), MOST_SETTINGS)
        return [path for path in found if not _OF_TOOLS.match(path.stem.lower())]


def _listed(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in (f"{place}{each}" for place in ("", "*/") for each in names):
        for path in sorted(islice(folder.glob(name), MOST_LISTED)):
            hidden = any(part.startswith(".") or part in LEFT_OUT for part in path.relative_to(folder).parts)
            with suppress(OSError):
                if not hidden and path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                    yield path


def holders(folder: Path, module: str, near: Path) -> list[str]:
    """List the folders of a project that hold ``module``, the one nearest to the folder ``near`` first."""
    top = module.partition(".")[0]
    if not top.isidentifier():
        return []
    found = (path.parent for path in chain(folder.rglob(f"{top}.py"), folder.rglob(f"{top}/")))
    own = {path for path in islice(found, MOST_SETTINGS) if not LEFT_OUT & set(path.relative_to(folder).parts)}

    def away(path: Path) -> tuple[int, str]:
        return -sum(path.is_relative_to(each) for each in (near, *near.parents)), str(path)

    return [str(path) for path in sorted(own, key=away)]


def filled(text: str, partition: int, nodes: int) -> str:
    """Return ``text`` with ``{partition}`` and ``{nodes}`` replaced by a client's number and the number of clients.

    ``{partition+1}`` counts clients from 1. ``{partition:a|b}`` becomes a, b, a, ... for clients 0, 1, 2, ...
    """

    def value(found: re.Match[str]) -> str:
        choices = found[2].split("|") if found[2] else []
        return choices[partition % len(choices)] if choices else str(partition + int(found[1] or 0))

    return re.sub(r"\{partition(?:\+(\d+))?(?::([^}]*))?\}", value, text).replace("{nodes}", str(nodes))


def allowed(values: Sequence[str | None], name: str, kind: str, choices: Sequence[object]) -> list[str]:
    """Return the ``values`` that fit an option's type ``kind`` and ``choices``, without placeholders like PATH."""
    found, blank = list[str](), {*re.split(r"[-_ ]", f"{name} {_BLANK}")}
    for each in filter(None, values):
        with suppress(ValueError):
            {"int": int, "float": float}.get(kind, str)(each.replace("{nodes}", "1"))
            left_blank = each.isupper() and not blank.isdisjoint(each.lower().split("_"))
            left_blank |= each == name or each.lower().startswith(("path/to", "your"))
            found += [each] * (each in map(str, choices) if choices else not left_blank)
    return found


def requirements_of(folder: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the requirements in pyproject.toml (``content``; empty to parse it here), or else in requirements.txt."""
    with suppress(UserError, ValueError, RecursionError):
        content = content or tomllib.loads(read_text(folder / "pyproject.toml", LARGEST_PROJECT))
    if isinstance(named := table_in(content, "project").get("dependencies"), list):
        return tuple(map(str, named))
    by_poetry = table_in(table_in(table_in(content, "tool"), "poetry"), "dependencies")
    if by_poetry:
        wanted = {name: each.get("version") if isinstance(each, Mapping) else each for name, each in by_poetry.items()}
        return tuple(f"{name}{_specifier(str(each))}" for name, each in wanted.items() if name != "python")
    with suppress(UserError):
        text = read_text(folder / "requirements.txt", LARGEST_PROJECT).removeprefix("\ufeff")
        lines = (line.partition(" #")[0].strip() for line in text.splitlines())
        return tuple(line for line in lines if line and line[0] not in "#-")
    return ()


def _specifier(text: str) -> str:
    """Convert Poetry's ``^1.3`` to pip's ``>=1.3,<2``."""
    if caret := re.fullmatch(r"\^(0\.)?(\d+)[\d.]*", text):
        return f">={text[1:]},<{caret[1] or ''}{int(caret[2]) + 1}"
    return text if re.match(r"[<>=!]|~=", text) else f"=={text}" if re.fullmatch(r"\d[\w.]*", text) else ""


def table_in(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table ``key``, or an empty one."""
    found = content.get(key)
    return found if isinstance(found, Mapping) else {}
