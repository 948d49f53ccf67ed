"""The inference attacks that a configuration names, and the examples that they are asked about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor

from fl_privacy.config import RunSettings
from fl_privacy.config.targets import instantiate
from fl_privacy.data import Dataset
from fl_privacy.errors import UserError
from fl_privacy.experiment.partitions import held_out
from fl_privacy.federation import Client
from fl_privacy.inference import About, Inference
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

PUBLIC = 5000
"""Examples that the attacker holds, of the split without members."""


def build_inferences(config: RunSettings) -> dict[str, Inference]:
    """The attacks of ``config.inference`` by name; empty for ``inference=none``.

    Raises:
        UserError: one of them is none, or its settings are wrong.
    """
    found = {}
    for name, section in config.inference.items():
        if not isinstance(section, DictConfig) or "_target_" not in section:
            continue
        made = instantiate(section, f"inference.{name!s}")
        if not isinstance(getattr(made, "about", None), About) or not callable(getattr(made, "begin", None)):
            raise UserError(
                f"inference.{name!s}._target_={section._target_} is expected to return an Inference, but got"
                f" {type(made).__name__}."
            )
        found[str(name)] = made
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """The examples that attacks are asked about, and the truth about them, which attacks never see.

    Attributes:
        examples: C of them, members first.
        members: how many are members.
        clients: (C,) of whom membership is asked: of a member its owner; of others a client that has members of the
            same class, so that what a client has of each class tells nothing.
        from_test: whether the others are of the test split, since nothing was held out of the training's.
        public: examples that the attacker holds, none of them asked about and no client's; ``None`` if there are none.
    """

    examples: Batch
    members: int
    clients: Tensor
    from_test: bool
    public: Batch | None

    @property
    def is_member(self) -> Tensor:
        """(C,)"""
        return torch.arange(len(self.examples)) < self.members


def ask(config: RunSettings, dataset: Dataset, clients: Mapping[int, Client], members: int, others: int) -> Asked:
    """Draw ``members`` examples of the ``clients`` and ``others`` that nobody trains on.

    Raises:
        UserError: there are not so many.
    """
    rng = derive_generator(config.seed, "inference", "asked")
    owners = torch.full((len(dataset.train),), -1)
    for id, client in clients.items():
        owners[client.indices] = id
    owned = (owners >= 0).nonzero().flatten()
    chosen = owned[_draw(members, len(owned), "members", "of the clients' examples", rng)]
    from_test = others > 0 and config.holdout == 0
    source = dataset.test if from_test else dataset.train
    spare = torch.arange(len(dataset.test)) if from_test else held_out(config, len(dataset.train)).nonzero().flatten()
    where = "of the test split" if from_test else "of those that holdout leaves"
    outside = spare[_draw(others, len(spare), "others", where, rng)]
    left = torch.ones(len(dataset.test), dtype=torch.bool)
    if from_test:
        left[outside] = False
    public = left.nonzero().flatten()
    public = public[torch.randperm(len(public), generator=rng)[:PUBLIC]]
    inside, outer = dataset.train.batch(chosen), source.batch(outside)
    return Asked(
        examples=Batch(torch.cat([inside.inputs, outer.inputs]), torch.cat([inside.labels, outer.labels])),
        members=members,
        clients=torch.cat([owners[chosen], _alike(owners[chosen], inside.labels, outer.labels, rng)]),
        from_test=from_test,
        public=dataset.test.batch(public) if len(public) else None,
    )


def _alike(owners: Tensor, labels: Tensor, wanted: Tensor, rng: torch.Generator) -> Tensor:
    """For each class ``wanted`` the owner of a member of that class, of any where no member is."""
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


def pool_size(inferences: Sequence[Inference]) -> tuple[int, int]:
    """How many members and others all of them ask about together."""
    members = max((int(getattr(i, "members", 0)) for i in inferences), default=0)
    return members, max((int(getattr(i, "others", 0)) for i in inferences), default=0)
