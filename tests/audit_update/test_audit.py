"""``fl-privacy audit-update``: from two files to a page."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from fl_privacy.auditing.update_audit import UpdateAudit, UpdateAuditRequest, audit_update
from fl_privacy.auditing.update_given import SiteExamples, network_of
from fl_privacy.auditing.update_observed import inferred, sent_of, update_of, updates_of
from fl_privacy.cli.main import app, run_command_line
from fl_privacy.errors import UserError
from fl_privacy.files.updates import SavedArrays
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.counts import Counts
from fl_privacy.types import Batch, Reconstruction
from fl_privacy.types.modality import ROWS
from fl_privacy.types.plan import Normalization
from fl_privacy.types.victim_ids import VictimId
from tests.audit_update.files import NET, of_flare, trained

SHAPE = (3, 4, 4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a model's code, the model as sent and one example."""
    torch.manual_seed(0)
    (tmp_path / "nets.py").write_text(NET)
    net = network_of(f"{tmp_path}/nets.py:Net")
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "before.pt")
    (tmp_path / "own").mkdir()
    pixels = (torch.rand(4, 4, 3, generator=torch.Generator().manual_seed(1)) * 255).byte().numpy()
    Image.fromarray(pixels).save(tmp_path / "own" / "one.png")
    image = torch.from_numpy(pixels).permute(2, 0, 1).float()[None] / 255
    save_file(trained(net, image, torch.tensor([2]), lr=0.1), tmp_path / "after.safetensors")
    save_file(trained(net, torch.rand(1, *SHAPE), torch.tensor([1]), lr=0.1), tmp_path / "other.safetensors")
    return tmp_path


def asked(place: Path, **settings: object) -> UpdateAuditRequest:
    given = {"before": place / "before.pt", "after": place / "after.safetensors", "model": f"{place}/nets.py:Net"}
    return UpdateAuditRequest(**{**given, "shape": SHAPE, "out": place / "out", **settings})  # type: ignore[arg-type]


def test_an_image_is_reconstructed_and_judged(place: Path) -> None:
    done = audit_update(asked(place, data=place / "own"))
    assert "The server reconstructed 1 of 1 image from the update" in done.line
    page, record = done.page.read_text(), json.loads((done.folder / "audit.json").read_text())
    assert (
        record["command"] == "audit-update" and record["tone"] == "leak" and record["rungs"][0]["counts"]["read"] == 1
    )
    assert "audit of an update" in page and "Flower app" not in page and "begin with module." in page


def test_facts_state_what_is_assumed_and_when_the_learning_rate_is_too_low(place: Path) -> None:
    def facts(**settings: object) -> tuple[str, str]:
        audit = UpdateAudit(asked(place, **settings), network_of(f"{place}/nets.py:Net"), lambda text: None)
        found = dict(audit.facts())
        return found["Local steps"], found["Learning rate times steps"]

    unknown, doubted = facts()
    given, exact = facts(steps=(1,))
    assert (unknown, given) == ("not inferred; assumed: 1", "1, given")
    assert "5 times too low" in doubted and exact.startswith("about 0.") and "too low" not in exact
    net = network_of(f"{place}/nets.py:Net")
    sent = dict(zip(net.state_dict(), torch.load(place / "before.pt").values(), strict=True))
    cut = {n: sent[n] + (v - sent[n]).clamp(-0.005, 0.005) for n, v in load_file(place / "after.safetensors").items()}
    save_file(cut, place / "cut.safetensors")
    assert "5 times too low" in facts(steps=(1,), after=place / "cut.safetensors")[1]


def test_nothing_reconstructed_is_said_of_the_assumption_alone(place: Path) -> None:
    audit = UpdateAudit(asked(place), network_of(f"{place}/nets.py:Net"), lambda text: None)
    scenario = Scenario(name="update 1 3", source="the update, assumed to hold 1 example in 3 steps")
    audit.answers = [Answer(kind="image", counts=Counts(nothing=1, groups=1), scenario=scenario)]
    said = audit.record().headline
    assert "0 of 1 image from the update, assumed to hold 1 example in 3 steps; other attacks may" in said


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "gpu"}, "device is expected"),
        ({"normalization": Normalization([0.5, 0.5], [0.2, 0.2])}, "--normalize is expected"),
        ({"normalization": Normalization([0.5], [0.2]), "shape": (48,)}, "--normalize is expected"),
        ({"shape": (3, 5, 5)}, r"--shape"),
        ({"model": "lines.py:Net"}, "0 is a Conv1d"),
    ],
)
def test_what_can_not_be_attacked_makes_no_page(settings: dict[str, object], why: str, place: Path) -> None:
    (place / "lines.py").write_text("from torch import nn\nNet = lambda: nn.Sequential(nn.Conv1d(3, 4, 3))")
    settings = {**settings, **({"model": f"{place}/lines.py:Net"} if "model" in settings else {})}
    with pytest.raises(UserError, match=why):
        audit_update(asked(place, **settings))
    assert not (place / "out").exists()


def test_another_update_is_not_taken_for_the_sites(place: Path) -> None:
    """The control: the site's image is not in an update of another image, however exactly that is reconstructed."""
    done = audit_update(asked(place, data=place / "own" / "one.png", after=place / "other.safetensors"))
    counts = done.answers[0].counts
    assert counts is not None and not done.answers[0].leaks, counts


def test_without_the_sites_examples_the_page_asks(place: Path) -> None:
    done = audit_update(asked(place, examples=(2,)))
    assert "Guesses at the images of the update are shown: are these yours? Page" in done.line
    assert "Is this yours?" in done.page.read_text() and not any(answer.leaks for answer in done.answers)
    assert json.loads((done.folder / "audit.json").read_text())["rungs"][0]["counts"]["unknown"] == 2


def test_a_folder_of_changes_is_audited_as_one(place: Path) -> None:
    net = network_of(f"{place}/nets.py:Net")
    net.load_state_dict({n.removeprefix("module."): v for n, v in torch.load(place / "before.pt").items()})
    (place / "rounds").mkdir()
    for number in range(3):
        image = torch.rand(1, *SHAPE)
        after = trained(net, image, torch.tensor([number]), lr=0.1)
        change = {name: value - net.state_dict()[name] for name, value in after.items()}
        of_flare(place / "rounds" / f"site-{number}.dxo", "WEIGHT_DIFF", change, {"NUM_STEPS_CURRENT_ROUND": 1})
        (place / "truth").mkdir(exist_ok=True)
        np.savez(place / "truth" / f"site-{number}.npz", inputs=image.numpy())
    done = audit_update(asked(place, after=place / "rounds", examples=(1,), data=place / "truth"))
    (answer,) = done.answers
    assert answer.counts is not None and answer.counts.read == 3 and isinstance(answer.control, Counts)
    assert answer.control.read == 0 and answer.leaks
    assert len(done.updates) == 3 and done.found[0].steps == 1
    assert "NVFlare" in done.page.read_text()
    done.found = [replace(done.found[0], steps=steps) for steps in (1, 3, 3)]
    assert done.assumptions() == [(1, 1), (1, 3)], "sites may make different numbers of steps"
    assert dict(done.facts())["Local steps"].startswith("about 1 to 3, from")
    with pytest.raises(UserError, match="BEFORE is expected to hold a file for each"):
        audit_update(asked(place, before=place / "rounds"))
    with pytest.raises(UserError, match="BEFORE is expected to hold weights"):
        audit_update(asked(place, before=place / "rounds" / "site-0.dxo"))


def test_the_order_of_files_and_rounds_is_looked_after(place: Path) -> None:
    done = audit_update(asked(place, before=place / "after.safetensors", after=place / "before.pt"))
    assert "other order" in done.problems[0] and "other order" in done.page.read_text()
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4))
    early, late = (SavedArrays(arrays={**net.state_dict(), "2.num_batches_tracked": torch.tensor(n)}) for n in (3, 7))
    late.arrays["1.weight"] = late.arrays["1.weight"] + 1  # type: ignore[index]
    assert inferred(net, update_of(net, "a", sent_of(net, early), late), SHAPE, 4).steps == 4
    with pytest.raises(UserError, match="counted 4 fewer batches in AFTER; exchange the files"):
        inferred(net, update_of(net, "a", sent_of(net, late), early), SHAPE, 4)
    (place / "rounds").mkdir()
    for number, name in ((1, "before.pt"), (2, "after.safetensors"), (5, "other.safetensors")):
        shutil.copy(place / name, place / "rounds" / f"round-{number}")
    found = updates_of(network_of(f"{place}/nets.py:Net"), place / "rounds", place / "rounds")
    assert not any("missing" in line for line in found[0].said)
    assert "2 rounds are missing between round-2 and round-5" in found[1].said[-1]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.net(rows)
        return found


@pytest.mark.parametrize(("lr", "number"), [(0.1, 1), (0.02, 2)])
def test_rate_classes_and_number_are_inferred(lr: float, number: int) -> None:
    torch.manual_seed(1)
    net, rows, labels = Rows(), torch.rand(number, 6), torch.zeros(number).long()
    before, after = (SavedArrays(arrays=one) for one in (net.state_dict(), trained(net, rows, labels, lr=lr)))
    found = inferred(net, update_of(net, "a", sent_of(net, before), after), (6,), 3)
    assert found.rate == pytest.approx(lr, rel=0.2) and found.examples == number
    assert found.classes is not None and found.classes[0] == pytest.approx(1, abs=0.2)


def test_a_row_of_a_table_is_reconstructed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    code = "from tests.audit_update.test_audit import Rows"
    (tmp_path / "nets.py").write_text(code)
    net = network_of(f"{tmp_path}/nets.py:Rows")
    rows = torch.rand(60, 6)
    save_file(net.state_dict(), tmp_path / "before.safetensors")
    save_file(trained(net, rows[:1], torch.tensor([2]), lr=0.05), tmp_path / "after.safetensors")
    for name, some in (("own", rows[:1]), ("others", rows[1:])):
        lines = [",".join("abcdef"), *(",".join(f"{v:.8f}" for v in row) for row in some.tolist())]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    given = {"before": tmp_path / "before.safetensors", "shape": None, "data": tmp_path / "own.csv"}
    given["model"] = f"{tmp_path}/nets.py:Rows"
    done = audit_update(asked(tmp_path, **given, others=tmp_path / "others.csv"))
    assert "reconstructed 1 of 1 row" in done.line


def test_the_command_prints_the_record(place: Path) -> None:
    words = ["audit-update", str(place / "before.pt"), str(place / "after.safetensors")]
    model = ["--model", f"{place}/nets.py:Net", "--shape", "3,4,4", "--out", str(place / "out"), "--json"]
    made = CliRunner().invoke(app, [*words, *model, "--examples", "1", "--data", str(place / "own")])
    assert made.exit_code == 0 and json.loads(made.stdout)["tone"] == "leak"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--examples", "4-1"], "--examples is expected"),
        (["--shape", "big"], "--shape is expected"),
        (["--normalize", "0.5"], "--normalize is expected"),
        (["--steps", "0"], "--steps is expected"),
        (["--data", "none"], "none is expected to be a file"),
    ],
)
def test_wrong_options_are_one_line(
    place: Path, options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit-update", str(place / "before.pt"), str(place / "after.safetensors")]
    assert run_command_line([*words, "--model", f"{place}/nets.py:Net", "--out", str(place / "out"), *options]) == 2
    said = capsys.readouterr().err.strip()
    assert why in said.replace("\n", " ")


@pytest.mark.parametrize("others", [200, 0], ids=["other rows", "none"])
def test_a_row_that_many_have_is_no_reconstruction(others: int) -> None:
    common, rng = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.Generator().manual_seed(0)
    rows = torch.where(torch.rand(600, 1, generator=rng) < 0.6, common, torch.rand(600, 4, generator=rng))
    rare = rows[(rows != common).any(1)][0]
    session = UpdateAudit.__new__(UpdateAudit)
    session.kind, session.asked = ROWS, UpdateAuditRequest(before=Path(), after=Path(), model="")
    session.truths, session.others = [SiteExamples(rows[:400])], rows[400 : 400 + others]
    session.rest = torch.cat([session.others, rows[:400]])
    for guess, above in ((common, False), (rare, True)):
        made = Reconstruction(id=VictimId(0, 0), batch=Batch(guess[None], torch.zeros(1)))
        answer = session._judged([made], None, 1)
        assert answer.counts is not None and answer.counts.exact == 1
        assert replace(answer, among=1).above_chance == above
