"""Verdict on a claim of differential privacy; no test shows that a claim is true."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fl_privacy.dp_check.canaries import CanaryTest
from fl_privacy.dp_check.claims import Claim, Recomputed, Unit
from fl_privacy.dp_check.mechanism import ACCUSATION, MechanismCheck, doubt_in_words, shown_epsilon

TOLERANCE = 1.01  # least ratio of a recomputed epsilon to the claimed one that counts as disagreement

OWNED = {"client": "each client's data", "example": "each single record"}
"""Unit of a claim -> protected data, in words for pages."""


class Status(StrEnum):
    """Result of recomputing and testing a privacy claim."""

    CONTRADICTED = "contradicted"  # a test, or the claim's own figures, show that it is false
    DOUBTED = "doubted"  # a test's lower bound exceeds the claim, without the confidence to call it false
    UNSUPPORTED = "unsupported"  # the claim follows from the stated facts only under an unstated or wrong assumption
    OPEN = "open"  # the claim was tested, and nothing contradicts it
    UNTESTED = "untested"  # no test could have contradicted the claim
    UNCLAIMED = "unclaimed"  # nobody states an epsilon


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """Privacy claim with the evidence for and against it: recomputed epsilon, tests, and notes."""

    subject: str  # name of what makes the claim
    claim: Claim | None
    recomputed: Recomputed | None = None
    check: MechanismCheck | None = None
    canaries: CanaryTest | None = None
    notes: Sequence[str] = ()  # sentences on what the claim does not cover

    @property
    def unit(self) -> Unit:
        if self.claim is not None:
            return self.claim.unit
        return self.canaries.unit if self.canaries is not None else "client"

    @property
    def by_figures(self) -> bool:
        found = self.recomputed
        return self._exceeds and found is not None and not (found.missing or found.caveats)

    @property
    def _exceeds(self) -> bool:
        found = self.recomputed
        if self.claim is None or found is None or found.epsilon is None:
            return False
        # A larger epsilon at a smaller delta does not contradict the claim.
        return found.delta >= self.claim.delta and found.epsilon > self.claim.epsilon * TOLERANCE

    @property
    def grounds(self) -> tuple[str, ...]:
        if self.claim is None:
            return ()
        found = {
            "many draws": self.check is not None and self.check.contradicted,
            "its own figures": self.by_figures,
            "canaries": self.canaries is not None and self.canaries.contradicts(self.claim),
        }
        return tuple(name for name, contradicts in found.items() if contradicts)

    @property
    def status(self) -> Status:
        if self.claim is None:
            return Status.UNCLAIMED
        if self.grounds:
            return Status.CONTRADICTED
        if self._doubts:
            return Status.DOUBTED
        if self._exceeds:
            return Status.UNSUPPORTED
        showable = [] if self.canaries is None else [self.canaries.showable]
        if self.check is not None:
            showable.append(self.check.noticed if self.check.noticed is not None else self.check.showable)
        return Status.OPEN if any(most > self.claim.epsilon for most in showable) else Status.UNTESTED

    @property
    def lower_bound(self) -> float | None:
        found = [each.lower_bound for each in (self.check, self.canaries) if each is not None]
        return max(found) if found else None

    @property
    def reason(self) -> str:
        if self.check is not None and self.check.reason:
            return self.check.reason
        if self.by_figures and self.recomputed is not None and self.recomputed.epsilon is not None:
            spent = f"the noise that is stated spends {shown_epsilon(self.recomputed.epsilon)} by two accountants"
            return "there is no noise" if math.isinf(self.recomputed.epsilon) else spent
        return ""

    @property
    def headline(self) -> str:
        owned = OWNED[self.unit]
        return {
            Status.CONTRADICTED: f"The promised protection of {owned} does not hold",
            Status.DOUBTED: f"A test speaks against the promised protection of {owned}, but not surely enough to"
            " call it false",
            Status.UNSUPPORTED: f"The promised protection of {owned} rests on something that nobody states or that does"
            " not hold",
            Status.OPEN: f"No test contradicts the promised protection of {owned}; that does not prove it",
            Status.UNTESTED: f"The promised protection of {owned} was not put to a test that could fail it",
            Status.UNCLAIMED: f"No protection of {owned} is promised in numbers",
        }[self.status]

    @property
    def sentence(self) -> str:
        said = [f"claimed {self.claim.in_words()}" if self.claim else "no epsilon is claimed"]
        if self.recomputed is not None:
            spent = self.recomputed.epsilon
            counted = f"recomputed {shown_epsilon(spent or 0.0)} ({self.recomputed.sampling})"
            said.append("not recomputed, since a fact is missing" if spent is None else counted)
        if self.check is not None:
            bare = self.check.contradicted and bool(self.check.bare)
            least = "nothing bounds it" if bare else f"at least {shown_epsilon(self.check.lower_bound)}"
            said.append(f"{least} by {self.check.draws:,} draws ({self.check.power})")
            if not bare and self.check.estimate is not None:
                said.append(f"about {shown_epsilon(self.check.estimate)} by an estimate from the draws' means")
        if self.canaries is not None:
            said.append(self.canaries.in_words)
        return f"{'; '.join(said)}: {self._conclusion}."

    @property
    def _conclusion(self) -> str:
        if self.status is Status.CONTRADICTED:
            because = f", because {self.reason}" if self.reason else ""
            return f"the claim is false by {' and '.join(self.grounds)}{because}"
        if self._doubts is not None and self.status is Status.DOUBTED:
            sure, more = self._doubts
            return f"{doubt_in_words(sure)}; {more}"
        small = "nothing contradicts the claim, and so small a test could not have"
        return {
            Status.UNSUPPORTED: "the claim does not follow from what is stated",
            Status.OPEN: "nothing contradicts the claim",
            Status.UNTESTED: "the claim was not tested" if self.lower_bound is None else small,
        }.get(self.status, "there is nothing to check")

    @property
    def _doubts(self) -> tuple[float, str] | None:
        if self.check is not None and self.check.doubted:
            return self.check.confidence, f"repeat with --draws {4 * self.check.draws}"
        if self.claim is not None and self.canaries is not None and self.canaries.exceeds(self.claim):
            by_estimate = "" if self.canaries.bound > self.claim.epsilon else ", since no estimate decides alone"
            return self.canaries.confidence, f"repeat with more canaries{by_estimate}"
        return None

    @property
    def meaning(self) -> str:
        lower = self.lower_bound
        if self.status is Status.CONTRADICTED:
            sure = f" An honest mechanism is accused in at most {100 * (1 - ACCUSATION):.1g} % of tests."
            by_test = self.check is not None and self.check.contradicted
            because = self.reason or "what was observed is more than it allows"
            return f"Do not rely on the stated level: {because}.{sure if by_test else ''}"
        if self._doubts is not None and self.status is Status.DOUBTED:
            confidence, more = self._doubts
            return f"At most one honest mechanism in {1 / (1 - confidence):.3g} looks like this. To decide, {more}."
        if self.status is Status.UNSUPPORTED:
            return "Ask for the missing facts, or count on the larger, recomputed number."
        if self.status is Status.OPEN and lower is not None:
            seen = f"an epsilon of at least {shown_epsilon(lower)}" if lower > 0 else "nothing about epsilon"
            return f"The tests show {seen}; the true one may be larger. What they could notice is said below."
        return "This does not mean that it is safe."

    def as_plain(self) -> dict[str, Any]:
        claim, found, check, canaries = self.claim, self.recomputed, self.check, self.canaries
        return {
            "subject": self.subject,
            "status": str(self.status),
            "headline": self.headline,
            "sentence": self.sentence,
            "meaning": self.meaning,
            "reason": self.reason,
            "claimed": claim and claim.epsilon,
            "delta": claim and claim.delta,
            "unit": self.unit,
            "neighbors": claim.neighbors if claim else None,
            "rounds": claim.rounds if claim else None,
            "rdp": found and found.rdp,
            "pld": found and found.pld,
            "lower": self.lower_bound,
            "confidence": check.confidence if check else canaries.confidence if canaries else None,
            "noticed": check.noticed if check else canaries.showable if canaries else None,
            "estimate": canaries.estimate if canaries else None,
            "estimate_least": canaries.estimate_least if canaries else None,
            "missing": list(found.missing) if found else [],
            "notes": [*(found.caveats if found else ()), *self.notes],
        }
