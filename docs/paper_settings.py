"""The papers' settings, from ``docs/papers_settings.yaml``, next to those that a command or a kept row has.

    python docs/paper_settings.py    # composes every place of docs/papers_items.yaml into docs/papers_resolved.json

Nothing here is judged by hand: what differs is listed, with the paper's value.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
CONF = DOCS.parent / "conf"
NUMBER = re.compile(r"(?<![\w.-])(?:\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w])")
RESOLVED = DOCS / "papers_resolved.json"

SOME = "some"
"""The paper has such a setting and prints no value."""

Lookup = Callable[[str], Any]
"""Name of a setting -> its value; ``None`` if it is not set."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that is not the paper's."""

    name: str
    published: Any
    ours: Any
    absent: str = "unset"

    @property
    def told(self) -> str:
        """Say what is ours and what is published."""
        ours = self.absent if self.ours is None else _told(self.ours)
        return f"`{self.name}` {ours} (published: {_told(self.published)})"


def read_yaml(file: Path) -> Any:
    """Load YAML by the parser in C, if PyYAML has it: it is seven times as quick."""
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def load_rules(file: Path = DOCS / "papers_settings.yaml") -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Name of each paper -> its rules."""
    rules: Mapping[str, Sequence[Mapping[str, Any]]] = read_yaml(file)
    return rules


def published_of(paper: str, lookup: Lookup) -> dict[str, Any]:
    """Collect what the paper prints of settings such as these; empty if no rule applies."""
    rules = [r for r in load_rules().get(paper, ()) if all(_fits(lookup(k), v) for k, v in r["when"].items())]
    return {name: value for rule in rules for name, value in rule["paper"].items()}


def differences(published: Mapping[str, Any], lookup: Lookup, *, absent: str = "unset") -> list[Difference]:
    """List the settings that are not the paper's; one that is not there is said to be ``absent``."""
    found = {name: lookup(name) for name in published}
    return [
        Difference(name=name, published=value, ours=found[name], absent=absent)
        for name, value in published.items()
        if not _fits(found[name], value)
    ]


def is_preset(place: str) -> bool:
    """Say whether a place chooses named parts and sets nothing else."""
    pairs = [token.partition("=") for token in place.split()]
    return all((CONF / group / f"{name}.yaml").is_file() for group, _, name in pairs)


def of_place(paper: str, place: str) -> tuple[Mapping[str, Any], list[Difference]]:
    """Return what the paper prints of the settings that a place has, and which of them differ.

    Of a place that is no whole experiment, the settings of the parts that it names count alone.
    """
    resolved = resolved_settings()[paper].get(place, {})
    groups = {token.partition("=")[0].partition(".")[0] for token in place.split()}
    published = published_of(paper, resolved.get)
    if "experiment" not in groups:
        published = {name: value for name, value in published.items() if name.partition(".")[0] in groups}
    return published, differences(published, resolved.get)


def told_settings(published: Mapping[str, Any]) -> str:
    """Name the settings of a place that are the paper's, or count them if there are many."""
    return ", ".join(f"`{name}`" for name in published) if len(published) < 8 else f"{len(published)} settings"


def unnamed_numbers(claim: str, published: Mapping[str, Any]) -> list[str]:
    """List the numbers of an item's claim that no compared setting has."""
    compared = {float(n) for n in NUMBER.findall(str(list(published.values())))}
    claimed = [found.rstrip(",") for found in NUMBER.findall(claim)]
    return [number for number in claimed if float(number.replace(",", "")) not in compared]


@cache
def resolved_settings() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Name of each paper -> place -> the settings that rules name, as kept."""
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(RESOLVED.read_text())
    return found


def resolve(paper: str, place: str) -> dict[str, Any]:
    """Compose the settings of a place; return those that a rule of the paper names."""
    from fl_privacy.runs.config import compose_run  # noqa: PLC0415

    plain = compose_run(place.split()).plain()
    choices = {**plain.pop("choices"), **{t.split("=")[0]: t.split("=")[1] for t in place.split() if "." not in t}}
    settings = {**dict(_flat(plain)), **choices}
    named = {name for rule in load_rules()[paper] for part in ("when", "paper") for name in rule[part]}
    return {name: settings[name] for name in sorted(named) if settings.get(name) is not None}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return pairs


def _fits(ours: Any, wanted: Any) -> bool:
    """Say whether a value is the wanted one, one of the wanted ones, or any where ``some`` is wanted."""
    if wanted == SOME:
        return bool(ours)
    return ours in wanted if isinstance(wanted, list) else bool(ours == wanted)


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " or ".join(_told(each) if not isinstance(each, list) else str(each) for each in value)
    return "none" if value is None else str(value)


def main() -> None:
    """Compose every place that the items name."""
    from paper_items import load_items  # noqa: PLC0415

    found = {
        paper: {p: resolve(paper, p) for item in items for p in item.places if "=" in p}
        for paper, (_, items) in load_items().items()
    }
    lines = [f"{json.dumps(n)}: {{\n" + ",\n".join(_lines(places)) + "\n}" for n, places in found.items()]
    RESOLVED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(places: Mapping[str, Any]) -> list[str]:
    return [f" {json.dumps(place)}: {json.dumps(places[place])}" for place in sorted(places)]


if __name__ == "__main__":
    main()
