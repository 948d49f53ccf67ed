"""A federation on texts, attacked: its page shows sentences."""

from pathlib import Path

import pytest
from safetensors import safe_open

from fl_privacy.cli.main import run_command_line
from fl_privacy.report.gallery import colored
from fl_privacy.runs.folder import read_run
from tests.selection import few

pytest.importorskip("tokenizers")

WORDS = ["a", "fine", "dull", "warm", "film", "plot", "image", "acts", "joy", "ends", "cast", "songs"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for label, shift in (("bad", 0), ("good", 5)):
        lines = [" ".join(WORDS[(shift + k * step) % len(WORDS)] for k in range(3, 9)) for step in range(1, 21)]
        (folder / f"{label}.txt").write_text("\n".join(lines))
    out = folder / "out"
    words = ["run", "data=text_folder", f"data.root={folder}", "data.vocabulary_size=100", "model=bert_tiny"]
    more = ["attack=dager", "federation.clients=2", "federation.rounds=1", "victims=2", f"out={out}", "bpki.bins=2"]
    assert run_command_line([*words, *more, "intercept.save=true"]) == 0
    return next(path.parent for path in out.glob("*/summary.json"))


def test_the_texts_are_read_word_for_word(run: Path) -> None:
    recorded = read_run(run)
    assert recorded.summary.plain.metrics["exact_match"].mean == 1
    assert recorded.summary.plain.certainties == {"proven": 2}
    assert "psnr" not in recorded.summary.plain.metrics
    assert any("the number of tokens of each text" in sentence for sentence in recorded.threat_model)


def test_a_language_model_is_trained_tested_and_has_its_page(run: Path, tmp_path: Path) -> None:
    """Its accuracy is of next tokens, and what clients have is counted by the classes of their texts."""
    words = ["run", "data=text_folder", f"data.root={run.parents[1]}", "data.vocabulary_size=100", "model=gpt_tiny"]
    words += ["data.target=next_token", "data.tokenizer=words", "attack=none", "federation.clients=2"]
    assert run_command_line([*words, "federation.rounds=1", f"out={tmp_path}"]) == 0
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    recorded = read_run(folder)
    assert recorded.partition is not None and recorded.partition.class_names == ("bad", "good")
    assert {len(row) for row in recorded.partition.counts} == {2}
    assert all(0 <= record["accuracy"] <= 1 for record in recorded.of_kind("round") if "accuracy" in record)


def test_the_page_shows_sentences_for_their_owner_alone(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert 'class="token right"' in page and "2 of 2 attacked texts" in page
    assert 'class="rank"' not in page and "attacker's loss" not in page.replace("&#39;", "'"), "nothing to compare"
    assert (run / "report.html").stat().st_mode & 0o077 == 0
    (stored,) = (run / "reconstructions").glob("*.json")
    assert stored.stat().st_mode & 0o077 == 0
    sentences, problems = read_run(run).read_sentences()
    assert len(sentences) == 2 and not problems
    assert all(sentence.original == sentence.guess for sentence in sentences.values())


def test_a_shared_copy_has_no_sentences(run: Path, tmp_path: Path) -> None:
    assert run_command_line(["report", str(run), "--share", str(tmp_path / "copy")]) == 0
    (copy,) = (tmp_path / "copy").rglob("report.html")
    assert 'class="token' not in copy.read_text() and not list(copy.parent.rglob("sentences-*.json"))


def test_what_was_captured_is_attacked_again(run: Path, tmp_path: Path) -> None:
    assert run_command_line(["attack", f"captured={run}", "attack=dager", f"out={tmp_path}"]) == 0
    (again,) = tmp_path.glob("*/summary.json")
    assert read_run(again.parent).summary.plain.metrics["exact_match"].mean == 1


def test_tokens_are_right_misplaced_or_wrong() -> None:
    kinds = [piece.kind for piece in colored(["a", "c", "b", "b", "x"], ["a", "b", "c", "d"])]
    assert kinds == ["right", "misplaced", "misplaced", "wrong", "wrong"]


@pytest.mark.parametrize("defense", ["soteria", "soteria_mixing", "ats", "instahide", "dc", "spn", "split_fed"])
def test_defenses_of_images_are_refused(
    run: Path, tmp_path: Path, defense: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["attack", "data=text_folder", f"data.root={run.parent.parent}", "data.vocabulary_size=100"]
    more = ["model=bert_tiny", "attack=dager", "victims=1", f"defense={defense}", f"out={tmp_path}"]
    assert run_command_line([*words, *more]) == 2
    assert f"A defense of text is expected, but {defense} is of images; take" in capfd.readouterr().err


@pytest.mark.parametrize(
    "defense",
    few(["dp_noise", "pruning", "dp_sgd", "local_dp", "quantization", "selective_sharing", "ppdl", "refiner"], 2),
)
def test_defenses_of_updates_are_attacked(run: Path, tmp_path: Path, defense: str) -> None:
    words = ["attack", "data=text_folder", f"data.root={run.parent.parent}", "data.vocabulary_size=100"]
    more = ["model=bert_tiny", "attack=tag", "attack.iterations=3", "victims=1", f"defense={defense}"]
    assert run_command_line([*words, *more, f"out={tmp_path}"]) == 0
    (found,) = tmp_path.glob("*/summary.json")
    assert read_run(found.parent).summary.plain.metrics["token_f1"].n == 1


def test_adapters_alone_are_uploaded_and_read(run: Path, tmp_path: Path) -> None:
    words = ["run", "data=text_folder", f"data.root={run.parent.parent}", "data.vocabulary_size=100"]
    more = ["model=bert_tiny", "model.lora_rank=32", "attack=dager", "federation.clients=2", "federation.rounds=1"]
    assert run_command_line([*words, *more, "victims=2", f"out={tmp_path}", "intercept.save=true", "bpki.bins=2"]) == 0
    (found,) = tmp_path.glob("*/summary.json")
    assert read_run(found.parent).summary.plain.certainties == {"proven": 2}
    uploaded = set()
    for capture in (found.parent / "captures").rglob("*.safetensors"):
        with safe_open(capture, framework="pt") as stored:
            uploaded |= {name for name in stored.keys() if name.startswith("update/")}  # noqa: SIM118
    assert uploaded and all("lora" in name or "classifier" in name for name in uploaded)


@pytest.mark.long
def test_lamp_reads_with_public_texts(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["attack", "data=text_folder", f"data.root={run.parent.parent}", "data.vocabulary_size=100", "victims=1"]
    more = ["model=bert_tiny", "attack=lamp", "attack.iterations=4", "attack.starts=3", f"out={tmp_path}"]
    assert run_command_line([*words, *more]) == 2
    assert "threat_model.public_images" in capfd.readouterr().err
    assert run_command_line([*words, *more, "threat_model.public_images=5"]) == 0
    (found,) = tmp_path.glob("*/summary.json")
    assert any("5 public texts" in sentence for sentence in read_run(found.parent).threat_model)
