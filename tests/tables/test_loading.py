"""Tables from files, packages and pandas."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import torch

from fl_privacy.data import Dirichlet, Iid, load_table, table_of
from fl_privacy.data.tables import MISSING, written_numbers
from fl_privacy.errors import UserError
from tests.tables.tables import frame


def test_the_embedded_table_needs_no_download() -> None:
    data = load_table("breast_cancer")
    assert (len(data.train), len(data.test)) == (456, 113)
    assert data.train.input_shape == (30,) and data.train.class_names == ("malignant", "benign")
    torch.testing.assert_close(data.train.inputs.mean(0), torch.zeros(30), atol=0.1, rtol=0)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_gives_what_the_frame_gives(tmp_path: Path, suffix: str) -> None:
    path, whole = tmp_path / f"people{suffix}", frame()
    whole.to_csv(path, index=False) if suffix == ".csv" else whole.to_parquet(path)
    found, known = load_table(path=str(path)), table_of(whole)
    assert found.name == "people" and found.train.schema == known.train.schema
    assert torch.equal(found.train.inputs, known.train.inputs)
    names = [column.name for column in found.train.schema.columns]
    assert names == ["age", "dose", "job", "city", "sex"]


def test_what_is_missing_is_kept_or_dropped() -> None:
    holes = frame(60)
    holes.loc[0, "job"], holes.loc[1, "age"] = None, None
    kept = table_of(holes)
    job = kept.train.schema.columns[2]
    assert MISSING in job.categories and len(kept.train) + len(kept.test) == 60
    assert all(bool(part.inputs.isfinite().all()) for part in (kept.train, kept.test))
    dropped = table_of(holes, missing="drop")
    assert len(dropped.train) + len(dropped.test) == 58
    assert MISSING not in dropped.train.schema.columns[2].categories


def test_groups_and_attributes_are_left_out_of_the_rows() -> None:
    data = table_of(frame(), group_column="city", attribute_column="sex", leave_out=["dose"])
    assert [column.name for column in data.train.schema.columns] == ["age", "job"]
    assert data.train.attribute_names == ("female", "male") and data.train.groups is not None


def test_numbers_that_are_codes() -> None:
    data = table_of(frame().assign(code=[k % 3 for k in range(400)]), categories=["code"])
    assert data.train.schema.columns[-1].categories == ("0", "1", "2")


def test_partitions_share_rows_out() -> None:
    train = table_of(frame()).train
    for partition in (Iid(), Dirichlet(alpha=0.5)):
        parts = partition(train, num_clients=3, seed=0)
        assert torch.cat(list(parts)).unique().numel() == sum(map(len, parts))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target": "nobody"}, "data.target"),
        ({"leave_out": ["nobody"]}, "data.leave_out"),
        ({"missing": "guess"}, "data.missing"),
        ({"standardize": "none"}, "data.standardize"),
        ({"leave_out": ["age", "dose", "job", "city", "sex"]}, "columns besides its target"),
        ({"target": "dose"}, "hold classes, but has 96 different values in 400 rows, as a quantity has"),
    ],
)
def test_a_wrong_setting_is_one_line(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        table_of(frame(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", b""), ("a.csv", b"\xff\xfe\x00"), ("a.parquet", b"PAR1"), ("a.txt", b"a,b")]
)
def test_a_file_that_is_no_table_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="expected"):
        load_table(path=str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("age;dose;label\n1;2;no\n3;4;yes\n", "separated by commas, but its first line has ';'"),
        ("age\tlabel\n1\tno\n3\tyes\n", "separated by commas"),
        ("0.5,1.25,no\n0.75,2.5,yes\n1.5,2.5,yes\n", "name its columns, but has 0.5, 1.25; put a line of names"),
        ("age,kind\n1,no\n3,yes\n", "but got age, kind; set data.target[.]"),
        ("age,label\n1,no\n", "at least 2 rows in which its target label is known, but has 1"),
        ("age,label\n" + "".join(f"1,person {k}\n" for k in range(30)), "30 different values in 30 rows, as a name"),
        ("age,label\n1,no\n2,no\n", "at least 2 classes"),
    ],
)
def test_a_file_that_no_model_learns_from_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        load_table(path=str(tmp_path / "a.csv"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_many_classes_that_are_codes_are_learned(tmp_path: Path) -> None:
    text = "age,code\n" + "".join(f"{k % 7},{k % 30}\n" for k in range(120))
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match="regression is not supported"):
        load_table(path=str(tmp_path / "a.csv"), target="code")
    assert len(load_table(path=str(tmp_path / "a.csv"), target="code", categories=["code"]).train.class_names) == 30


def test_a_small_file_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    part = pyarrow.table({"a": np.zeros(1_000_000, np.int64)})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", part.schema) as writer:
        for _ in range(150):
            writer.write_table(part)
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="unpack to 1200000000"):
        load_table(path=str(tmp_path / "a.parquet"))


def test_no_file_and_no_frame() -> None:
    for wrong in ({"path": "nowhere.csv"}, {"name": "table"}, {"name": "unheard_of"}):
        with pytest.raises(UserError, match="expected"):
            load_table(**wrong)
    with pytest.raises(UserError, match="DataFrame"):
        table_of([[1, 2]])


WRITTEN = {
    "thousands": (["1,234", "12,345.5", "7"], [1234, 12345.5, 7]),
    "comma": (["3,14", "1.234,5", "-2"], [3.14, 1234.5, -2]),
    "money": (["$ 1,200", "-$3.50", "$12"], [1200, -3.5, 12]),
    "per cent": (["12 %", "7.5%", "100%"], [12, 7.5, 100]),
    "spaces": (["1 234", "12\N{NO-BREAK SPACE}345", "5"], [1234, 12345, 5]),
    "decimals": ([Decimal("1.50"), Decimal(3), Decimal("-2e1")], [1.5, 3, -20]),
    "fractions": (["0.5", "1e-3", "2."], [0.5, 0.001, 2]),
}
"""Cells as files have them, and the numbers that they are."""


@pytest.mark.parametrize("kind", WRITTEN)
def test_numbers_that_are_written_otherwise_are_numbers(kind: str) -> None:
    cells, wanted = WRITTEN[kind]
    found = table_of(pd.DataFrame({"x": [*cells, None, "?"] * 20, "label": [0, 1, 0, 1, 1] * 20}))
    (column,) = found.train.schema.columns
    assert column.is_number and (column.low, column.high) == (min(wanted), max(wanted))
    assert found.train.schema.width == 1
    known = written_numbers(pd.Series([*cells, None, "?"], dtype=object))
    assert known.tolist()[:3] == pytest.approx(wanted) and known[3:].isna().all()


@pytest.mark.parametrize(
    "cells", [["1", "2", "30"], ["00501", "10001", "94105"], ["18-25", "26-40", "41-60"], ["1.2.3", "1.2.4", "2.0.0"]]
)
def test_texts_that_are_no_numbers_stay_categories(cells: list[str]) -> None:
    found = table_of(pd.DataFrame({"x": cells * 20, "label": [0, 1, 1] * 20}))
    assert found.train.schema.columns[0].categories == tuple(sorted(cells))


def test_a_column_that_is_named_a_category_is_one_however_it_is_written() -> None:
    frame = pd.DataFrame({"x": ["1,000", "2,000"] * 20, "label": [0, 1] * 20})
    assert table_of(frame, categories=["x"]).train.schema.columns[0].categories == ("1,000", "2,000")


def test_spaces_around_names_of_columns_are_no_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "spaced.csv"
    path.write_text("age , label\n" + "30,0\n41,1\n" * 10, encoding="utf-8-sig")
    for target in (None, "label"):
        found = load_table(path=str(path), target=target)
        assert found.train.schema.names == ("age",) and found.train.class_names == ("0", "1")
    frame = pd.DataFrame({" age": [1, 2] * 10, " label": [0, 1] * 10})
    assert table_of(frame).train.schema.names == ("age",)
    with pytest.raises(UserError, match="expected to differ in name"):
        table_of(frame.assign(age=1))


def test_a_quantity_is_no_target_however_it_is_written() -> None:
    prices = [f"{number:,}" for number in range(1000, 1100)]
    with pytest.raises(UserError, match="as a quantity has"):
        table_of(pd.DataFrame({"x": range(200), "label": prices * 2}))
