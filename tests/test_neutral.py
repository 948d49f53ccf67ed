"""What comes from anybody's file neither colors, hides nor reorders what a terminal or a page shows beside it."""

import io
import json
import re
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import fl_privacy
from fl_privacy.cli.faults import Terminal
from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import in_one_line, neutral, say
from fl_privacy.report import write_brief, write_report
from fl_privacy.report.page import TEMPLATES, render
from tests.results.runs import defended, record

pytestmark = pytest.mark.usefixtures("undrawn_charts")

HOSTILE = "a\x1b[2J\x1b]0;title\x07\u202egpj.exe\u2066\u200b\x9b31m\rb"
SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]")
MARKS = set(range(0x600, 0x606)) | {0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
"""Signs of numbers and verses, which are seen."""


def test_every_character_that_is_not_seen_is_replaced_and_all_others_stay() -> None:
    for number in range(0x110000):
        kind, letter = unicodedata.category(chr(number)), chr(number)
        odd = kind in {"Cc", "Cf", "Zl", "Zp"} and letter not in "\n\t" and number not in MARKS
        if kind in {"Cn", "Cs"} or 0x13430 <= number < 0x13440:  # not in use, or the joints of hieroglyphs
            continue
        assert (neutral(letter) == " ") == (odd or letter == " "), hex(number)


def test_lines_and_letters_of_all_scripts_stay() -> None:
    text = "first\n\tsecond 50\N{NO-BREAK SPACE}% \u05d0 \u0628 \u4e2d \U0001f600"
    assert neutral(text) == text


@pytest.mark.parametrize("aside", [False, True])
def test_what_is_said_is_neutral(aside: bool, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{HOSTILE}\nnext", aside=aside)
    said = capsys.readouterr()
    text = said.err if aside else said.out
    assert not SHOWN.search(text) and text.endswith("\nnext\n") and "gpj.exe" in text


def test_a_table_keeps_its_own_colors_alone() -> None:
    written = io.StringIO()
    terminal = Terminal(file=written, force_terminal=True, color_system="standard", width=200)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    terminal.print(table, HOSTILE, markup=False)
    own = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "\x1b[" in written.getvalue() and "gpj.exe" in own
    assert not SHOWN.search(own)
    assert "\x1b[2J" not in written.getvalue()


def test_pages_of_a_folder_that_somebody_sent_are_neutral(tmp_path: Path) -> None:
    runs = [
        record(tmp_path, label=HOSTILE.replace("\x1b", "")),
        record(tmp_path, label="b", changes=defended(scale=0.1)),
    ]
    for run in runs:
        file = run / "config.json"
        if file.exists():
            file.write_text(file.read_text().replace("lenet", json.dumps(HOSTILE)[1:-1]))
    pages = [write_report(runs[:1]), write_report(runs), write_brief(runs[0], None)]
    texts = [page.read_text() for page in pages]
    assert "gpj.exe" in texts[0]
    assert not any(SHOWN.search(text) for text in texts)


def test_every_page_is_rendered_at_the_one_place() -> None:
    page = render("live_status.html.j2", live=True, runs=[], done=0, planned=None, over=HOSTILE)
    assert not SHOWN.search(page)
    package = TEMPLATES.parents[1]
    callers = [path.name for path in package.rglob("*.py") if "get_template(" in path.read_text()]
    assert callers == ["page.py"]


def test_report_prints_no_escapes_of_a_folder_s_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path).rename(tmp_path / HOSTILE.replace("/", ""))
    assert run_command_line(["report", str(folder)]) == 0
    said = capfd.readouterr()
    assert "gpj.exe" in said.out and not SHOWN.search(said.out + said.err)
    assert run_command_line(["report", str(tmp_path / f"{HOSTILE}none")]) == 2
    assert not SHOWN.search(capfd.readouterr().err)


def test_there_is_one_kind_of_console() -> None:
    package = TEMPLATES.parents[1]
    assert not [path for path in package.rglob("*.py") if re.search(r"(?<![\w.])Console\(", path.read_text())]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (Path(fl_privacy.__file__).parent.with_name("fl_privacy_app"), "decoder.py, line 1, called in own.py, line 9"),
        (Path("/home/a/.local/lib/python3.11/site-packages/other"), "decoder.py, line 1"),
    ],
)
def test_an_error_names_the_user_s_own_code_and_no_installed_one(folder: Path, said: str) -> None:
    inner = compile("raise KeyError('x')", json.decoder.__file__, "exec")
    outer = compile("\n" * 8 + "exec(inner)", str(folder / "own.py"), "exec")
    try:
        exec(outer, {"inner": inner})
    except KeyError as error:
        assert error.__traceback__ is not None, "its first frame is this one"
        assert in_one_line(error.with_traceback(error.__traceback__.tb_next)) == f"KeyError: 'x' ({said})"
    else:
        pytest.fail("no error")


def test_what_an_error_was_raised_from_is_named_too() -> None:
    first, second, third = (
        KeyError("size"),
        ImportError("no module\nmore"),
        ValueError("No target, see the chained error."),
    )
    third.__cause__, second.__cause__ = second, first
    assert in_one_line(third) == "ValueError: No target, see the chained error., caused by KeyError: 'size'"
    first.__cause__ = third  # without end
    assert in_one_line(second).startswith("ImportError: no module")
    second.__cause__ = second
    assert in_one_line(second) == "ImportError: no module"
    unset = UnboundLocalError("cannot access local variable 'result'")
    unset.__context__ = FileNotFoundError("no such file: ecg.h5")
    assert in_one_line(unset).endswith("'result', caused by FileNotFoundError: no such file: ecg.h5")


def test_a_message_that_ends_in_a_colon_goes_on_with_its_next_line() -> None:
    error = RuntimeError("Error(s) in loading state_dict for Net:\n\tMissing key(s): a. " + "b" * 500 + "\n\tmore")
    said = in_one_line(error)
    assert said.startswith("RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): a. b")
    assert len(said) < 300 and "more" not in said
    assert in_one_line(ValueError("no\nmore")) == "ValueError: no"


def test_colors_of_an_error_are_left_out_of_its_line() -> None:
    error = ValueError("\x1b[1mdo those steps\x1b[0m only")
    assert in_one_line(error) == "ValueError: do those steps only"
