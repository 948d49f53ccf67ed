"""What a page's table and first sentences say of images that were read exactly, clearly, or in several rounds."""

import re

import pytest
import torch

from fl_privacy.measure import METRICS, Statistic
from fl_privacy.measure.distractors import Distractors, compare_images, correlation
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.matching import match
from fl_privacy.report import write_report
from fl_privacy.report.headline import _ways
from fl_privacy.runs.folder import Counts, RunFolder
from fl_privacy.types import Batch, Reconstruction, VictimId
from tests.results.runs import config, record, score


def _statistic(least: float) -> Statistic:
    return Statistic(mean=least + 5, ci95=None, n=3, groups=3, median=least + 5, min=least, max=least + 9)


def _cell(text: str, label: str) -> list[str]:
    cells = re.findall(rf'data-label="{label}">(.*?)</td>', text)
    return [re.sub("<small>.*?</small>|<[^>]*>", "", cell) for cell in cells]


def test_exact_images_are_not_compared_with_others(tmp_path):
    """None was identified among a thousand, since none had to be."""
    folder = RunFolder.open_or_create(tmp_path, label="exact", config=config(victims=2), config_text="")
    for victim in range(2):
        folder.add_victim(score(0, victim, noise=0.0001, exact=True))
    folder.finish()
    records = (folder.path / "metrics.jsonl").read_text().replace('"likeness"', '"exact": true, "likeness"')
    (folder.path / "metrics.jsonl").write_text(records)
    text = write_report([folder.path]).read_text()
    assert (
        _cell(text, "Exact") == ["2"]
        and _cell(text, "Identified") == ["\N{EN DASH}"]
        and _cell(text, "Recognizable") == ["\N{EN DASH}"]
    )
    assert "among 1,000 others" not in text


def test_identified_images_are_counted_and_what_is_left_of_none_is_a_dash(tmp_path):
    text = write_report([record(tmp_path, noise=0.1, rounds=2)]).read_text()
    assert set(_cell(text, "Exact")) == {"0"} and set(_cell(text, "Identified")) == {"6"}
    assert set(_cell(text, "Recognizable")) == {"\N{EN DASH}"} and "among 1,000 others" in text


@pytest.mark.parametrize(("least", "less"), [(66.0, False), (31.0, False), (12.0, True), (None, True)])
def test_a_reader_sees_less_only_of_what_is_not_clear(least, less):
    said = _ways(Counts(identified=3, groups=3, candidates=1000), "image", least and _statistic(least))
    assert (
        "The guess may look different" in said
    ) == less and "Identified: the original is nearer to the guess" in said
    assert "Identified:" not in _ways(Counts(exact=3, groups=3), "image", None)


def test_rounds_have_few_columns_that_fit_a_page(tmp_path):
    """Papers' measures are of the last round, in a table of their own."""
    text = write_report([record(tmp_path, adaptive=0.02)]).read_text()
    table = text.split('aria-label="Leakage by round"')[1].split("</table>")[0]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table.split("</thead>")[0])
    assert heads[:3] == ["Round", "Attacker", "Reconstructed"] and len(heads) <= 9
    assert not {metric.title for metric in METRICS.values() if metric.of_papers} & set(heads)


def test_an_image_that_is_all_but_the_original_has_a_likeness_of_all_but_one():
    """Candidates are looked at coarsely, which alone told .997 of it."""
    rng = torch.Generator().manual_seed(0)
    original = torch.rand(1, 1, 16, 16, generator=rng)
    guess = (original + 0.003 * torch.randn(original.shape, generator=rng)).clamp(0, 1)
    batch = Batch(original, torch.zeros(1).long())
    found = match(Reconstruction(id=VictimId(1, 0, 0), batch=Batch(guess, batch.labels)), batch)
    others = Distractors(candidates=PublicImages(images=torch.rand(150, 1, 16, 16, generator=rng)))
    (figures,) = compare_images(found, others, VictimId(1, 0, 0))
    assert figures.aligned_psnr > 45 and figures.likeness > 0.9995 < correlation(guess, original)
    assert correlation(torch.ones(1, 4, 4), original[0, :, :4, :4]) == 0.0
