"""Apps for segmentation, detection and generation: what the page says of each."""

from pathlib import Path

import pytest

from tests.flower.untouched_apps import BEGUN, HEAD, PLAIN, audited, rung

SEGMENTATION = PLAIN.replace(
    "nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))",
    "nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 2, 3, padding=1))",
).replace("criterion(net(a), b)", "criterion(net(a), (a[:, 0] > 0.5).long())")
"""Classes of pixels: outputs (B, 2, 6, 6) and labels (B, 6, 6)."""

DETECTION = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid())
        self.kind, self.box = nn.Linear(24, 4), nn.Linear(24, 4)
    def forward(self, x, targets):
        found = self.features(torch.stack(x))
        kinds, boxes = (torch.stack([each[key] for each in targets]) for key in ("label", "box"))
        return {"kind": F.cross_entropy(self.kind(found), kinds), "box": F.smooth_l1_loss(self.box(found), boxes)}
"""
    + BEGUN
    + """    x, y = images(context)
    boxes = torch.rand(len(x), 4, generator=torch.Generator().manual_seed(1))
    data = [(a, {"label": b, "box": c}) for a, b, c in zip(x, y, boxes)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(data, batch_size=4, collate_fn=lambda parts: tuple(zip(*parts))):
        optimizer.zero_grad()
        sum(net(*batch).values()).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)
"""Lists of images and of targets, and losses that the network returns in training, as torchvision's detectors have."""

GAN = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 36), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(36, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
"""
    + BEGUN
    + """    x, _ = images(context)
    makes, judges = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (net.generator, net.critic))
    score = nn.BCEWithLogitsLoss()
    for (real,) in DataLoader(TensorDataset(x), batch_size=4):
        drawn, real = net.generator(torch.randn(len(real), 8)), real.flatten(1)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judges.zero_grad()
        (score(net.critic(real), ones) + score(net.critic(drawn.detach()), zeros)).backward()
        judges.step()
        makes.zero_grad()
        score(net.critic(drawn), ones).backward()
        makes.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)
"""A generator and a critic, with an optimizer each."""

GRAPHS = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 2)
    def forward(self, x, edges):
        x = torch.tanh(self.first(edges @ x))
        return self.last(torch.tanh(self.second(edges @ x)).sum(1))
"""
    + BEGUN
    + """    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = F.one_hot(torch.randint(0, 6, (60, 8), generator=g), 6).float()
    edges = torch.rand(60, 8, 8, generator=g).triu(1) < 0.3
    edges = (edges | edges.mT | torch.eye(8).bool()).float()
    edges, y = edges / edges.sum(2, keepdim=True), (x[:, :, 0].sum(1) > 1).long()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for a, b, c in DataLoader(TensorDataset(x, edges, y), batch_size=4):
        optimizer.zero_grad()
        F.cross_entropy(net(a, b), c).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)
"""A graph network on molecules of eight atoms of six kinds: nodes (B, 8, 6) and a dense adjacency (B, 8, 8)."""

NODES = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 3)
    def mixed(self, x, edges):
        return x.index_add(0, edges[1], x[edges[0]])
    def forward(self, x, edges):
        return self.last(self.mixed(torch.tanh(self.first(self.mixed(x, edges))), edges))
"""
    + BEGUN
    + """    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x, y = torch.randn(10, 12, generator=g), torch.randint(0, 3, (10,), generator=g)
    edges = torch.randint(0, 10, (2, 16), generator=g)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    F.cross_entropy(net(x, edges), y).backward()
    optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)
"""A graph network on a client's one graph of ten nodes, without a loader."""

GIVEN = "The attacker is given the loss's other inputs, such as labels."


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "client", "note"),
    [
        ("segmentation", SEGMENTATION, GIVEN),
        ("detection", DETECTION, GIVEN),
        pytest.param("detection_in_full", DETECTION, GIVEN, marks=pytest.mark.fuzz),
        ("graphs", GRAPHS, "The loss is cross entropy; the attacker is given no labels."),
    ],
)
def test_single_examples_of_other_tasks_are_attacked(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, client: str, note: str
) -> None:
    in_full = name.endswith("_in_full")  # the one that is looked at for what was read
    if not in_full:
        request.getfixturevalue("few_evaluations")
    record = audited(tmp_path, f"app_{name}", client, rounds=1, only=("gradient",))
    found = rung(record, "gradient")
    assert not found["reason"] and found["counts"]["judged"] == 2 and note in found["notes"]
    assert found["control"]["read"] == 0
    assert found["counts"]["exact"] == 2 * in_full


@pytest.mark.long
def test_steps_of_a_generator_and_its_critic_are_not_undone(tmp_path: Path) -> None:
    """Both optimizers have the same settings, but train other parameters."""
    record = audited(tmp_path, "app_gan", GAN, rounds=1)
    assert "steps of several optimizers" in rung(record, "one")["reason"]


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_a_graph_s_nodes_are_attacked_together(tmp_path: Path) -> None:
    """Their network takes no other number of nodes than its edges name."""
    record = audited(tmp_path, "app_nodes", NODES, rounds=1, seconds=30.0, only=("batch",))
    found = rung(record, "batch")
    assert not found["reason"] and found["counts"]["judged"] == 10 and GIVEN in found["notes"]
    assert found["size"] == 10
