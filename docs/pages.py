"""What of the site is made from the code: a page for each method, lists of options, settings, formulas, the reference.

A hook of MkDocs; ``make docs`` builds the site with it. Nothing is fetched: formulas are drawn by matplotlib.
"""

import hashlib
import inspect
import io
import json
import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from final_tables import final_table
from kept_rows import attacks_table, audits_table, batches_table, escaped, honest_table, rows_table
from leaderboard import leaderboard
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from network_tables import agreement_table, leakpro_table, map_picture, networks_table
from omegaconf import DictConfig, OmegaConf
from paper_settings import read_yaml
from policy_tables import policy_table
from red_team_table import red_team_table
from text_tables import texts_table
from tree_tables import trees_table

from fl_privacy.cli.catalog import describe_option
from fl_privacy.measure import METRICS
from fl_privacy.runs.config import options
from fl_privacy.runs.config.building import locate_target, plain_settings

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDERS = {"attack": "attacks", "defense": "defenses"}
FROM_ROOT = {
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "results.md": "experiments/RESULTS.md",
}
"""Pages that are files outside of ``docs/``."""

REFERENCE = {
    "fl_privacy": "What is used most, under one name.",
    "fl_privacy.types": "The nouns: what is trained, uploaded, observed and reconstructed.",
    "fl_privacy.attacks": "Attacks on intercepted updates.",
    "fl_privacy.defenses": "Defenses of clients.",
    "fl_privacy.effects": "What a defense does, as a value for accountants and attackers.",
    "fl_privacy.measure": "How much of an image a reconstruction shows.",
    "fl_privacy.models": "Networks of the papers.",
    "fl_privacy.data": "Data sets and partitions.",
    "fl_privacy.flower": "The edge to Flower.",
    "fl_privacy.attacks.malicious": "Servers that send crafted models.",
    "fl_privacy.defenses.guard": "What clients look at in a model before they train on it.",
    "fl_privacy.data.transformations": "Image operations and policies.",
    "fl_privacy.auditing.regression": "Whether an app leaks more than it did.",
    "fl_privacy.errors": "The error for users, in one line.",
}
FORMULA = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE)


@cache
def methods() -> dict[str, dict[str, Any]]:
    """Load ``methods.yaml``: kind -> name -> its entry; an option that it lacks has its docstring there."""
    found = read_yaml(DOCS / "methods.yaml")
    for kind, entries in found.items():
        listed = {option for entry in entries.values() for option in entry["options"]} | {"none", "custom"}
        for option in options(kind):
            if option not in listed:
                text = inspect.getdoc(locate_target(OmegaConf.load(options(kind)[option]), kind)) or ""
                idea = text.partition("\n\nArgs:")[0].replace("``", "`")
                entries[option] = {
                    "title": option,
                    "options": [option],
                    "idea": idea,
                    "needs": "an entry in methods.yaml",
                }
    return found


@cache
def figures() -> dict[str, Any]:
    """Load what ``make gallery`` measured, by the file name of its picture."""
    path = DOCS / "assets" / "gallery" / "figures.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def on_config(config: Any) -> Any:
    """Add the generated pages to the site's navigation, and the version to the foot of each page."""
    config.copyright = f"fl_privacy {version('fl-privacy')}, {config.copyright or 'Apache License 2.0'}"
    for entry in config.nav:
        for kind, folder in FOLDERS.items():
            if folder.capitalize() in entry:
                entry[folder.capitalize()] += [
                    {told["title"]: f"{folder}/{name}.md"} for name, told in methods()[kind].items()
                ]
        if "Reference" in entry:
            entry["Reference"] += [{name: f"reference/{name}.md"} for name in REFERENCE]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated from the code or lie outside of ``docs/``."""
    made = {page: _from_root(path) for page, path in FROM_ROOT.items()}
    for kind, folder in FOLDERS.items():
        for name, told in methods()[kind].items():
            made[f"{folder}/{name}.md"] = method_page(kind, name, told)
    listed = "".join(f"- [`{name}`]({name}.md): {what}\n" for name, what in REFERENCE.items())
    made["reference/index.md"] = f"# Reference\n\nMade from the docstrings of the code.\n\n{listed}"
    for name, what in REFERENCE.items():
        exported = ", ".join(getattr(import_module(name), "__all__", ()))
        options = "show_root_heading: false" + (f"\n      members: [{exported}]" if exported else "")
        made[f"reference/{name}.md"] = f"# {name}\n\n{what}\n\n::: {name}\n    options:\n      {options}\n"
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Replace the marks of a page by lists and formulas, and links to files outside of ``docs/``."""
    made = MARK.sub(lambda m: MADE[m[1]](m[2]), markdown)
    for place, path in FROM_ROOT.items():
        made = made.replace(f"](../{path}", f"]({place}")
    return FORMULA.sub(lambda m: formula(m[1]), made)


def method_page(kind: str, name: str, told: dict[str, Any]) -> str:
    """Render the page of a method: idea, formula, settings, our picture and figures, the paper's."""
    shown = " ".join(f"`{kind}={option}`" for option in told["options"])
    parts = [f"# {told['title']}\n", shown, told["idea"]]
    if "formula" in told:
        parts += [f"$${told['formula']}$$", f"Source: {told['source']}."]
    parts.append("## What it does to digits\n")
    parts.append(_seen(f"{kind}-{told['options'][0]}", told.get("needs")))
    if published := told.get("published"):
        parts.append(
            f"Published: {published}. Settings differ; [results](../results.md) has ours next to it if it was run."
        )
    if rows := told.get("rows"):
        parts += ["## Compared with the others\n", attacks_table(rows)]
    for kept, title in (("measured", "Measured"), ("tried", "Tried, and left out")):
        if shown_rows := told.get(kept):
            parts += [f"## {title}\n", shown_rows["about"], rows_table(shown_rows["rows"])]
            parts.append(f"```sh\n{shown_rows['command']}\n```")
    parts.append("## Settings\n")
    for option in told["options"]:
        parts += [f"### `{kind}={option}`\n", describe_option(kind, option), settings_of(kind, option)]
    return "\n\n".join(parts) + "\n"


def _seen(name: str, needs: str | None) -> str:
    found = figures().get(name)
    if found is None:
        return f"Not run: it needs {needs}." if needs else "Not run: `make gallery` measures it."
    shown = METRICS["psnr"].digits
    rows = [
        f"| {who} attacker | {shown(of['mean'])} [{', '.join(map(shown, of['ci95'] or ()))}] | {of['recognizable']} of"
        f" {of['n']} |"
        for who, of in found["by"].items()
    ]
    table = "\n".join(["| | PSNR, dB, with 95 % interval | Refiner's count (15 dB or more) |", "|---|---|---|", *rows])
    order = " and ".join(f"by the {who} attacker" for who in found["by"])
    return (
        f"![Originals and their reconstructions](../assets/gallery/{name}.png)\n\nFrom above: the originals, their"
        f" reconstructions {order}.\n\n{table}\n\n```sh\n{found['command']}\n```\n\nSix digits behind an"
        " untrained network and a short attack: an illustration, not a verdict."
    )


def settings_of(kind: str, option: str) -> str:
    """Tabulate the settings of an option: from its file, else from the signature of its target."""
    section = OmegaConf.load(options(kind)[option])
    if not isinstance(section, DictConfig) or "_target_" not in section:
        return "It takes no settings."
    target = locate_target(section, kind)
    given, meanings = plain_settings(section), dict[str, str]()
    for each in reversed(getattr(target, "__mro__", (target,))):  # a class describes what its bases do not
        meanings |= _meanings(inspect.getdoc(each) or "")
    rows = [
        f"| `{kind}.{name}` | `{_value(given.get(name, parameter.default))}` | {meanings.get(name, '')} |"
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows]) if rows else "It takes no settings."


def _value(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "(needed)"
    plain = isinstance(value, str | int | float | bool | list | dict) or value is None
    return (json.dumps(value) if plain else type(value).__name__).replace("|", "\\|")


def _meanings(docstring: str) -> dict[str, str]:
    """Map each parameter to its text in the docstring's section Args, on one line."""
    _, _, args = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in args.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        if start := re.match(r"    (\w[\w, ]*): (.*)", line):
            names = [name.strip() for name in start[1].split(",")]
            found |= dict.fromkeys(names, start[2].strip())
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: text.replace("``", "`").replace("|", "\\|") for name, text in found.items()}


def catalog(group: str) -> str:
    """Tabulate all options of a group, a line each, with links to their pages."""
    pages = {option: name for name, told in methods().get(group, {}).items() for option in told["options"]}
    rows = [
        f"| {f'[`{option}`]({pages[option]}.md)' if option in pages else f'`{option}`'} | {_cell(group, option)} |"
        for option in options(group)
    ]
    return "\n".join([f"| `{group}=` | |", "|---|---|", *rows])


def _cell(group: str, option: str) -> str:
    return escaped(describe_option(group, option))


def metrics_table() -> str:
    """Tabulate all metrics."""
    rows = [
        f"| `{name}` | {metric.title} | {metric.leaks} | {_bound(metric)} | {escaped(metric.description)} |"
        for name, metric in METRICS.items()
    ]
    return "\n".join(["| metric | | leaks where | a paper's bound | |", "|---|---|---|---|---|", *rows])


MADE = {
    "catalog": catalog,
    "metrics": lambda _: metrics_table(),
    "rows": rows_table,
    "audits": audits_table,
    "batches": batches_table,
    "leaderboard": leaderboard,
    "honest": honest_table,
    "trees": trees_table,
    "policy": policy_table,
    "networks": networks_table,
    "leakpro": leakpro_table,
    "map": map_picture,
    "agreement": agreement_table,
    "strongest": red_team_table,
    "texts": texts_table,
    "final": final_table,
}
"""Mark -> what stands in its place."""

MARK = re.compile(rf"<!-- ({'|'.join(MADE)}): ?(\w*) -->")


def _bound(metric: Any) -> str:
    return f"{metric.side} {metric.bound:g} {metric.unit} ({metric.threshold.source})" if metric.threshold else ""


@cache
def formula(tex: str) -> str:
    """Draw a formula as inline SVG in the color of the text, with its source as the label."""
    from matplotlib import mathtext, rc_context  # noqa: PLC0415
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415

    drawn = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "mathtext.fontset": "cm", "svg.hashsalt": tex}):
        mathtext.math_to_image(f"${tex}$", drawn, prop=FontProperties(size=14), format="svg", dpi=72)
    svg = drawn.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, flags=re.DOTALL).replace("\n", " ")
    unique = f"f{hashlib.sha256(tex.encode()).hexdigest()[:8]}-"
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{unique}", svg).replace("#000000", "currentColor")
    label = tex.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<div class="formula" role="img" aria-label="{label}">{svg}</div>'


def _from_root(path: str) -> str:
    """Load a file of the repository, with links to other files replaced by their names."""
    text = (ROOT / path).read_text()
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
