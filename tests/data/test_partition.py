"""Properties of every partition, and what makes each of them different."""

import pytest
import torch

from fl_privacy.data import ClassShares, Dirichlet, EvenClasses, Iid, Natural, Pathological, partition_table
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator

datasets = pytest.importorskip("datasets")
IidPartitioner = pytest.importorskip("flwr_datasets.partitioner").IidPartitioner

PARTITIONS = [
    Iid(),
    EvenClasses(),
    ClassShares(alpha=1),
    ClassShares(alpha=0.01),
    Dirichlet(alpha=0.1),
    Dirichlet(alpha=1, self_balancing=True),
    Pathological(classes_per_client=3),
    Natural(),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("clients", [4, 7, 20])
def test_disjoint_complete_nobody_empty(labelled, partition, clients):
    examples = labelled(count=601, groups=23)
    parts = partition(examples, num_clients=clients, seed=3)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(601))
    assert all(torch.equal(part, part.sort().values) and part.dtype == torch.int64 for part in parts)


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_the_seed_decides(labelled, partition):
    def parts(seed):
        return partition(labelled(groups=12), num_clients=5, seed=seed)

    torch.manual_seed(0)
    first = parts(1)
    torch.manual_seed(9)
    assert all(torch.equal(a, b) for a, b in zip(first, parts(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, parts(2), strict=True))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(), Pathological(classes_per_client=10)], ids=str)
def test_one_client_has_all(labelled, partition):
    (part,) = partition(labelled(), num_clients=1, seed=0)
    assert torch.equal(part, torch.arange(600))


def test_iid_is_even_and_not_in_order(labelled):
    examples = labelled(count=1003)
    parts = Iid()(examples, num_clients=10, seed=0)
    assert {len(part) for part in parts} == {100, 101}
    assert not torch.equal(parts[0], torch.arange(len(parts[0])))
    # Chi-squared of a table with 81 degrees of freedom: above 114 once in a hundred times.
    table = partition_table(examples, parts).double()
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    assert ((table - expected).square() / expected).sum() < 130


def test_iid_is_that_of_flower_datasets(labelled):
    examples = labelled(count=103)
    order = torch.randperm(103, generator=derive_generator(5, "shuffle"))
    theirs = IidPartitioner(7)
    theirs.dataset = datasets.Dataset.from_dict({"index": order.tolist()})
    for client, part in enumerate(Iid()(examples, num_clients=7, seed=5)):
        assert part.tolist() == sorted(theirs.load_partition(client)["index"])


def skew(examples, alpha):
    """Mean total variation distance between a client's classes and all classes, over seeds."""
    distances = []
    for seed in range(5):
        table = partition_table(examples, Dirichlet(alpha=alpha)(examples, num_clients=10, seed=seed)).double()
        shares = table / table.sum(1, keepdim=True)
        distances.append((shares - table.sum(0) / table.sum()).abs().sum(1).mean() / 2)
    return torch.stack(distances).mean().item()


@pytest.mark.long
def test_dirichlet_is_more_skewed_the_smaller_alpha(labelled):
    examples = labelled(count=2000)
    skews = [skew(examples, alpha) for alpha in (0.1, 0.5, 2, 100)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6
    assert skews[-1] < 0.1


@pytest.mark.fuzz
def test_dirichlet_shares_have_the_variance_of_the_distribution(labelled):
    alpha, clients = 0.5, 8
    examples, partition = labelled(count=2000, classes=10), Dirichlet(alpha=alpha)
    parts = [partition(examples, num_clients=clients, seed=seed) for seed in range(30)]
    shares = torch.cat([partition_table(examples, part).T / 200 for part in parts])
    mean = 1 / clients
    variance = mean * (1 - mean) / (alpha * clients + 1)
    assert shares.var().item() == pytest.approx(variance, rel=0.1)


def test_min_examples(labelled):
    parts = Dirichlet(alpha=1, min_examples=40)(labelled(), num_clients=5, seed=0)
    assert min(map(len, parts)) >= 40


@pytest.mark.parametrize(("clients", "k"), [(5, 2), (10, 2), (7, 3), (30, 1), (3, 10)])
def test_pathological_has_exactly_k_classes(labelled, clients, k):
    examples = labelled(count=1200)
    table = partition_table(examples, Pathological(classes_per_client=k)(examples, num_clients=clients, seed=4))
    assert ((table > 0).sum(1) == k).all()
    owners = (table > 0).sum(0)
    assert owners.max() - owners.min() <= 1


def test_pathological_counts_only_classes_that_occur(labelled):
    examples = labelled(classes=10).subset(torch.arange(0, 600, 2))
    table = partition_table(examples, Pathological(classes_per_client=2)(examples, num_clients=3, seed=0))
    assert ((table > 0).sum(1) == 2).all()


def test_natural_keeps_groups_together(labelled):
    examples = labelled(count=600, groups=13)
    parts = Natural()(examples, num_clients=4, seed=0)
    owners = [set(examples.groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == 13
    assert {len(groups) for groups in owners} == {3, 4}
    exactly = Natural()(examples, num_clients=13, seed=0)
    assert all(len(examples.groups[part].unique()) == 1 for part in exactly)


@pytest.mark.parametrize(
    ("partition", "clients", "words"),
    [
        (Iid(), 0, "federation.clients is expected to be a whole number of at least 1"),
        (Iid(), -3, "at least 1"),
        (Iid(), 601, "only 600"),
        (Dirichlet(min_examples=100), 7, "federation.clients=6"),
        (Dirichlet(alpha=0.001), 300, "partition.alpha=0.001"),
        (Pathological(classes_per_client=2), 4, "can hold only 8.*between 3 and 10"),
        (Pathological(classes_per_client=11), 4, "not so many"),
        (Pathological(classes_per_client=10), 100, "take fewer clients"),
        (Natural(), 3, "data.group_column"),
    ],
)
def test_what_can_not_be_shared_out_is_said(labelled, partition, clients, words):
    with pytest.raises(UserError, match=words) as error:
        partition(labelled(), num_clients=clients, seed=0)
    assert "\n" not in str(error.value)


def test_more_clients_than_groups(labelled):
    with pytest.raises(UserError, match=r"federation\.clients=6"):
        Natural()(labelled(groups=6), num_clients=7, seed=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dirichlet(alpha=0), "alpha"),
        (lambda: Dirichlet(alpha=-1), "alpha"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha"),
        (lambda: Dirichlet(min_examples=0), "min_examples"),
        (lambda: Pathological(classes_per_client=0), "classes_per_client"),
    ],
)
def test_wrong_settings(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_table_counts(labelled):
    examples = labelled(count=6, classes=3)
    table = partition_table(examples, [torch.tensor([0, 1, 3]), torch.tensor([2, 4, 5])])
    assert table.tolist() == [[2, 1, 0], [0, 1, 2]]


def test_even_classes_are_the_same_number_of_each_class_for_each_client(labelled):
    examples = labelled(count=1003)
    table = partition_table(examples, EvenClasses()(examples, num_clients=10, seed=0))
    assert int((table.max(0).values - table.min(0).values).max()) <= 1
    assert int(table.sum(1).max() - table.sum(1).min()) <= 1


def test_class_shares_are_drawn_by_each_client_for_itself(labelled):
    """Hsu et al. 2019: clients have equally many examples, a client's shares are Dirichlet whatever others draw."""
    examples = labelled(count=60_000)
    parts = ClassShares(alpha=1.0)(examples, num_clients=400, seed=0)
    assert {len(part) for part in parts} == {150}
    first = partition_table(examples, parts[:200]).double() / 150
    # Shares of Dirichlet(1) over ten classes have the variance 1/10 * 9/10 / 11, and drawing 150 adds its own.
    expected = 0.1 * 0.9 / 11 * (1 - 1 / 150) + 0.1 * 0.9 / 150
    assert float(first.var(0).mean()) == pytest.approx(expected, rel=0.15)
    even = partition_table(examples, ClassShares(alpha=1e4)(examples, num_clients=400, seed=0)).double() / 150
    assert float(even[:200].var(0).mean()) < expected / 5
