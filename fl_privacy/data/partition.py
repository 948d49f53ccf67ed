"""Partitions of examples among clients: frozen callables (examples, num_clients, seed) -> one index tensor per client.

Indices (N_i,) are int64 and sorted; no example has two owners and every client has at least one.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_privacy.checks import number, whole
from fl_privacy.checks.packages import loaded_when_used
from fl_privacy.data.examples import LabelledExamples
from fl_privacy.data.sources import require
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator, derive_seed


class Partition(Protocol):
    """Rule that divides examples among clients; the same seed gives the same shares."""

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        """Return the sorted indices (N_i,) of each client's examples."""
        ...


@dataclass(frozen=True)
class Iid:
    """Every client gets an equal random share of the examples; numbers differ by at most one."""

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients)
        return [part.sort().values for part in _shuffled(len(examples), seed).tensor_split(num_clients)]


@dataclass(frozen=True)
class EvenClasses:
    """Every client gets equally many examples of each class, or one more (SPN, Fan et al. 2020, Appendix C)."""

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients)
        order = _shuffled(len(examples), seed)
        by_class = order[examples.labels[order].argsort(stable=True)]
        return [by_class[client::num_clients].sort().values for client in range(num_clients)]


@dataclass(frozen=True, kw_only=True)
class ClassShares:
    """Each client's class shares are drawn from a Dirichlet distribution (Hsu et al., 2019).

    All clients have equally many examples (Refiner, Appendix D). Later clients get nothing of a class that has run out.
    The concentration ``alpha`` is above 0; small is skewed, large is nearly IID.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        number("partition.alpha", self.alpha, above=0, example=1.0)

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients)
        order = _shuffled(len(examples), seed)
        decks = [order[examples.labels[order] == label] for label in range(examples.num_classes)]
        rng = np.random.default_rng(derive_seed(seed, "class shares"))
        left = np.array([len(deck) for deck in decks])
        parts = []
        for client in range(num_clients):
            shares = rng.dirichlet(np.full(len(decks), float(self.alpha)))
            taken = _drawn(shares, (len(examples) + num_clients - 1 - client) // num_clients, left, rng)
            parts.append([deck[at - n : at] for deck, at, n in zip(decks, left, taken, strict=True)])
            left = left - taken
        return [torch.cat(part).sort().values for part in parts]


def _drawn(shares: "np.ndarray[Any, Any]", quota: int, left: "np.ndarray[Any, Any]", rng: np.random.Generator) -> Any:
    """Draw ``quota`` examples with class probabilities ``shares`` (K,); return counts (K,), at most ``left`` (K,)."""
    taken = np.zeros_like(left)
    while missing := quota - int(taken.sum()):
        open_ = np.where(left > taken, shares, 0.0)
        if not open_.sum() > 0:  # this client's shares of the remaining classes are zero
            open_ = (left - taken).astype(float)
        taken += np.minimum(rng.multinomial(missing, open_ / open_.sum()), left - taken)
    return taken


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Each class is divided in proportions drawn from a symmetric Dirichlet distribution (Yurochkin et al., 2019).

    Attributes:
        alpha: concentration, above 0; small is skewed (0.1: one to three classes a client), large is nearly IID (100).
        min_examples: smallest number of examples of a client; up to ten draws are made to reach it.
        self_balancing: ``True`` stops giving examples to a client once it has an equal share, which distorts ``alpha``.
    """

    alpha: float = 0.5
    min_examples: int = 1
    self_balancing: bool = False

    def __post_init__(self) -> None:
        number("partition.alpha", self.alpha, above=0, example=0.5)
        whole("partition.min_examples", self.min_examples, at_least=1, example=1)

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients, self.min_examples)
        order = _shuffled(len(examples), seed)
        sizes = {"min_partition_size": self.min_examples, "self_balancing": self.self_balancing}
        drawn = {"alpha": float(self.alpha), "seed": derive_seed(seed, "dirichlet")}
        partitioner = _partitioners().DirichletPartitioner(num_clients, partition_by="label", **sizes, **drawn)
        try:
            return _indices(partitioner, {"index": order, "label": examples.labels[order]})
        except ValueError as error:
            raise UserError(
                f"Each of {num_clients} clients is expected to get {self.min_examples} of {len(examples)} examples,"
                f" but none of ten draws did with partition.alpha={self.alpha}; raise it or take fewer clients."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Pathological:
    """Every client has examples of exactly ``classes_per_client`` classes (after McMahan et al., 2017)."""

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        whole("partition.classes_per_client", self.classes_per_client, at_least=1, example=2)

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients)
        k, slots = self.classes_per_client, num_clients * self.classes_per_client
        present = examples.labels.unique()
        if not k <= len(present) <= slots:
            raise UserError(
                f"{num_clients} clients with {k} classes each are expected to have all {len(present)} classes between"
                f" them, but {'there are not so many' if k > len(present) else f'can hold only {slots}'};"
                f" set partition.classes_per_client between {-(-len(present) // num_clients)} and {len(present)}."
            )
        order = _shuffled(len(examples), seed)
        deal = torch.empty(examples.num_classes, dtype=torch.long)
        deal[present] = torch.randperm(len(present), generator=derive_generator(seed, "classes"))
        how = {"num_classes_per_partition": 1, "class_assignment_mode": "deterministic"}
        drawn = derive_seed(seed, "pathological")
        partitioner = _partitioners().PathologicalPartitioner(slots, partition_by="label", seed=drawn, **how)
        try:
            decks = _indices(partitioner, {"index": order, "label": deal[examples.labels[order]]})
        except ValueError as error:
            raise UserError(
                f"Every class is expected to have an example for each of its clients, but some have too few for"
                f" {num_clients} clients with {k} classes each; take fewer clients."
            ) from error
        return [torch.cat(decks[i : i + k]).sort().values for i in range(0, slots, k)]


@dataclass(frozen=True)
class Natural:
    """Each client is a person, writer or device, with all of its examples (``data.group_column``).

    With fewer clients than groups, groups are dealt at random, about equally many to each client.
    """

    def __call__(self, examples: LabelledExamples, *, num_clients: int, seed: int) -> list[Tensor]:
        _check_clients(examples, num_clients)
        if examples.groups is None:
            raise UserError(
                "partition=natural is expected to know whose each example is, but the data do not say;"
                " set data.group_column to a column of ids, or take partition=iid."
            )
        columns = {"index": torch.arange(len(examples)), "group": examples.groups}
        groups = _indices(_partitioners().NaturalIdPartitioner(partition_by="group"), columns)
        if num_clients > len(groups):
            raise UserError(
                f"partition=natural is expected to have at most a client for each of {len(groups)} groups,"
                f" but got {num_clients} clients; set federation.clients={len(groups)}."
            )
        order = torch.randperm(len(groups), generator=derive_generator(seed, "groups")).tolist()
        return [torch.cat([groups[g] for g in order[i::num_clients]]).sort().values for i in range(num_clients)]


def partition_table(examples: LabelledExamples, parts: Sequence[Tensor]) -> Tensor:
    """Count each client's examples by class: (clients, K) int64; ``parts``: indices (N_i,) of each client."""
    return torch.stack([examples.labels[part].bincount(minlength=len(examples.class_names)) for part in parts])


def _check_clients(examples: LabelledExamples, num_clients: int, each: int = 1) -> None:
    whole("federation.clients", num_clients, at_least=1, example=10)
    if num_clients * each > len(examples):
        raise UserError(
            f"{num_clients} clients are expected to get at least {each} examples each, but there are only"
            f" {len(examples)}; set federation.clients={max(1, len(examples) // each)} or lower."
        )


def _partitioners() -> Any:
    loaded_when_used("seaborn")  # by its plots
    return require("flwr_datasets.partitioner")


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=derive_generator(seed, "shuffle"))


def _indices(partitioner: Any, columns: Mapping[str, Tensor]) -> list[Tensor]:
    table = {name: column.numpy() for name, column in columns.items()}
    partitioner.dataset = require("datasets").Dataset.from_dict(table)
    # Its progress bars and warnings of repeated draws are noise; a failed division raises.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        parts = [partitioner.load_partition(i).with_format("torch") for i in range(partitioner.num_partitions)]
    return [part[:]["index"].sort().values for part in parts]
