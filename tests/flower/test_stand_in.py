"""`audit --stand-in`: apps whose data are missing come to a page on drawn examples, which says so first."""

import json
import sys
from pathlib import Path

import pytest

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.lent import trackers_left_out
from fl_privacy.auditing.app.stand_in import Drawing, Shape, column, pictures, texts
from fl_privacy.auditing.app.stood_in import stood_in
from tests.selection import few

HEAD = """
import flwr as fl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
TAIL = """
class FlowerClient(fl.client.NumPyClient):
    def __init__(self):
        self.net = Net()
    def get_parameters(self, config):
        return [value.numpy() for value in self.net.state_dict().values()]
    def fit(self, parameters, config):
        self.net.load_state_dict(dict(zip(self.net.state_dict(), map(torch.tensor, parameters))))
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(images), labels).backward()
            optimizer.step()
        return self.get_parameters({}), 40, {}
    def evaluate(self, parameters, config):
        return 1.0, 40, {}
fl.simulation.start_simulation(client_fn=lambda cid: FlowerClient(), num_clients=2)
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear({inputs}, 24), nn.Linear(24, {classes})
    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))
"""
LOADERS = {
    "torchvision": (784, 10, """
from torchvision import transforms
from torchvision.datasets import MNIST
sets = MNIST("data", train=True, download=True, transform=transforms.ToTensor())
loader = DataLoader(torch.utils.data.Subset(sets, range(40)), batch_size=8)
"""),
    "hub": (3072, 10, """
from datasets import load_dataset
from torchvision.transforms import ToTensor
rows = load_dataset("uoft-cs/cifar10", split="train").select(range(40))
images = torch.stack([ToTensor()(row["img"]) for row in rows])
loader = DataLoader(TensorDataset(images, torch.tensor(rows["label"][:])), batch_size=8)
"""),
    "pandas": (6, 2, """
import pandas as pd
frame = pd.read_csv("/somewhere/heart.csv")
labels = frame["diagnosis"]
rows = frame.drop(columns=["diagnosis"]).values[:40]
loader = DataLoader(TensorDataset(torch.tensor(rows).float(), torch.tensor(labels.values[:40])), batch_size=8)
"""),
}  # fmt: skip


@pytest.mark.parametrize("kind", few(LOADERS, 1))
def test_missing_data_are_drawn_and_the_page_says_so(tmp_path: Path, kind: str) -> None:
    inputs, classes, loading = LOADERS[kind]
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "main.py").write_text(HEAD + NET.format(inputs=inputs, classes=classes) + loading + TAIL)
    request = AppAuditRequest(out=tmp_path / "out", victims=2, clients=1, seconds=2, stand_in=True)
    session = audit_app(read_app(folder), request)
    record = json.loads((session.page.parent / "audit.json").read_text())
    assert not record["problems"], record["problems"]
    assert record["rungs"] and record["rungs"][0]["counts"]["judged"] == 2
    page = session.page.read_text()
    assert "data were not here and were drawn" in page
    without = AppAuditRequest(out=tmp_path / "out2", victims=1, clients=1, seconds=1)
    if kind == "pandas":
        with pytest.raises(Exception, match=r"heart\.csv"):
            audit_app(read_app(folder), without)


def test_what_is_there_is_loaded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": [1, 2]}).to_csv("there.csv", index=False)
    np.save("there.npy", np.arange(3))
    with stood_in(Drawing([], tmp_path)) as drawing:
        assert pd.read_csv("there.csv").shape == (2, 1) and np.load("there.npy").tolist() == [0, 1, 2]
        assert drawing.asked == {} and drawing.in_words() == ""
        gone = pd.read_csv("gone.csv")
        assert len(gone) > 100 and gone["a column that nobody named"].dtype.kind == "f"
        assert np.load("gone.npz")["x_train"].shape[1:] == (28, 28)
        assert np.loadtxt("gone.txt").ndim == 2
    assert set(drawing.asked) == {"gone.csv", "gone.npz", "gone.txt"}
    with pytest.raises(FileNotFoundError):
        pd.read_csv("gone.csv")


def test_drawn_examples_are_the_same_again_and_of_their_kind() -> None:
    import numpy as np  # noqa: PLC0415

    one, two = (pictures(20, Shape(side=28, channels=1), np.random.default_rng(3)) for _ in range(2))
    assert one.shape == (20, 28, 28, 1) and one.dtype == np.uint8 and (one == two).all()
    within = np.abs(one[0].astype(float) - one[10]).mean()
    between = np.abs(one[0].astype(float) - one[1:10]).mean()
    assert within < between, "pictures of a class are more alike"
    assert all(8 <= len(text.split()) <= 24 for text in texts(5, 2, np.random.default_rng(0)))
    assert list(column("is_fraud", 4, 2, np.random.default_rng(0))) == [0, 1, 0, 1]


def test_packages_that_report_elsewhere_are_left_out() -> None:
    with trackers_left_out() as silent:
        import wandb  # noqa: PLC0415

        with wandb.init(project="x") as run:
            run.log({"loss": 1.0})
        assert wandb.config.lr is not None and silent == ["wandb"]

        @wandb.decorated
        def kept() -> int:
            return 3

        assert kept() == 3
    assert "wandb" not in sys.modules
