import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from fl_privacy.errors import UserError
from fl_privacy.federation import Evaluation
from fl_privacy.measure import Statistic
from fl_privacy.report import grid_picture, run_page as single, write_report
from fl_privacy.report.brief import write_brief
from fl_privacy.report.charts import line_chart
from fl_privacy.runs.folder import LeakageResult, RunFolder
from tests.report import kinds
from tests.results import runs
from tests.results.runs import config, defended, pictures, record, round_report, score

VOID = {"meta", "link", "img", "br", "input", "wbr"}


class Page(HTMLParser):
    """The elements of a page; fails on tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.elements, self.ids = text, [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(*runs, **options):
    return Page(write_report(runs, **options).read_text())


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record(folder, label="open", undefended=True, failures=1)
    record(folder, label="guarded", changes=defended(scale=0.1), noise=0.9, accuracy=0.4, clients=4)
    return folder


def run_in(out, label):
    (path,) = out.glob(f"{label}-*")
    return path


@pytest.mark.parametrize("labels", [["open"], ["open", "guarded"]])
def test_the_page_is_well_formed_and_needs_nothing_else(out, labels):
    page = page_of(*(run_in(out, label) for label in labels))
    assert len(set(page.ids)) == len(page.ids)
    sources = [a["src"] for a in page.all("img")] + [a["href"] for a in page.all("link")]
    assert all(source.startswith("data:") for source in sources)
    assert not page.all("script") and "url(http" not in page.text and "@import" not in page.text
    links = [reference for reference in re.findall(r'href="([^"]*)"', page.text) if not reference.startswith("#")]
    assert all(link.startswith("data:") or (out / link).is_file() for link in links)
    assert all(image["alt"] for image in page.all("img"))
    assert all(svg.get("aria-label") for svg in page.all("svg"))


def test_the_headline_counts_images_that_were_read_and_failures(out):
    text = page_of(run_in(out, "open")).text
    first, last = (
        sum(
            image.values["best_rank"] == 1
            for v in range(1, 6)
            for image in score(r, v, noise=0.1 * (0.5 + v / 6 + r / 24)).images
        )
        for r in (1, 12)
    )
    assert 0 < last <= first <= 5, "ten reconstructions are five images, attacked in two rounds"
    assert f"The server reconstructed {first} of 5 attacked images<" in text
    assert f": {first} of 5 in round 1, {last} of 5 in round 12.<" in text
    assert "The attack failed on 1 more" in text and "The attack&#39;s loss is not a number." in text
    guarded = page_of(run_in(out, "guarded")).text
    assert "The attack inverting_gradients reconstructed none of 6 attacked images" in guarded
    assert "; up to 46\N{NO-BREAK SPACE}% of such images may leak<" in guarded
    assert "All 6 attacked images, in rounds 1 and 12" in guarded


def test_a_papers_bound_is_named_after_it(out):
    text = page_of(run_in(out, "guarded")).text
    assert "Refiner: 0 of 6<small>PSNR ≥ 15.0 dB</small>" in text
    assert "tag leak" not in text and "tag bounded" not in text


def test_few_images_say_little(tmp_path):
    text = page_of(record(tmp_path, noise=0.9, victims=2)).text
    assert "tag bounded" not in text and "up to 84 % of such images may leak" in text
    assert "only 2 images" in text and "Only 2 uploads were attacked." in text
    assert '<h1 class="tone' not in text


def test_what_an_attack_did_not_read_of_undefended_clients_is_gray(tmp_path):
    run = record(tmp_path, noise=0.9, victims=8, undefended=True)
    text = page_of(run).text
    assert "tag bounded" not in text and '<h1 class="tone' not in text
    assert "Clients had no defense, so nothing protects them: a stronger attack" in text
    brief = write_brief(run, tmp_path / "brief.html").read_text()
    assert "This describes the attack, not a protection" in brief


def test_an_image_that_was_read_is_a_leak_whatever_the_mean(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="") as folder:
        for victim in range(8):
            folder.add_victim(score(1, victim, noise=0.9 if victim else 0.01))
        folder.finish()
    text = page_of(folder.path).text
    assert "The server reconstructed 1 of 8 attacked images<" in text and "tag bounded" not in text
    assert 'class="tone-leak"' in text


def test_what_users_name_is_escaped(tmp_path):
    settings = config(data={"name": "<script>alert(1)</script>"}, defense={"name": "$x^2$ & <b>"})
    with RunFolder.open_or_create(tmp_path, label="x", config=settings, config_text="<script>") as folder:
        folder.write_threat_model(["<img src=x onerror=alert(1)>"])
        folder.write_partition([[3, 4], [5, 0]], ["$cat_1$ <i>", "</svg><script>"])
        folder.add_victim(score(1, 0, noise=0.1, failure="<u>broken</u>"))
        folder.finish()
    page = page_of(folder.path)
    assert not page.all("script") and not page.all("u") and not page.all("i")
    assert "&lt;script&gt;" in page.text and "$cat_1$" in page.text


def test_an_interrupted_run_says_so_and_shows_what_there_is(tmp_path):
    path = record(tmp_path, finish=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "image", "psnr": 1')
    (path / "reconstructions" / "round-0001.safetensors").write_bytes(b"half")
    text = page_of(path).text
    assert "This run was interrupted." in text and "is cut off" in text and "round-0001.safetensors" in text
    assert "12 rounds of training and 12 attacked images" in text


def test_a_run_killed_before_its_first_record_has_a_page(tmp_path):
    with RunFolder.open_or_create(tmp_path, label="x", config=config(), config_text="seed: 0") as folder:
        pass
    assert "No image was attacked" in page_of(folder.path).text
    assert "2 runs" in page_of(folder.path, record(tmp_path), out=tmp_path / "deep" / "page.html").text


def test_training_without_attack_and_attack_without_training(tmp_path):
    training, attack = (
        RunFolder.open_or_create(tmp_path, label=label, config=config(victims=n), config_text="")
        for n, label in enumerate(("training", "attack"))
    )
    training.add_round(round_report(), Evaluation(accuracy=0.5, loss=1.0, num_examples=1))
    attack.add_victim(score(0, 0, noise=0.1, exact=True))
    for folder in (training, attack):
        folder.finish()
    assert "No image was attacked" in page_of(training.path).text
    assert (
        "The server reconstructed the attacked image" in page_of(attack.path).text
        and "PSNR\N{NO-BREAK SPACE}&gt;\N{NO-BREAK SPACE}100\N{NO-BREAK SPACE}dB" in page_of(attack.path).text
    )
    assert "2 runs" in page_of(training.path, attack.path).text


def test_the_comparison_takes_pmm_from_the_undefended_run(out):
    page = page_of(run_in(out, "open"), run_in(out, "guarded"))
    accuracies = re.findall(r'data-label="(?:Accuracy|Accuracy kept)">([\d.]+)\s%</td>', page.text)
    undefended, guarded, pmm = (float(value) for value in accuracies[:3])
    assert pmm == pytest.approx(100 * guarded / undefended, abs=0.2)
    assert "defense=dp_noise" in page.text and "defense.scale=0.1" in page.text


def test_runs_that_differ_in_the_seed_share_a_point_with_error_bars(tmp_path):
    runs = [record(tmp_path, changes={"seed": seed}, accuracy=0.5 + seed / 50) for seed in range(3)]
    labels = [svg["aria-label"] for svg in page_of(*runs).all("svg")]
    assert sum("A, B, C at" in label for label in labels) == 3


def test_wrong_folders_are_one_line(tmp_path, out):
    with pytest.raises(UserError, match="one or more runs"):
        write_report([])
    with pytest.raises(UserError, match="no such folder"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="expected to be a file"):
        write_report([run_in(out, "open")], tmp_path)


@pytest.mark.long
def test_the_picture_of_pairs(tmp_path, out):
    images = (pictures(5, (1, 28, 28)) * 255).to(torch.uint8).numpy()
    grid_picture(list(images), [*images[:4], None], ["$a_b$"] * 5, tmp_path / "new" / "grid.png")
    with Image.open(tmp_path / "new" / "grid.png") as picture:
        assert picture.width > picture.height > 100
        plain = picture.size
    grid_picture(list(images), list(images), ["a"] * 5, tmp_path / "grid.png", transformed=[None, *images[1:]])
    with Image.open(tmp_path / "grid.png") as picture:
        assert (picture.width / plain[0], picture.height) == (pytest.approx(3 / 2, abs=0.01), plain[1])
    path = run_in(out, "open")
    shutil.rmtree(path / "pictures", ignore_errors=True)
    write_report([path])
    assert (path / "pictures" / "reconstructions.png").is_file()


def test_both_attackers_are_shown_side_by_side(tmp_path):
    runs = [record(tmp_path, label=name, noise=0.9, adaptive=adaptive) for name, adaptive in (("a", 0.02), ("b", None))]
    page, without = page_of(runs[0]), page_of(runs[1])
    headline = "The server, knowing the defense, reconstructed 6 of 6 attacked images"
    assert headline in page.text and ": 6 of 6 in round 1, 6 of 6 in round 12.</p>" in page.text
    assert "The plain attacker does not know the defense, the adaptive one does." in page.text
    assert "Round 12, plain attacker" in page.text and "0 of 6" in page.text
    assert "It looks twice." in page.text and "adaptive attacker; 95 % CI" in page.text
    assert "tag bounded" not in page.text and "tag leak" in page.text and "tag leak" not in without.text
    assert len(page.all("img")) == 3 * (12 + 3) and len(without.all("img")) == 2 * (12 + 3)
    told = re.sub(r"<style>.*?</style>", "", without.text, flags=re.DOTALL)
    assert "adaptive" not in told.replace("threat_model=adaptive", ""), "but how to ask for that attacker"
    assert (
        Image.open(runs[0] / "pictures" / "reconstructions.png").width
        > 1.3 * Image.open(runs[1] / "pictures" / "reconstructions.png").width
    )


@pytest.mark.long
def test_many_attacked_rounds_are_a_curve_and_a_closed_table(tmp_path, monkeypatch):
    run = record(tmp_path, adaptive=0.02)
    few = page_of(run).text
    monkeypatch.setattr(single, "ROUNDS_SHOWN", 1)
    many = page_of(run).text
    assert "Over the attacked rounds" not in few and "<details open>\n    <summary>By attacked round" in few
    assert "Over the attacked rounds" in many and "<details>\n    <summary>By attacked round" in many
    assert "Mean PSNR, dB, over the attacked rounds" in many


def test_a_first_round_that_failed_hides_no_curve_of_texts(monkeypatch):
    monkeypatch.setattr(single, "ROUNDS_SHOWN", 1)
    statistic = Statistic(mean=0.5, ci95=None, n=1, groups=1, median=0.5, min=0.5, max=0.5)
    read = LeakageResult(metrics={"token_f1": statistic}, images=1, round=2)
    failed = LeakageResult(images=1, failures=1, round=1)
    assert "over the attacked rounds" in str(single._over_rounds([failed, read, replace(read, round=3)]))


@pytest.mark.long
def test_rounds_that_were_read_exactly_stand_on_top_of_their_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(single, "ROUNDS_SHOWN", 1)
    drawn = []

    def keep(curves, **told):
        drawn.append((curves, told["y"]))
        return line_chart(curves, **told)

    monkeypatch.setattr(single, "line_chart", keep)
    monkeypatch.setattr(
        runs, "score", lambda *which, noise, **told: score(*which, noise=noise, **told, exact=noise == 0.02)
    )
    page_of(record(tmp_path, noise=0.1, adaptive=0.02))
    (noisy, exact), title = next((curves, y) for curves, y in drawn if y.startswith("Mean PSNR"))
    assert title.endswith("exact ones on top")
    assert len(exact.y) == len(noisy.y) == 2 and max(noisy.y) < min(exact.y) < math.inf


def test_failures_and_unknown_originals_are_not_called_unreconstructed(tmp_path):
    text = write_report([kinds.attack(tmp_path / "failed", failures=6)]).read_text()
    assert "the attack failed on 6" in text and "0 of 6" not in text and "All 6 attacked images" in text
    text = write_report([kinds.attack(tmp_path / "some", failures=2, noise=0.9)]).read_text()
    assert text.count("0 of 4") > 1 and "0 of 6" not in text and "of 6 images" not in text
    text = write_report([kinds.audit(tmp_path / "unknown", known=False)]).read_text()
    assert "Each original, if it is known, is next to its reconstruction from an undefended upload that the" in text
    assert "Leakage by metric" not in text, "no empty table"
