"""Draw the examples for inference attacks, and compare answers with the truth."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_privacy.attacks.inference import About, Inference
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.measure import FEW, aggregate, roc
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.runs.another_site import SUMMED
from fl_privacy.runs.build import NO_ATTRIBUTE, defenders_examples, held_out
from fl_privacy.runs.folder import Finding, Measure
from fl_privacy.runs.ground_truth import as_wide
from fl_privacy.runs.setup import Setup
from fl_privacy.types import Batch

PUBLIC = 5000  # most examples that the attacker holds, from the split without members


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceQuestions:
    """Examples that inference attacks are asked about, and the true answers, which attacks never see.

    ``clients``: (C,) client that each membership question is about: a member's owner; for a non-member, a client with
    members of the same class, so that class counts reveal nothing.
    """

    examples: Batch  # C examples, members first
    members: int  # number of members
    clients: Tensor
    from_test: bool  # ``True`` if non-members come from the test split
    shares: Tensor  # (N, K) share of each class in each client's training data, by ascending id
    public: Batch | None  # attacker's examples, neither queried nor a client's; ``None`` without any
    public_attributes: Tensor | None  # attributes of the public examples, if known
    public_rows: Tensor  # indices of the public examples in the split that is not attacked


def ask(setup: Setup, inferences: Mapping[str, Inference]) -> InferenceQuestions:
    """Draw as many members and non-members as the most demanding of ``inferences`` needs; ``UserError`` for too few."""
    asked = {
        kind: [(int(getattr(i, kind, 0)), name) for name, i in inferences.items()] for kind in ("members", "others")
    }
    (members, by), (others, of) = (max(each, key=lambda pair: pair[0]) for each in asked.values())
    config, dataset, clients = setup.config, setup.dataset, setup.clients
    rng = derive_generator(config.seed, "inference", "asked")
    own = setup.first.examples
    owners = torch.full((len(own),), -1)
    groups: dict[int, list[Client]] = {}
    for id, client in sorted(clients.items()):
        if id not in config.sites:  # a site sees the others as one
            groups.setdefault(SUMMED if config.sites else id, []).append(client)
            owners[client.indices] = SUMMED if config.sites else id
    owned = (owners >= 0).nonzero().flatten()
    chosen = owned[_draw(members, len(owned), f"{by}.members", "of the clients' examples", rng)]
    from_test = others > 0 and config.holdout == 0
    source = setup.unattacked if from_test else own
    spare = torch.arange(len(setup.unattacked))
    if others and not from_test:
        spare = held_out(config.holdout, len(dataset.train), seed=config.seed).nonzero().flatten()
    where = "of the test split" if from_test else "of those that holdout leaves"
    outside = spare[_draw(others, len(spare), f"{of}.others", where, rng)]
    left = torch.ones(len(setup.unattacked), dtype=torch.bool)
    left[outside if from_test else slice(0)] = False
    left[defenders_examples(setup.unattacked) if setup.defense.informed else slice(0)] = False
    public = left.nonzero().flatten()
    public = public[torch.randperm(len(public), generator=rng)[:PUBLIC]]
    parts, known = [own.batch(chosen), source.batch(outside)], setup.unattacked.attributes
    inside, outer, *rest = as_wide([*parts, setup.unattacked.batch(public)] if len(public) else parts)
    alike = _alike(owners[chosen], own.labels[chosen], source.labels[outside], rng)
    counted = [torch.cat([own.labels[client.indices] for client in group]) for group in groups.values()]
    classes = [labels.bincount(minlength=own.num_classes) for labels in counted]
    return InferenceQuestions(
        examples=Batch(torch.cat([inside.inputs, outer.inputs]), torch.cat([inside.labels, outer.labels])),
        members=members,
        clients=torch.cat([owners[chosen], alike]),
        from_test=from_test,
        shares=torch.stack([counts / counts.sum() for counts in classes]),
        public=rest[0] if rest else None,
        public_attributes=known[public] if known is not None else None,
        public_rows=public,
    )


def _alike(owners: Tensor, labels: Tensor, wanted: Tensor, rng: torch.Generator) -> Tensor:
    if not len(wanted):
        return wanted
    found = owners[torch.randint(len(owners), (len(wanted),), generator=rng)]
    for label in wanted.unique().tolist():
        own, asked = owners[labels == label], wanted == label
        if len(own):
            found[asked] = own[torch.randint(len(own), (int(asked.sum()),), generator=rng)]
    return found


def _draw(number: int, available: int, name: str, where: str, rng: torch.Generator) -> Tensor:
    if number > available:
        raise UserError(
            f"inference.{name} is expected to be at most {available}, the number {where}, but got {number};"
            f" lower it{'' if name.endswith('members') else ', or raise holdout'}."
        )
    return torch.randperm(available, generator=rng)[:number]


def expect_attributes(setup: Setup) -> None:
    """Raise ``UserError`` unless the data have an attribute and each update is of one example."""
    config, client = setup.config, setup.first
    if client.examples.attributes is None:
        raise UserError(NO_ATTRIBUTE.format("inference=attribute", f"data={config.choices['data']}"))
    if config.batch_size != 1 or setup.audit.uploads != "probe":
        raise UserError(
            "inference=attribute is expected with uploads of single examples, but got"
            f" intercept.uploads={setup.audit.uploads} batch_size={config.batch_size}; set intercept.uploads=probe"
            " batch_size=1."
        )


def rehearsing(setup: Setup, asked: InferenceQuestions) -> Client | None:
    """Build a simulated client with which the attacker tries the clients' defense on public examples.

    ``None`` if the attacker knows no defense, the defense replaces examples, or no attributes of public examples are
    known. ``asked``: the inferences to run and their public examples.
    """
    config, defense = setup.config, setup.defense
    known = config.threat_model.knows_defense and defense.parts and not defense.examples
    if not known or asked.public_attributes is None or not len(asked.public_rows):
        return None
    seed = derive_seed(config.seed, "inference", "rehearsal")
    own: dict[str, Any] = {"examples": setup.unattacked, "indices": asked.public_rows, "seed": seed}
    return replace(setup.first, audit_seed=None, guard=None, **own)


def attributes_of(setup: Setup) -> Tensor:
    """Return each attacked example's sensitive attribute (V,); -1 if unknown, or if a defense replaces examples."""
    found = []
    for probe in setup.audit.probes:
        client = setup.clients[probe.client]
        known = None if client.defense.examples else client.examples.attributes
        found.append(-1 if known is None else int(known[client.probed_examples(probe.number, 1)]))
    return torch.tensor(found, dtype=torch.int64)


TPR_AT = {"tpr_at_0.1_percent": 0.001, "tpr_at_1_percent": 0.01}  # measure -> FPR

FROM_TEST = (
    "Non-members come from the test split: differences between the splits count as membership (holdout=N takes them"
    " from the same split)."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceJudge:
    """Compares the answers of inference attacks with the truth."""

    setup: Setup
    asked: InferenceQuestions
    attributes: Tensor  # (V,) attributes of the victims, -1 if not known
    epsilon: float | None  # largest epsilon of a client by the last observed round; ``None`` without guarantee

    @property
    def _columns(self) -> Tensor:
        return torch.searchsorted(torch.tensor(sorted(self.setup.clients)), self.asked.clients)

    def findings(
        self, about: About, answers: Mapping[str, Tensor], titles: Mapping[str, tuple[str, str]]
    ) -> list[Finding]:
        judges = {
            About.MEMBERSHIP: self._membership,
            About.SOURCE: self._source,
            About.ATTRIBUTE: self._attribute,
            About.PROPERTY: self._property,
        }
        return [
            judges[about](answer, Finding(about=about, method=name, title=titles[name][0], source=titles[name][1]))
            for name, answer in answers.items()
        ]

    def _membership(self, scores: Tensor, finding: Finding) -> Finding:
        own, seed = scores[torch.arange(len(scores)), self._columns].double(), self.setup.config.seed
        answered = own.isfinite()
        member = torch.arange(len(own)) < self.asked.members
        found = roc.Separation(
            positives=own[answered & member].numpy(), negatives=own[answered & ~member].numpy(), seed=seed
        )
        if min(len(found.positives), len(found.negatives)) < 2:
            return replace(finding, failure="there is too little evidence, as of too few clients or rounds")
        left_out = int((~answered).sum())
        notes = [FROM_TEST] * self.asked.from_test
        notes += [f"{left_out} examples of clients whose uploads were never intercepted are left out."] * bool(left_out)
        (fpr, tpr), delta = roc.thinned_curve(found), self.setup.config.privacy.delta
        return replace(
            finding,
            positives=len(found.positives),
            negatives=len(found.negatives),
            measures=self._measures(found),
            fpr=fpr,
            tpr=tpr,
            epsilon=self.epsilon,
            delta=delta,
            proven_epsilon=roc.proven_epsilon(found, delta=0.0 if self.epsilon is None else delta),
            notes=notes,
        )

    def _source(self, scores: Tensor, finding: Finding) -> Finding:
        owners = self._columns[: self.asked.members]
        own = scores[: len(owners)]
        answered = own.isfinite().any(1)
        own, owners = own[answered].nan_to_num(nan=-math.inf), owners[answered]
        if not len(own):
            return replace(finding, failure="no client's upload was intercepted")
        return replace(finding, positives=len(owners), measures={"asr": _success(own.argmax(1), owners)})

    def _attribute(self, scores: Tensor, finding: Finding) -> Finding:
        answered = scores.isfinite().all(1) & (self.attributes >= 0)
        guessed, true = scores[answered].argmax(1), self.attributes[answered]
        if not len(true):
            return replace(finding, failure="no victim with a known attribute was intercepted")
        return replace(finding, positives=len(true), measures={"asr": _success(guessed, true)})

    def _property(self, guessed: Tensor, finding: Finding) -> Finding:
        answered = guessed.isfinite().all(1)
        guessed, shares = guessed[answered].double(), self.asked.shares[answered].double()
        if len(guessed) < 2:
            return replace(finding, failure="uploads of fewer than two clients were intercepted")
        errors = (guessed - shares).abs().mean(1).tolist()
        by_mean = float((self.asked.shares.double().mean(0) - shares).abs().mean())
        found = aggregate(errors, within=(0.0, 1.0))
        assert found is not None
        low, high = found.ci95 or (0.0, 1.0)
        measures = {"error": Measure(value=found.mean, low=low, high=high, chance=by_mean)}
        deviations = shares - shares.mean(0)
        if deviations.abs().max() > 0 and len(guessed) >= FEW:
            estimate = roc.correlation(
                (guessed - guessed.mean(0)).numpy(), deviations.numpy(), seed=self.setup.config.seed
            )
            measures["correlation"] = Measure(**vars(estimate))
        measures["asr"] = _success(guessed.argmax(1), shares.argmax(1))
        return replace(finding, positives=len(guessed), measures=measures)

    def _measures(self, found: roc.Separation) -> dict[str, Measure]:
        budget = {"epsilon": self.epsilon or 0.0, "delta": self.setup.config.privacy.delta}
        bounded = self.epsilon is not None and math.isfinite(self.epsilon)
        of_rate = {
            name: (estimate, float(roc.tpr_bound(np.array([rate]), **budget)[0]))
            for name, rate in TPR_AT.items()
            if (estimate := roc.tpr_at(found, rate)) is not None
        }
        whole = {
            "auc": (roc.auc(found), roc.auc_bound(**budget)),
            "balanced_accuracy": (roc.balanced_accuracy(found), roc.balanced_accuracy_bound(**budget)),
        }
        measures = {n: Measure(**vars(e), bound=b if bounded else None) for n, (e, b) in (of_rate | whole).items()}
        return {**measures, "asr": Measure(**vars(roc.threshold_success(found)))}


def _success(guessed: Tensor, true: Tensor) -> Measure:
    majority = float(true.bincount().max()) / len(true)
    return Measure(**vars(roc.answer_success(int((guessed == true).sum()), len(true), majority=majority)))
