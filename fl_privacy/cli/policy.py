"""Explain a site's policy, try it on an app, and show its ledger: ``fl-privacy policy``."""

from __future__ import annotations

import datetime
import os
import zipfile
from importlib.resources import files
from typing import Annotated

import typer

from fl_privacy import checks
from fl_privacy.cli.completion import AppPlace, Mirror, NodeConfig, RunConfig
from fl_privacy.errors import UserError, say, visible
from fl_privacy.files.foreign import expanded
from fl_privacy.site.gate import READY

app = typer.Typer(help="A site's policy of what may leave: explain it, try it on an app, show what has left.")

Site = Annotated[str, typer.Argument(metavar="SITE.YAML", help=f"The policy, or one of {', '.join(READY)}.")]

COURSE = (1, 10, 50, 100)  # numbers of replies whose epsilon is printed


@app.command()
def check(site: Site) -> None:
    """Say what a policy leaves open, and explain each rule in one sentence."""
    from fl_privacy.site.gate.policy import read_policy  # noqa: PLC0415  (NumPy: other commands go without)
    from fl_privacy.site.gate.sentences import rules_in_words, warnings_of  # noqa: PLC0415

    policy = read_policy(site)
    for sentence in (*(f"Open: {sentence}" for sentence in warnings_of(policy)), *rules_in_words(policy)):
        say(sentence)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(READY)}.")]) -> None:
    """Print a ready policy to start from: `fl-privacy policy show dp > site.yaml`."""
    checks.one_of("NAME", name, READY)
    say((files("fl_privacy.site.gate") / "policies" / f"{name}.yaml").read_text(encoding="utf-8").rstrip())


@app.command("try")
def try_app(  # noqa: PLR0917
    site: Site,
    place: AppPlace,
    nodes: Annotated[int, typer.Option(help="Clients, each behind the gate.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 3,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    mirror: Mirror = None,
) -> None:
    """Simulate an app without and with the policy's gate; show refused messages, both trainings' metrics, epsilon.

    The app's code runs in this process, as with `flwr run`: trust it as you would then. The site's budget is not spent.
    """
    checks.whole("--nodes", nodes, at_least=1, at_most=1000, example=4)
    checks.whole("--rounds", rounds, at_least=1, at_most=10_000, example=3)
    from fl_privacy.site.gate.policy import read_policy  # noqa: PLC0415

    policy = read_policy(site)
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415
    from fl_privacy.auditing.app.trial import TrialSettings, try_policy  # noqa: PLC0415

    place_of_data = None if mirror is None else expanded(mirror).absolute()
    run, node = tuple(run_config or ()), tuple(node_config or ())
    settings = TrialSettings(nodes=nodes, rounds=rounds, run_config=run, node_config=node, mirror=place_of_data)
    for line in try_policy(policy, read_app(place), settings):
        say(line)
    if policy.noising is None:
        say("Epsilon: infinite from the first reply on, since no noise is on the weights.")
        return
    from fl_privacy.site.gate.sentences import course_of, replies_within  # noqa: PLC0415

    epsilons = ", ".join(f"{course_of(policy, replies):.2f} after {replies}" for replies in COURSE)
    last = replies_within(policy)
    say(f"Epsilon of a site that answers every round: {epsilons}{f'; the budget ends after {last}' if last else ''}.")


@app.command()
def approve(
    site: Site,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Number of the run; without it, list waiting runs.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Approve without asking.")] = False,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse without asking.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Refuse all further messages of an approved run.")] = False,
) -> None:
    """Review a waiting run's bundle without running its code, then approve or refuse the run."""
    from fl_privacy.site.gate.bundles import REVOKED, Approvals  # noqa: PLC0415
    from fl_privacy.site.gate.ledger import Ledger  # noqa: PLC0415
    from fl_privacy.site.gate.policy import read_policy  # noqa: PLC0415

    policy = read_policy(site)
    if (runs := policy.runs) is None:
        raise UserError(f"{site} is expected to have runs, but answers by an installed app alone; add runs to it.")
    if yes + refuse + revoke > 1:
        raise UserError("One of --yes, --refuse and --revoke is expected, but got several; keep one.")
    approvals = Approvals(runs)
    if revoke:
        approvals.decide(run, REVOKED)
        say(f"Run {run} is revoked: no further reply to it leaves.")
        assert policy.budget is not None, "runs are expected with one"
        ledger, anchor = policy.budget.ledger, policy.budget.anchor
        if not os.path.lexists(anchor) or all(entry.run != run for entry in Ledger(ledger, anchor).entries()):
            say("The ledger has no message of it so far: check the number.")
        return
    waiting = approvals.waiting()
    if not run:
        for one in waiting:
            say(f"{one.run}  {one.name} {one.version}  FAB {one.fab}  since {dated(one.since)}")
        say(f"{len(waiting)} runs wait." if len(waiting) != 1 else "1 run waits.")
        return
    if (asked := next((one for one in waiting if one.run == run), None)) is None:
        raise UserError(f"RUN is expected to be a run that waits, but {run[:40]} does not; list them without RUN.")
    from fl_privacy.auditing.app.review import review_app  # noqa: PLC0415  (takes seconds)

    say(f"Run {asked.run} of {asked.name} {asked.version}, waiting since {dated(asked.since)}.")
    signers = ", ".join(asked.signers) or "none of the keys in the policy"
    say(f"SHA-256 of its bundle: {asked.fab}; signed by {signers}.")
    for key, value in sorted(asked.config.items()):
        say(visible(f"  {key} = {value!r}"))
    for text, instead in asked.unmet.items():
        say(visible(f"It needs {text}: {instead}."))
    if not refuse:  # also a bundle that no review can read
        place = approvals.place(run, f"{asked.fab}.fab")
        say(review_app(place).in_words())
        with zipfile.ZipFile(place) as archive:
            names = sorted(archive.namelist())
        unread = [each for each in names if "/." in f"/{each}" or not each.endswith((".py", ".ipynb", "/"))]
        say(visible(f"The review reads none of these files, which can hold code: {', '.join(unread)}."))
    yes = yes or (not refuse and typer.confirm(f"Let run {asked.run} in?"))
    approvals.decide(run, "yes" if yes else "no", asked.token)
    say(f"Run {asked.run} is {'approved' if yes else 'refused'}.")


def dated(when: float) -> str:
    """Format seconds since 1970 as a date and time in UTC."""
    return f"{datetime.datetime.fromtimestamp(min(when, 253_402_300_799.0), datetime.UTC):%Y-%m-%d %H:%M:%S UTC}"


@app.command("show-ledger")
def show_ledger(
    site: Site,
    last: Annotated[int, typer.Option(help="Entries to show.")] = 20,
    mend: Annotated[bool, typer.Option("--mend", help="Repair a cut last line; it counts as one reply.")] = False,
) -> None:
    """Show what has left this site, and how much of the budget is spent.

    A ledger that is missing, has an incomplete line, was changed, or is older than its anchor (a copy of the last
    entry's digest) gives one line and a non-zero status.
    """
    checks.whole("--last", last, at_least=0, example=20)
    from fl_privacy.site.gate.ledger import Ledger  # noqa: PLC0415
    from fl_privacy.site.gate.policy import read_policy  # noqa: PLC0415

    policy = read_policy(site)
    if policy.budget is None:
        raise UserError(f"{site} is expected to have a budget, whose ledger is shown, but has none; add one.")
    if not any(map(os.path.lexists, (policy.budget.ledger, policy.budget.anchor))):
        say(f"There is no ledger {policy.budget.ledger} yet: nothing has left.")
        return
    ledger = Ledger(policy.budget.ledger, policy.budget.anchor)
    if mend and ledger.mend(policy.rho("train")):
        say("The torn line is counted as one reply now.")
    entries, account = ledger.entries(), ledger.account()
    for entry in entries[max(0, len(entries) - last) :]:
        cost = "no noise" if entry.rho is None else f"rho {entry.rho:.4g}"
        said = f"{entry.kind:<10} {entry.outcome:<8} {cost:<12} run {entry.run}  {entry.app}"
        by = entry.approved_by.replace("allow: ", "the policy, allow: ")
        about = {"FAB": entry.fab[:16], "approved by": by, "left:": entry.left}
        more = "".join(f"  {name} {value}" for name, value in about.items() if value)
        say(f"{entry.number:6d}  {dated(entry.when)}  {said}{more}")
    sent = sum(entry.outcome == "sent" for entry in entries)
    say(f"{len(entries)} entries, {sent} replies left, {account.unbounded} of them with weights without noise.")
    if account.open:
        say(f"{len(account.open)} entries have no outcome: at work, or cut off. They count as replies.")
    spent, delta, most = policy.limits.spent(account), f"at delta {policy.budget.delta:g}", policy.budget.epsilon
    say(f"Epsilon spent: {spent:.4g} {f'{delta}; there is no limit' if most is None else f'of {most:g} {delta}'}.")
