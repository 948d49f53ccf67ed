"""Names, losses and inputs of apps that are audited as they are, in many shapes."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.app.environment import LoadedBy
from fl_privacy.auditing.app.review import review_app
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.errors import UserError
from fl_privacy.measure.answer import Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.report.audit_file import folder_name
from fl_privacy.report.audit_page import AuditRecord, render_audit
from tests.flower.untouched_apps import LANGUAGE, LISTED, OWN_SERVER, PLAIN, SERVER, audited, rung, write

SENT = "ArrayRecord(net.state_dict()), **"
TAKEN = 'net.load_state_dict(msg.content["arrays"].to_torch_state_dict())'


def prefixed(prefix: str) -> str:
    """Let clients name their arrays with ``prefix`` in front."""
    named = f'ArrayRecord({{"{prefix}" + k: Array(v.numpy()) for k, v in MODEL.state_dict().items()}})'
    taken = f'{{k.removeprefix("{prefix}"): v for k, v in msg.content["arrays"].to_torch_state_dict().items()}}'
    return (
        PLAIN.replace("ArrayRecord(Net().state_dict())", named.replace("MODEL", "Net()"))
        .replace(TAKEN, f"net.load_state_dict({taken})")
        .replace(SENT, f"{named.replace('MODEL', 'net')}, **")
    )


COMPILED = PLAIN.replace("    net = Net()\n", "    net = torch.compile(Net(), backend='eager')\n").replace(
    "ArrayRecord(Net().state_dict())", "ArrayRecord(torch.compile(Net(), backend='eager').state_dict())"
)

IN_A_DICT = PLAIN.replace(
    "def Net(): return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))
    def forward(self, x): return {"features": x.mean(), "logits": self.net(x)}""",
).replace("net(a), b", "net(a)['logits'], b")

CROPPED = PLAIN.replace(
    "def Net()",
    """
class Drawn(torch.utils.data.Dataset):
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return len(self.x)
    def __getitem__(self, k):
        i, j = torch.randint(0, 3, (2,)).tolist()
        x = F.pad(self.x[k], (1, 1, 1, 1))[:, i:i + 6, j:j + 6]
        return (x.flip(-1) if np.random.rand() < 0.5 else x), self.y[k]
def Net()""",
).replace("DataLoader(TensorDataset(x, y)", "DataLoader(Drawn(x, y)")

PENALIZED = PLAIN.replace(
    "criterion(net(a), b).backward()",
    """p = torch.log_softmax(net(a), 1)
        penalty = 0.01 * sum((q ** 2).sum() for q in net.parameters())
        (penalty - p[torch.arange(len(b)), b].mean()).backward()""",
)

BARE = PLAIN.replace(
    SENT,
    """ArrayRecord({k: Array(dtype=str(v.dtype), shape=tuple(v.shape), stype="numpy.ndarray", data=v.tobytes())
        for k, v in ((k, t.numpy()) for k, t in net.state_dict().items())}), **""",
)

DRIVEN = """
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow
import torch
from {name}.client import Net
app = ServerApp()
@app.main()
def main(driver, context):
    torch.manual_seed(0)
    initial = ndarrays_to_parameters([v.numpy() for v in Net().state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=initial)
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
    DefaultWorkflow()(driver, legacy)
"""


SUMMED = PLAIN.replace(
    "criterion(net(a), b).backward()",
    """loss = torch.zeros(1)
        loss += criterion(net(a), b)
        loss.backward()""",
)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize(
    ("name", "client", "server"),
    [
        ("app_summed", SUMMED, SERVER),
        ("app_parallel", prefixed("module."), SERVER),
        pytest.param("app_original", prefixed("_orig_mod."), SERVER, marks=pytest.mark.fuzz),
        ("app_compiled", COMPILED, SERVER),
        ("app_in_a_dict", IN_A_DICT, SERVER),
        ("app_cropped", CROPPED, SERVER),
        ("app_penalized", PENALIZED, SERVER),
        ("app_bare_bytes", BARE, OWN_SERVER),
        ("app_driven", LISTED, DRIVEN),
    ],
)
def test_networks_in_many_shapes_are_attacked(tmp_path: Path, name: str, client: str, server: str) -> None:
    record = audited(tmp_path, name, client, server, rounds=1)
    assert not record["problems"]
    assert record["facts"]["What is uploaded"] == "weights of 4 parameters and buffers"
    assert rung(record, "gradient")["counts"]["read"] == 2
    assert rung(record, "one")["counts"]["read"] == 2 and record["tone"] == "leak"


SHARED = (
    LANGUAGE.replace(
        "nn.Embedding(300, 16, padding_idx=0), nn.Linear(16, 2)",
        "nn.Embedding(300, 16, padding_idx=0), nn.Linear(16, 300, bias=False)"
        "\n        self.head.weight = self.words.weight",
    )
    .replace("(self.words(input_ids) * mask).sum(1) / mask.sum(1)", "0.1 * self.words(input_ids) * mask")
    .replace(
        "F.cross_entropy(logits, labels)",
        "F.cross_entropy(logits[:, :-1].reshape(-1, 300), labels[:, 1:].reshape(-1), ignore_index=-100)",
    )
    .replace("torch.stack([r[1] for r in rows])}", "torch.where(ids > 0, ids, -100)}")
)


def test_words_of_an_embedding_that_a_head_shares_stand_out(tmp_path: Path) -> None:
    """The head moves every row; both names of the one matrix are known."""
    record = audited(tmp_path, "app_shared", SHARED, rounds=1, only=("gradient",))
    assert record["facts"]["What is uploaded"] == "weights of 2 parameters and buffers"
    assert not record["findings"]
    assert rung(record, "gradient")["counts"]["read"] == 2


TWO_CONFIGS = SERVER.replace(
    "    result =",
    """
    class More(DifferentialPrivacyClientSideFixedClipping):
        def configure_train(self, *args, **kwargs):
            messages = list(super().configure_train(*args, **kwargs))
            for each in messages: each.content["more"] = ConfigRecord({{"a": 1}})
            return messages
    strategy = More(strategy, 0.1, 5.0, 2)
    result =""",
).replace("import FedAvg\n", "import DifferentialPrivacyClientSideFixedClipping, FedAvg\n")


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations", "few_draws")
def test_what_a_mod_refuses_is_named(tmp_path: Path) -> None:
    clipped = "from flwr.clientapp.mod import fixedclipping_mod\napp = ClientApp(mods=[fixedclipping_mod])"
    folder = write(tmp_path, "app_two_configs", PLAIN.replace("app = ClientApp()", clipped), TWO_CONFIGS)
    found = audit_app(read_app(folder), AppAuditRequest(nodes=2, out=tmp_path / "out", seconds=0.0))
    (problem,) = found.content["problems"]
    assert "exactly one ConfigRecord" in problem and "2 replies" in problem
    assert found.content["tone"] == "open"
    assert problem.partition(" (2 replies)")[0] in found.line, "whoever reads the terminal alone knows why"


def test_a_server_that_asks_nobody_is_not_called_unattackable() -> None:
    assert AuditRecord(app="a", lede="").headline == "Nothing to audit: the server asked no client for anything"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import not_there.at_all", "imports not_there, which is not installed here"),
        ("", "which its pyproject.toml names"),
    ],
)
def test_a_missing_module_is_one_line_with_a_remedy(tmp_path: Path, code: str, said: str) -> None:
    name = f"app_missing_{bool(code)}".lower()
    folder = write(tmp_path, name, f"{code}\n{PLAIN}")
    if not code:
        project = folder / "pyproject.toml"
        project.write_text(project.read_text().replace(f'"{name}.client', '"elsewhere.client'))
    with pytest.raises(UserError, match=said):
        read_app(folder).load(stops_of)


def test_logs_that_the_app_writes_are_no_data_of_clients_and_partitions_that_it_writes_are(tmp_path: Path) -> None:
    tables: dict[str, np.ndarray] = {}
    now = time.time()
    for name, written, rows in (("theirs", now - 60, 3), ("log", now + 60, 3), ("partition", now + 60, 40)):
        pd.DataFrame({name: np.arange(rows) / 2}).to_csv(tmp_path / f"{name}.csv", index=False)
        os.utime(tmp_path / f"{name}.csv", (written, written))
    loaded = LoadedBy(tables, now, answered=4)
    with loaded.looking():
        for name in ("theirs", "log", "partition"):
            pd.read_csv(tmp_path / f"{name}.csv")
        assert len(list(pd.read_csv(tmp_path / "partition.csv", chunksize=10))) == 4
    assert set(loaded.of(Watched()).columns) == {"theirs", "partition"}


def test_a_review_reads_claims_answers_and_own_strategies(tmp_path: Path) -> None:
    client = (
        PLAIN.replace("ClientApp()", "ClientApp(mods=[LocalDpMod(7.0, 1.0, epsilon=6.0, delta=1e-5)])")
        + '\n@app.query("counts")\ndef counts(msg, context): ...\nload(trust_remote_code=True)\npandas.read_pickle("x")'
        + '\nsubprocess.run(["ls"])\ndataset.run()\n'
    )
    server = (
        SERVER + "\nclass Mine(FedAvg): pass\nstrategy = DifferentialPrivacyServerSideFixedClipping(Mine(), 1, 1, 2)\n"
    )
    folder = write(tmp_path, "app_claims", client, server)
    project = folder / "pyproject.toml"
    more = "early-stopping-delta = 0.1\nattacker-noise-scale = 2.0\ntarget-delta = 1e-6\n"
    project.write_text(project.read_text().replace("lr = 0.1\n", f"lr = 0.1\n{more}"))
    found = review_app(folder)
    assert [note.what for note in found.answers] == ["train", "query.counts"]
    assert "Mine, which is derived from FedAvg" in [note.what for note in found.strategies]
    assert set(found.settings) == {"noise-multiplier", "target-delta"}
    local, central = (note.what for note in found.claims)
    assert "epsilon 6" in local and "7 times too small" in local
    assert central.startswith("a client that takes part in 3 rounds spends epsilon ")
    assert [note.what for note in found.pickles] == ["pandas.read_pickle"]
    assert sorted(note.what for note in found.runs) == [
        "code that load fetches (trust_remote_code)",
        "subprocess.run",
    ]


@pytest.mark.parametrize("read", [0, 1])
def test_a_headline_of_classes_says_how_many_examples_were_read_beside(read: int) -> None:
    counts = Counts(identified=read, nothing=4 - read, groups=4, candidates=476)
    step = Answer(scenario=Scenario(title="One example in one step"), kind="image", counts=counts)
    found, control = (Estimate(value=v, low=v - 0.1, high=v + 0.1, chance=0.0) for v in (0.8, 0.0))
    classes = Answer(question="classes", estimate=found, control=control)
    page = AuditRecord(app="a", lede="", answers=[step, classes])
    allowed = ", no more than chance allows" * read
    assert page.headline.endswith(
        f"The server reconstructed {read} of 4 images from uploads of one example in one step{allowed}"
    )


@pytest.mark.parametrize(
    ("number", "source", "said", "alone"),
    [
        (1, "", "1 of 1 row from uploads of one example in one step", "1 of 1 row was reconstructed"),
        (
            2,
            "trees that clients upload",
            "2 of 2 rows from trees that clients upload",
            "2 of 2 rows were reconstructed",
        ),
    ],
)
def test_a_headline_says_what_rows_were_read_from(number: int, source: str, said: str, alone: str) -> None:
    counts, uploads = Counts(exact=number, groups=number), Scenario(title="Rows", source=source)
    step = Answer(scenario=uploads, kind="row", counts=counts, notes=("First.",))
    other = replace(step, scenario=replace(uploads, leaves=False), notes=("First.", "Second."))
    page = AuditRecord(app="a", lede="", answers=[step, other])
    assert page.headline == f"The server reconstructed {said}"
    assert render_audit(page).count("First.") == render_audit(page).count("Second.") == 1
    assert AuditRecord(app="a", lede="", answers=[replace(other, notes=())]).headline.endswith(alone)


@pytest.mark.parametrize("turned", [False, True])
def test_a_headline_says_which_single_words_were_read_of_texts_that_were_not(turned: bool) -> None:
    """Words that guesses at other texts have as well are no words read."""
    texts = [set(range(10 * k, 10 * k + 10)) for k in range(3)]
    guesses = [{0, 1}, {10}, {20, 5}]
    shown = [Shown(original=tuple(texts[k - turned]), guess=tuple(guesses[k]), reconstructed=False) for k in range(3)]
    counts = Counts(nothing=3, groups=3, candidates=0)
    step = Answer(scenario=Scenario(title="One example in one step"), kind="text", counts=counts, shown=shown)
    said = AuditRecord(app="a", lede="", answers=[step]).headline
    assert said.startswith("The server reconstructed the words of 0 of 3 texts from uploads of one example in one step")
    assert (", but 4 single words of them;" in said) != turned


def test_numbers_beyond_all_floats_make_no_claim(tmp_path: Path) -> None:
    huge = "1" + 400 * "0"
    client = PLAIN.replace("ClientApp()", f"ClientApp(mods=[LocalDpMod({huge}, -1.0, epsilon={huge}, delta=1e-5)])")
    server = SERVER + "\nstrategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1, 1, 2)\n"
    folder = write(tmp_path, "app_huge", client, server)
    project = folder / "pyproject.toml"
    more = "a-noise-multiplier = 1e300\nb-noise-multiplier = 1e-300\nc-noise-multiplier = nan\n"
    project.write_text(project.read_text().replace("lr = 0.1\n", f"lr = 0.1\n{more}"))
    told = [note.what for note in review_app(folder).claims]
    assert [re.search(r"epsilon (\S+)", one)[1] for one in told if "epsilon" in one] == ["0", "inf", "9.01"]


def test_folders_of_long_names_are_found() -> None:
    assert folder_name("a/b" * 40) == "audit-" + "a-b" * 20
