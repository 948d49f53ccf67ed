"""The examples that inference attacks are asked about, and the truth about them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.experiment.experiment import Experiment
from fl_privacy.experiment.partitions import defenders_examples, held_out
from fl_privacy.federation import Client
from fl_privacy.rng import derive_generator, derive_seed
from fl_privacy.types import Batch

PUBLIC = 5000
"""Examples that the attacker holds, of the split without members."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """The examples that attacks are asked about, and the truth about them, which attacks never see.

    Attributes:
        examples: C of them, members first.
        members: how many are members.
        clients: (C,) of whom membership is asked: of a member its owner; of others a client that has members of the
            same class, so that what a client has of each class tells nothing.
        from_test: whether the others are of the test split, since nothing was held out of the training's.
        shares: (N, K) of each class among what each client trains on, by ascending id.
        public: examples that the attacker holds, none of them asked about and no client's; ``None`` if there are none.
        public_attributes: what these are beside their class, where the data say so.
        public_rows: which they are of the split that is not attacked.
    """

    examples: Batch
    members: int
    clients: Tensor
    from_test: bool
    shares: Tensor
    public: Batch | None
    public_attributes: Tensor | None
    public_rows: Tensor

    @property
    def is_member(self) -> Tensor:
        """(C,)"""
        return torch.arange(len(self.examples)) < self.members


def ask(experiment: Experiment, members: int, others: int) -> Asked:
    """Draw ``members`` examples of the clients of ``experiment`` and ``others`` that nobody trains on.

    Raises:
        UserError: there are not so many.
    """
    config, dataset, clients = experiment.config, experiment.dataset, experiment.clients
    rng = derive_generator(config.seed, "inference", "asked")
    own = next(iter(clients.values())).examples
    owners = torch.full((len(own),), -1)
    for id, client in clients.items():
        owners[client.indices] = id
    owned = (owners >= 0).nonzero().flatten()
    chosen = owned[_draw(members, len(owned), "members", "of the clients' examples", rng)]
    from_test = others > 0 and config.holdout == 0
    source = experiment.unattacked if from_test else own
    spare = torch.arange(len(experiment.unattacked))
    if others and not from_test:
        spare = held_out(config.holdout, len(dataset.train), seed=config.seed).nonzero().flatten()
    where = "of the test split" if from_test else "of those that holdout leaves"
    outside = spare[_draw(others, len(spare), "others", where, rng)]
    left = torch.ones(len(experiment.unattacked), dtype=torch.bool)
    left[outside if from_test else slice(0)] = False
    left[defenders_examples(experiment.unattacked) if experiment.defense.informed else slice(0)] = False
    public = left.nonzero().flatten()
    public = public[torch.randperm(len(public), generator=rng)[:PUBLIC]]
    inside, outer, known = own.batch(chosen), source.batch(outside), experiment.unattacked.attributes
    return Asked(
        examples=Batch(torch.cat([inside.inputs, outer.inputs]), torch.cat([inside.labels, outer.labels])),
        members=members,
        clients=torch.cat([owners[chosen], _alike(owners[chosen], inside.labels, outer.labels, rng)]),
        from_test=from_test,
        shares=torch.stack([_shares(client) for _, client in sorted(clients.items())]),
        public=experiment.unattacked.batch(public) if len(public) else None,
        public_attributes=known[public] if known is not None else None,
        public_rows=public,
    )


def _shares(client: Client) -> Tensor:
    counts = client.examples.labels[client.indices].bincount(minlength=client.examples.num_classes)
    return counts / counts.sum()


def _alike(owners: Tensor, labels: Tensor, wanted: Tensor, rng: torch.Generator) -> Tensor:
    """For each class ``wanted`` the owner of a member of that class, of any where no member is."""
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
            f"inference.membership.{name} is expected to be at most {available}, the number {where}, but got {number};"
            f" lower it{'' if name == 'members' else ', or raise holdout'}."
        )
    return torch.randperm(available, generator=rng)[:number]


def expect_attributes(experiment: Experiment) -> None:
    """Refuse to ask for attributes where there are none, or where an update is of several examples.

    Raises:
        UserError: so it is.
    """
    config, client = experiment.config, next(iter(experiment.clients.values()))
    if client.examples.attributes is None:
        raise UserError(
            f"inference=attribute is expected with data that have an attribute beside the class, but"
            f" data={config.choices.data} has none; use data=cifar10_animals or mnist_parity, or load_with_attribute."
        )
    if config.batch_size != 1 or experiment.audit.uploads != "probe":
        raise UserError(
            "inference=attribute is expected with uploads of single examples, but got"
            f" intercept.uploads={experiment.audit.uploads} batch_size={config.batch_size}; set intercept.uploads=probe"
            " batch_size=1."
        )


def rehearsing(experiment: Experiment, asked: Asked) -> Client | None:
    """A client of the attacker's own, which defends the public examples as the others do theirs.

    ``None`` where the attacker does not know the defense, there is none, it exchanges the examples for others, or
    nothing public has an attribute.
    """
    config, defense = experiment.config, experiment.defense
    known = config.threat_model.knows_defense and defense.parts and not defense.examples
    if not known or asked.public_attributes is None or not len(asked.public_rows):
        return None
    client = next(iter(experiment.clients.values()))
    seed = derive_seed(config.seed, "inference", "rehearsal")
    return replace(
        client, examples=experiment.unattacked, indices=asked.public_rows, seed=seed, audit_seed=None, guard=None
    )


def attributes_of(experiment: Experiment) -> Tensor:
    """(V,) of the probed examples; -1 where the defense exchanges a client's examples for others."""
    found = []
    for probe in experiment.audit.probes:
        client = experiment.clients[probe.client]
        known = None if client.defense.examples else client.examples.attributes
        found.append(-1 if known is None else int(known[client.probed_examples(probe.number, 1)]))
    return torch.tensor(found, dtype=torch.int64)
