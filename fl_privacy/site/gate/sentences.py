"""Descriptions of a policy's rules and gaps in sentences."""

import math
from collections.abc import Iterable, Iterator

from fl_privacy.site.gate.bundles import APPROVE, Runs
from fl_privacy.site.gate.entries import epsilon_of, most_rho
from fl_privacy.site.gate.policy import LOAD_SECONDS, MIB, MOST_CELLS, AppLimits, Reply, SitePolicy

LARGE_BITS = 128  # bits of a reply above which a warning is given: a person's record fits into them
UNITS = {
    "client": "the site's update of a round from no update",
    "any_data": "any two data sets that the site could hold",
}


def rules_in_words(policy: SitePolicy) -> list[str]:
    """Return sentences that describe each rule of ``policy``."""
    dropped = "Anything else is removed from a reply; other arrays than the received ones are refused."
    reason = "one line with the reason, without names and values of the app."
    every = f"Replies leave {policy.every_seconds:g} s after their message, or a multiple of that time."
    return [
        *_received(policy),
        *(sentence for kind, reply in sorted(policy.sends.items()) for sentence in _sent(policy, kind, reply)),
        f"Messages of any other kind than {_listed(sorted(policy.sends)) or 'none'} are not answered.",
        dropped if policy.drops else "A reply with anything else is refused as a whole.",
        f"About each refusal the coordinator gets {'the same line.' if policy.bare else reason}",
        *_protected(policy),
        *_counted(policy),
        *(_runs(policy.runs) if policy.runs else ()),
        *_app(policy.app),
        *([every] if policy.every_seconds else []),
    ]


def warnings_of(policy: SitePolicy) -> list[str]:
    """Return a sentence on each way in which ``policy`` lets data out."""
    found = []
    if policy.noising is None and any(reply.arrays for reply in policy.sends.values()):
        found.append(
            "Nothing bounds what the weights carry: an app can write examples into them. Only noise bounds that."
        )
    for kind, reply in sorted(policy.sends.items()):
        if reply.bits >= LARGE_BITS:
            free = {key for values in (reply.metrics, reply.config) for key, one in values.rules.items() if one.bits}
            into = f"{math.ceil(reply.bits / 8)} bytes of {_listed(sorted(free))}"
            found.append(f"An app can write examples into {into} in reply to {kind}; nothing bounds that.")
    if policy.noising is not None and (kinds := [kind for kind, reply in policy.sends.items() if reply.bits > 2]):
        found.append(f"Epsilon does not cover the numbers that leave next to the weights for {_listed(sorted(kinds))}.")
    if not policy.every_seconds:
        found.append(
            "The time of a reply shows how long the app took, by which an app can send data; every_seconds limits that."
        )
    if policy.rounds_per_day is None:
        found.append("Nothing limits how many messages are answered in a day.")
    if policy.budget is None:
        found.append("Nothing counts what has left; a budget with a ledger would.")
    if not policy.app.required:
        found.append("If the kernel can't take network or files away from the app, the app still runs.")
    if policy.runs and any("app" in one for one in policy.runs.allow):
        found.append("A bundle states its name and version itself: anybody who may start runs can use an allowed name.")
    if policy.runs and policy.runs.install != "never":
        found.append("The site's package index chooses code that runs with the app, isolated like it.")
    if texts := [key for key, rule in policy.receives.config.rules.items() if rule.most_letters is not None]:
        found.append(f"By the texts of {_listed(texts)}, a coordinator can direct an approved app.")
    if policy.receives.run_config is None:
        found.append("The app is given all of the run's configuration, texts too.")
    return found


def _received(policy: SitePolicy) -> Iterator[str]:
    receives = policy.receives
    arrays = _listed(receives.arrays)
    yield f"The app is given these records of arrays: {arrays}." if arrays else "The app is given no arrays."
    if receives.config.rules:
        alike: dict[str, list[str]] = {}
        for key, rule in receives.config.rules.items():
            alike.setdefault(rule.in_words(), []).append("each other one" if key == "*" else key)
        settings = "; ".join(f"{_listed(keys)} {words}" for words, keys in alike.items())
        yield f"The app is given these settings of a message: {settings}."
    else:
        yield "The app is given no settings of a message."
    if receives.run_config is None:
        yield "The app is given the run's whole configuration."
    else:
        yield f"The app is given these keys of the run's configuration: {_listed(receives.run_config) or 'nothing'}."
    yield "A message with anything else, or a number that is not finite, is refused."
    if receives.guard:
        yield "A model is refused if its weights look crafted, or are far from the run's last accepted ones."
    yield f"A message of more than {receives.most_bytes // MIB} MiB is refused."


def _sent(policy: SitePolicy, kind: str, reply: Reply) -> Iterator[str]:
    if reply.arrays is not None and (held := reply.arrays.lists) is not None:
        lists = _listed(f"{key} of at most {' x '.join(map(str, most))} values" for key, most in held.items())
        types = _listed(reply.arrays.dtypes)
        yield f"In reply to {kind}, lists of the app's choice leave: {lists or 'none'}; finite, of {types}."
    elif reply.arrays is not None:
        named = f" in the record {reply.arrays.record}" if reply.arrays.record else ""
        counters = "as received" if reply.arrays.counters == "received" else "as the app sets them"
        yield (
            f"In reply to {kind}, the received arrays leave with the app's values{named}: all of them, with the same"
            f" names and shapes, finite, of {_listed(reply.arrays.dtypes)}; whole numbers leave {counters}."
        )
    else:
        yield f"In reply to {kind}, no arrays leave."
    for values in (reply.metrics, reply.config):
        for key, rule in values.rules.items():
            yield f"In reply to {kind}, {key} leaves {rule.in_words()}."
    yield f"Apart from arrays, an app can choose at most {math.ceil(reply.bits)} bits of a reply to {kind}."


def _protected(policy: SitePolicy) -> Iterator[str]:
    protect = policy.protect
    if protect is None:
        yield "Weights leave as the app sends them, without noise."
    elif protect.noising is None:
        yield f"The defense {protect.defense} acts on the change of the weights before it leaves."
    else:
        noising = protect.noising
        yield f"The change of the weights is clipped to a norm of {noising.clip_norm:g} over all arrays."
        yield (
            f"Discrete Gaussian noise of standard deviation {noising.clip_norm * noising.noise_multiplier:g} is added"
            f" to each value of it, on a grid of {noising.step:.3g}."
        )
        yield f"Epsilon bounds how well anybody can distinguish {UNITS[protect.unit]}."


def _counted(policy: SitePolicy) -> Iterator[str]:
    if policy.budget is not None:
        yield f"Each message of any app and run is entered into {policy.budget.ledger} before the app gets it."
        if policy.budget.epsilon is not None and (replies := replies_within(policy)):
            yield (
                f"Nothing leaves beyond an epsilon of {policy.budget.epsilon:g} at delta {policy.budget.delta:g}: that"
                f" is {replies} replies with weights."
            )
    if policy.rounds_per_day is not None:
        yield f"At most {policy.rounds_per_day} messages of each kind are answered in 24 hours."


def replies_within(policy: SitePolicy) -> int:
    """Return how many replies with weights fit in the privacy budget; 0 if the policy has no noise or no epsilon."""
    limits = policy.limits
    if limits.epsilon is None or policy.noising is None:
        return 0
    return int(most_rho(limits.epsilon, limits.delta) / (limits.factor * policy.noising.rho) * (1 + 1e-9))


def course_of(policy: SitePolicy, replies: int) -> float:
    """Return epsilon after ``replies`` replies with model weights: infinite without noise, 0 for no reply."""
    if policy.noising is None:
        return math.inf if replies else 0.0
    return epsilon_of(replies * policy.limits.factor * policy.noising.rho, policy.limits.delta)


def _runs(runs: Runs) -> Iterator[str]:
    words = {"fab": "of FAB {fab}", "key": "signed by {key}", "app": "that say they are {app} {version}"}
    allowed = [words[min(one)].format(**one) for one in runs.allow]
    yield f"Runs bring their app; allowed are bundles {_listed(allowed)}." if allowed else "Runs bring their app."
    each = not allowed and runs.approve == "each run"
    yield "Each run waits until `fl-privacy policy approve` says yes or no." if each else APPROVE[runs.approve]
    if runs.approve != "never":
        yield f"A run that waits for more than {runs.wait_seconds:g} s is refused."
    versions = " in any version" if runs.versions == "any" else ""
    missing = "are refused, with their names" if runs.install == "never" else "get them from the site's package index"
    yield f"Apps that need packages that are not installed{versions} {missing}."
    yield "Each message finds a new process of the app; what it writes to the places that it reads is lost with it."
    yield f"Up to {MOST_CELLS} apps work at once, each with its own time, memory and processes."


def _app(limits: AppLimits) -> Iterator[str]:
    where = "else the gate does not start" if limits.required else "if the kernel can do that"
    yield f"The app runs in a process of its own, without network ({where})."
    yield (
        f"Apart from Python and installed packages the app reads {_listed(map(str, limits.reads)) or 'nothing'} and"
        f" writes {_listed(map(str, limits.writes)) or 'nothing but a temporary folder'}."
    )
    yield (
        f"The app has {LOAD_SECONDS:g} s to start and {limits.seconds:g} s for a message,"
        f" {limits.most_bytes // MIB} MiB of memory and {limits.most_processes} processes in all; without the kernel's"
        " namespaces, each process has that memory."
    )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else ""
