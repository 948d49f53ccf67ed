"""Apps that forecast from windows of a time series (B, T, F): recurrent networks and 1-D convolutions."""

from pathlib import Path

import pytest

from tests.flower.untouched_apps import BEGUN, HEAD, audited, rung

SERIES = (
    HEAD
    + """
def series(context, n=400):
    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    t, phase = torch.arange(n).float(), 6.28 * torch.rand(3, generator=g)
    day = torch.stack([torch.sin(6.28 * t / period + p) for period, p in zip((24, 7, 91), phase)], 1)
    return 20 + 5 * day.cumsum(1) + 2 * torch.randn(n, 3, generator=g)
class Windows(torch.utils.data.Dataset):
    def __init__(self, values, past=PAST):
        self.values, self.past = (values - values.mean(0)) / values.std(0), past
    def __len__(self): return len(self.values) - self.past
    def __getitem__(self, i): return self.values[i:i + self.past], self.values[i + self.past, :1]
class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        LAYERS
def Net(): return Forecaster()
"""
    + BEGUN
    + """    data = Windows(series(context))
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss()
    for a, b in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        criterion(net(a), b).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(data)})
"""
)
"""A client that trains on windows of its three series, ``PAST`` long; ``LAYERS`` are those of its network."""

LSTM = """self.past, self.last = nn.LSTM(3, 32, batch_first=True), nn.Linear(32, 1)
    def forward(self, x): return self.last(self.past(x)[0][:, -1])"""

CONVOLUTION = """self.past = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.Tanh())
        self.last = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(16 * PAST, 1))
    def forward(self, x): return self.last(self.past(x.transpose(1, 2)))"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layers", "past", "scenarios"),
    [
        ("lstm", LSTM, 6, ("one",)),
        pytest.param("lstm", LSTM, 6, ("gradient", "one"), marks=pytest.mark.fuzz),
        pytest.param("convolution", CONVOLUTION, 12, ("gradient", "one"), marks=pytest.mark.fuzz),
    ],
)
def test_windows_of_a_time_series_are_reconstructed(
    tmp_path: Path, name: str, layers: str, past: int, scenarios: tuple[str, ...]
) -> None:
    client = SERIES.replace("LAYERS", layers).replace("PAST", str(past))
    record = audited(tmp_path, f"app_{name}", client, rounds=1, seconds=90.0, victims=3, only=scenarios)
    for scenario in scenarios:
        found = rung(record, scenario)
        assert not found["reason"]
        assert found["counts"]["judged"] == 3 and found["counts"]["read"] >= 2
        assert found["control"]["read"] == 0 and found["counts"]["candidates"] > 700
        assert "The attacker knows the range of each feature, as from a public schema." in found["notes"]
        assert "The loss is mse loss; the attacker is given no labels." in found["notes"]
    assert record["headline"].startswith("The server reconstructed")
