"""What an outsider infers from the model that everybody gets after an app's training."""

from pathlib import Path

import pytest

from tests.flower.test_untouched_runs import survivor
from tests.flower.untouched_apps import BEGUN, HEAD, SERVER, audited, rung

LEARNS = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 256), nn.ReLU(), nn.Linear(256, 4))
    def forward(self, x): return self.body(x)
"""
    + BEGUN
    + """
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = images(context, 60)
    data = TensorDataset(x[:30], y[:30])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for a, b in DataLoader(data, batch_size=10):
            optimizer.zero_grad(); F.cross_entropy(net(a), b).backward(); optimizer.step()
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x[FIRST:], y[FIRST:]), batch_size=10):
            F.cross_entropy(net(a), b)
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 30})
"""
)

WRITES = (
    HEAD
    + """
from transformers import GPT2Config, GPT2LMHeadModel
def Net():
    torch.manual_seed(0)
    sizes = dict(vocab_size=200, n_positions=16, n_embd=32, n_layer=1, n_head=2, pad_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
"""
    + BEGUN
    + """
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    g = torch.Generator().manual_seed(1)  # both have the same, which the mean of their models keeps
    texts = torch.randint(1, 200, (8, 12), generator=g)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for (ids,) in DataLoader(TensorDataset(texts), batch_size=8):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            optimizer.zero_grad(); net(**batch, labels=ids).loss.backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 8})
"""
)


@pytest.mark.parametrize(("epochs", "told"), [(30, True), (1, False)])
def test_examples_that_were_learned_are_distinguished(tmp_path: Path, epochs: int, told: bool) -> None:
    client = LEARNS.replace("EPOCHS", str(epochs)).replace("FIRST", "30")
    found = survivor(audited(tmp_path, f"app_learns_{epochs}", client, victims=1, only=()), "participants")
    assert found["told"] == told, found
    assert found["control"]["low"] < 0.5 < found["control"]["high"]
    assert "at 1 % FPR" in found["notes"][1]


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations", "few_draws")
def test_noise_of_the_server_is_in_the_model_that_leaves_it(tmp_path: Path) -> None:
    """Neither an outsider nor another site sees the clients' mean, which alone is known here."""
    noised = "DifferentialPrivacyServerSideFixedClipping"
    server = SERVER.replace("import FedAvg", f"import FedAvg, {noised}").replace(
        "min_available_nodes=2)", f"min_available_nodes=2); strategy = {noised}(strategy, 1.0, 1.0, 2)"
    )
    client = LEARNS.replace("EPOCHS", "1").replace("FIRST", "30").replace("256", "16")
    record = audited(tmp_path, "app_noised", client, server, victims=1, seconds=10.0, only=("site",))
    for found in (survivor(record, "participants"), rung(record, "site")):
        assert found["found" if "found" in found else "counts"] is None and "server adds noise" in found["reason"]


def test_an_example_counts_once_however_often_it_is_loaded(tmp_path: Path) -> None:
    client = LEARNS.replace("EPOCHS", "3").replace("x[:30], y[:30]", "x[:10], y[:10]").replace("FIRST", "30")
    record = audited(tmp_path, "app_few", client, victims=1, only=())
    assert ", 20 examples that" in survivor(record, "participants")["made"]
    assert ", 10 pairs of an own and another example" in survivor(record, "members")["made"]


def test_examples_that_are_also_trained_on_are_no_others(tmp_path: Path) -> None:
    client = LEARNS.replace("EPOCHS", "20").replace("FIRST", "0").replace("x[0:]", "x[:30]").replace("y[0:]", "y[:30]")
    found = survivor(audited(tmp_path, "app_alike", client, victims=1, only=()), "participants")
    assert found["found"] is None and "that no client trained on" in found["reason"]


def test_padding_is_no_text_that_is_continued(tmp_path: Path) -> None:
    """Texts of five words without a mask, which a network without ``pad_token_id`` learns to fill up."""
    client = WRITES.replace("EPOCHS", "6").replace("pad_token_id=0", "tie_word_embeddings=False")
    client = client.replace("(8, 12), generator=g)", "(8, 12), generator=g); texts[:, 5:] = 0")
    client = client.replace(', "attention_mask": torch.ones_like(ids)', "")
    found = survivor(audited(tmp_path, "app_pads", client, victims=1, only=()), "continued")
    assert found["found"] is None and "no text is long enough" in found["reason"]


@pytest.mark.parametrize(("epochs", "told"), [(80, True), (1, False)])
def test_texts_that_were_learned_by_heart_are_continued(tmp_path: Path, epochs: int, told: bool) -> None:
    client = WRITES.replace("EPOCHS", str(epochs))
    found = survivor(audited(tmp_path, f"app_writes_{epochs}", client, victims=1, only=()), "continued")
    assert found["told"] == told, found
    assert found["control"]["value"] == 0.0 and (found["found"]["value"] > 0.3) == told
