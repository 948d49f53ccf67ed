"""Flower app bundles (FAB) of runs: content, required packages, signatures, and the site's approval."""

import hashlib
import io
import json
import logging
import os
import pwd
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from fl_privacy import checks
from fl_privacy.errors import UserError, visible
from fl_privacy.files import make_missing_private, write_private
from fl_privacy.files.foreign import open_regular
from fl_privacy.site.gate.plain_yaml import listed, mapping, place_of, table
from fl_privacy.site.gate.rules import RefusedError

logger: logging.Logger = logging.getLogger(__name__)

LARGEST_BUNDLE, LARGEST_PROJECT, LARGEST_DECISION = 64 << 20, 1 << 20, 1 << 16
"""Most bytes of a bundle, of its ``pyproject.toml``, and of a decision's file."""

MOST_WAITING = 20  # most runs that wait for approval; further runs are refused
REVOKED = "revoked"  # decision that withdraws an earlier approval

MOST_PACKAGES, MOST_LETTERS = 500, 10_000
INSTALL_SECONDS = 1800.0

_KEYGEN = "`ssh-keygen -t ed25519` makes one"
_SHA256 = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,63}")
_RUN = re.compile(r"0|[1-9][0-9]{0,23}")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Rules for the app bundles (Flower's FAB) that runs bring.

    Attributes:
        allow: allowed bundles, each by its ``fab`` (SHA-256), ``key`` (a name in ``keys``), or ``app`` and ``version``.
        keys: Ed25519 public keys by name.
        approve: runs that need ``fl-privacy policy approve``: ``never`` (none), ``others`` (not allowed), ``each run``.
        install: ``from-index`` installs missing packages from the site's index, ``never`` does not.
        versions: ``any`` accepts packages of other versions than required, ``stated`` does not.
    """

    allow: tuple[Mapping[str, str], ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    approve: str = "never"
    wait_seconds: float = 3000.0
    folder: Path = Path("runs")
    install: str = "never"
    versions: str = "stated"


APPROVE = {
    "never": "A run of another app is refused.",
    "others": "A run of another app waits until `fl-privacy policy approve` says yes or no.",
    "each run": "Each of these runs also waits until `fl-privacy policy approve` says yes or no.",
}
"""Value of ``runs.approve`` -> its effect."""


def read_runs(given: object, folder: Path, ledger: Path | None) -> Runs:
    """Parse a policy's section ``runs``, rules for apps that are sent with a run; paths are relative to ``folder``.

    ``UserError`` if it is wrong, or if the policy has no ``ledger``.
    """
    section = table("runs", given, "allow", "keys", "approve", "wait_seconds", "folder", "install", "versions")
    if ledger is None:
        raise UserError("runs is expected with a budget, whose ledger names each bundle, but got none; add budget.")
    keys = {name: _key(name, key) for name, key in mapping("runs.keys", section.get("keys")).items()}
    allow = [dict(mapping("runs.allow", one)) for one in listed("runs.allow", section.get("allow", ()))]
    for one in allow:
        is_known = set(one) in ({"fab"}, {"key"}, {"app", "version"})
        if not is_known or not all(isinstance(value, str) for value in one.values()):
            raise UserError(
                "runs.allow is expected to list {fab: SHA256}, {key: NAME} or {app: PUBLISHER/NAME, version: V}, each a"
                f" text, but got {one!r:.200}; quotes make a number a text."
            )
        if not _SHA256.fullmatch(one.get("fab", "0" * 64)):
            raise UserError(
                f"runs.allow.fab is expected to be 64 letters of a SHA-256, but got {one['fab']!r:.80}; run sha256sum."
            )
        if "key" in one:
            checks.one_of("runs.allow.key", one["key"], keys)
    choices = {"approve": tuple(APPROVE), "install": ("never", "from-index"), "versions": ("stated", "any")}
    for name, values in choices.items():
        checks.one_of(f"runs.{name}", section.get(name, values[0]), values)
    wait = checks.number("runs.wait_seconds", section.get("wait_seconds", 3000.0), above=0, at_most=1e6, example=3000)
    return Runs(
        allow=tuple(allow),
        keys=keys,
        wait_seconds=wait,
        folder=place_of("runs.folder", section["folder"], folder) if "folder" in section else ledger.parent / "runs",
        **{name: section[name] for name in choices if name in section},
    )


def _key(name: str, given: object) -> str:
    try:
        loaded = load_ssh_public_key(str(given).encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"runs.keys.{name} is expected to be 'ssh-ed25519 AAAA...', but got {given!r:.100}; {_KEYGEN}."
        ) from error
    if not isinstance(loaded, ed25519.Ed25519PublicKey):
        raise UserError(f"runs.keys.{name} is expected to be an Ed25519 key, but got {given!r:.20}; {_KEYGEN}.")
    return str(given)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """App that is sent with a run; the fields after ``digest`` are the bundle's own statements."""

    content: bytes
    digest: str
    name: str  # name of the app, ``publisher/name``
    version: str
    client: str  # reference to the client app, such as ``package.client_app:app``
    packages: tuple[str, ...] = ()  # required packages, such as ``numpy>=1.21``, without Flower
    python: str = ""

    def in_words(self) -> str:
        return f"{self.name} {self.version} (FAB {self.digest})"


def read_bundle(content: bytes) -> Bundle:
    """Return the bundle in ``content``, as its pyproject.toml describes it; ``RefusedError`` if it is no Flower app."""
    if len(content) > LARGEST_BUNDLE:
        raise RefusedError("size", f"a bundle of {len(content)} bytes; shrink it to {LARGEST_BUNDLE}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open("pyproject.toml") as file:
            text = file.read(LARGEST_PROJECT + 1)
            parts = [each.split("/") for each in archive.namelist()]
        if len(text) > LARGEST_PROJECT:
            raise ValueError("its pyproject.toml is larger than 1 MiB")
        places = [tuple(part for part in each if part not in {"", ".", ".."}) for each in parts]
        if len(set(places)) < len(places):  # a review, Flower and the app's process could each take another one
            raise ValueError("two of its files unpack to one place")
        parsed = tomllib.loads(text.decode())
        project, app = parsed["project"], parsed["tool"]["flwr"]["app"]
        name, version = f"{app['publisher']}/{project['name']}", project["version"]
        client, packages = app["components"]["clientapp"], project.get("dependencies", [])
        python = project.get("requires-python", "")
        texts = (version, client, python, *packages)
        if not isinstance(packages, list) or not all(isinstance(each, str) for each in texts):
            raise ValueError("its version, client app or packages are no texts")
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
            raise ValueError("its name or version has other letters than a package's")
        if len(packages) > MOST_PACKAGES or sum(map(len, texts)) > MOST_LETTERS:
            raise ValueError(f"it asks for more than {MOST_PACKAGES} packages or in more than {MOST_LETTERS} letters")
    except Exception as error:  # a damaged archive: each compression has its own errors
        raise RefusedError("bundle", f"{type(error).__name__}: {error!s:.400}; build it with `flwr build`") from error
    return Bundle(
        content=content,
        digest=hashlib.sha256(content).hexdigest(),
        name=name,
        version=version,
        client=client,
        packages=tuple(each for each in packages if canonicalize_name(re.split(r"[^\w.-]", each)[0]) != "flwr"),
        python=python,
    )


def unmet_packages(bundle: Bundle, *, any_version: bool = False) -> dict[str, str]:
    """Return unmet requirements of ``bundle`` with reasons; ``any_version`` accepts any version of a package."""
    found, seen = dict[str, str](), set[tuple[str, str]]()
    with suppress(InvalidSpecifier):
        if not SpecifierSet(bundle.python).contains(here := ".".join(map(str, sys.version_info[:3]))):
            found[f"{_PYTHON}{bundle.python}"] = f"{here} is installed"
    for text in bundle.packages:
        try:
            found.update(_unmet(Requirement(text), seen, any_version=any_version))
        except (ValueError, RecursionError):  # also of a marker that compares what can't be compared
            found[text] = "no requirement"
    return found


_PYTHON = "Python "


def _unmet(
    wanted: Requirement, seen: set[tuple[str, str]], *, any_version: bool, extra: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (requirement, reason) for unmet requirements: ``wanted`` and those of its extras not yet in ``seen``."""
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
        return
    text = str(wanted).partition(";")[0].strip()  # the marker holds, and pip knows no extra
    try:
        installed = metadata.distribution(wanted.name)
    except (metadata.PackageNotFoundError, ValueError):
        yield text, "not installed"
        return
    another = wanted.url is not None or not wanted.specifier.contains(installed.version, prereleases=True)
    if another and not any_version:
        yield text, f"{installed.version} is installed"
    new = {(canonicalize_name(wanted.name), canonicalize_name(each)) for each in wanted.extras} - seen
    seen |= new
    for inner in map(Requirement, (installed.requires or ()) if new else ()):
        about = canonicalize_name(str(inner.marker or ""))
        for _, each in new if "extra" in about else ():
            if each in about:  # markers are evaluated slowly, and a bundle may name thousands of extras
                yield from _unmet(inner, seen, any_version=any_version, extra=each)


def install_packages(unmet: Mapping[str, str], folder: Path) -> Path:
    """Install the ``unmet`` packages from the site's index, as wheels alone, so that none of their code runs.

    Return the new subfolder of ``folder``; ``RefusedError`` on failure.
    """
    if odd := [text for text in unmet if text.startswith(_PYTHON) or "@" in text or unmet[text] == "no requirement"]:
        raise RefusedError("packages", f"{odd[0]} ({unmet[odd[0]]}), which no index gives; install or correct it")
    wanted = sorted(unmet)
    into = folder / hashlib.sha256(json.dumps([wanted, sys.version]).encode()).hexdigest()[:32]
    if into.is_dir():
        return into
    make_missing_private(folder)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        report = _pip(["--dry-run", "--report", "-", *wanted], work)
        about = [each["metadata"] for each in json.loads(report)["install"]]
        pinned = [f"{each['name']}=={each['version']}" for each in about]
        made = Path(work) / "made"
        made.mkdir(mode=0o700)
        if pinned:
            _pip(["--no-deps", "--target", str(made), *pinned], work)
        with suppress(OSError):  # another node was faster
            made.rename(into)
    return into.resolve(strict=True)


def _pip(arguments: Sequence[str], work: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command += ["--only-binary=:all:", *arguments]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s", visible(f"{error} {getattr(error, 'stderr', '')}"[-2000:]))  # it may name the index
        raise RefusedError("packages", "the site's index does not have them all; its log says more") from error
    return done.stdout


def signers_of(bundle: Bundle, signatures: Sequence[tuple[bytes, bytes]], keys: Mapping[str, str]) -> list[str]:
    """Return the names in ``keys`` whose keys signed ``bundle``.

    ``signatures``: pairs (message, signature); a message must end with the bundle's digest. ``keys``: OpenSSH's format.
    """
    found = dict[str, None]()
    for name, text in keys.items():
        key = load_ssh_public_key(text.encode())
        assert isinstance(key, ed25519.Ed25519PublicKey)
        for message, signature in signatures:
            if message.endswith(bytes.fromhex(bundle.digest)):
                with suppress(InvalidSignature):
                    key.verify(signature, message)
                    found[name] = None
    return list(found)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Run that waits for approval; ``token``: hash of run, app bundle and configuration."""

    run: str
    token: str
    name: str
    version: str
    fab: str
    config: Mapping[str, Any]
    signers: Sequence[str]
    unmet: Mapping[str, str]
    since: float


class Approvals:
    """Folder of waiting runs and of the site's decisions."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def admit(self, bundle: Bundle, run: str, config: Mapping[str, Any], signers: Sequence[str]) -> str | None:
        """Return who or what approved the run, or ``None`` while it waits for approval; ``RefusedError`` if refused."""
        runs, own = self.runs, ({"fab": bundle.digest}, {"app": bundle.name, "version": bundle.version})
        decision = self.decision(run)
        found = (one for one in runs.allow if one in own or one.get("key") in signers)
        named = next((f"allow: {'key ' + one['key'] if 'key' in one else min(one)}" for one in found), "")
        if named and runs.approve != "each run":
            return named
        if runs.approve == "never" or (runs.approve == "each run" and runs.allow and not named):
            raise RefusedError("run", f"run {run} of {bundle.in_words()} is not on the site's list, runs.allow; add it")
        question = json.dumps([run, bundle.digest, config], sort_keys=True, default=str)
        token = hashlib.sha256(question.encode()).hexdigest()
        if decision.get("token") == token:
            if decision.get("says") == "yes":
                self.forget(run)  # it may have been held while the site decided
                return str(decision.get("who", ""))[:64]
            raise RefusedError("run", f"run {run} of {bundle.in_words()} was refused by the site; start another one")
        make_missing_private(runs.folder)
        with suppress(FileNotFoundError):  # also if the site decides just now
            if _own(self.place(run, "json")).get("token") == token:
                return None
        if len(self.waiting()) >= MOST_WAITING:
            raise RefusedError("run", f"run {run} would wait, but {MOST_WAITING} others do; decide on one of them")
        unmet = unmet_packages(bundle, any_version=runs.versions == "any")
        about = {"run": run, "token": token, "name": bundle.name, "version": bundle.version, "fab": bundle.digest}
        more = {"config": config, "signers": signers, "unmet": unmet, "since": time.time()}
        text = json.dumps({**about, **more}, default=str)
        if len(text) > LARGEST_DECISION:
            raise RefusedError("size", f"run {run} has {len(text)} bytes of settings; keep at most {LARGEST_DECISION}")
        self.forget(run)
        write_private(self.place(run, f"{bundle.digest}.fab"), bundle.content)
        write_private(self.place(run, "json"), text)
        logger.warning("Run %s of %s waits: fl-privacy policy approve SITE.yaml %s", run, bundle.in_words(), run)
        return None

    def decision(self, run: str) -> dict[str, Any]:
        """Return the decision on a run, empty if undecided; ``RefusedError`` if revoked, ``UserError`` if damaged."""
        place = self.place(run, "decision")
        try:
            found = _own(place)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{place} is expected to hold a decision, but can't be read: {error}; --revoke the run."
            ) from error
        if found.get("says") == REVOKED:
            raise RefusedError("run", f"run {run} was revoked by the site; start another one")
        return found

    def decide(self, run: str, says: str, token: str = "") -> None:
        """Write this user's decision on a run: ``yes`` or ``no`` to the request with hash ``token``, or ``REVOKED``."""
        who = f"user {os.getuid()}"  # not LOGNAME, which anybody sets
        with suppress(KeyError):
            who = pwd.getpwuid(os.getuid()).pw_name
        make_missing_private(self.runs.folder)
        if says != REVOKED:
            self.decision(run)  # somebody may have revoked it meanwhile
        decision = {"token": token, "says": says, "who": who, "when": time.time()}
        write_private(self.place(run, "decision"), json.dumps(decision))
        self.forget(run)

    def forget(self, run: str) -> None:
        for place in (self.place(run, "json"), *self.runs.folder.glob(f"{run}.*.fab")):
            place.unlink(missing_ok=True)

    def waiting(self) -> list[Waiting]:
        found = list[Waiting]()
        try:
            for place in self.runs.folder.glob("*.json"):
                with suppress(FileNotFoundError):  # decided just now
                    found.append(one := Waiting(**_own(place)))
                    if not 0 <= time.time() - one.since <= self.runs.wait_seconds:
                        self.forget(found.pop().run)  # its messages are refused by now, or ended with a node
            return sorted(found, key=lambda waiting: waiting.since)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.runs.folder} is expected to hold waiting runs, but got {error}; remove what is damaged."
            ) from error

    def place(self, run: str, suffix: str) -> Path:
        if not _RUN.fullmatch(run):
            raise UserError(f"RUN is expected to be the number of a run, but got {run!r:.40}; try 1234.")
        return self.runs.folder / f"{run}.{suffix}"


def _own(place: Path) -> dict[str, Any]:
    """Return the mapping in a small file; ``UserError`` if other users can write it, ``ValueError`` if damaged."""
    with os.fdopen(open_regular(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
            raise UserError(f"{place} is expected to be yours or root's, but others may write; chown or chmod go-w it.")
        found = json.loads(file.read(LARGEST_DECISION))
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found
