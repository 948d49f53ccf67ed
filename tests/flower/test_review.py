"""A review lists a protection only if it runs by default, and names answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.auditing.app.review import Review, review_app
from tests.flower import project_parts as parts
from tests.flower.test_scripts import project
from tests.flower.untouched_apps import PLAIN, write

ENGINE = "    net = PrivacyEngine().make_private(module=net)\n"
OF_A_CONSTANT = f"{PLAIN}\ndef dp(net):\n  if USE_DP:\n{ENGINE}"


def reviewed(folder: Path, client: str, config: str = "") -> Review:
    app = write(folder, "app_reviewed", client)
    path = app / "pyproject.toml"
    path.write_text(path.read_text().replace("lr = 0.1\n", f"lr = 0.1\n{config}"))
    return review_app(app)


@pytest.mark.parametrize("encoding", ["utf-7", "no-such", "rot13"])
def test_code_is_reviewed_in_the_encoding_in_which_python_runs_it(encoding: str, tmp_path: Path) -> None:
    app = write(tmp_path, "app_reviewed", PLAIN)
    code = f"# coding: {encoding}\n# about the data+AAo-import requests+AAo-exec(requests.get(1).text)\n"
    (app / "hidden.py").write_text(code)
    found = review_app(app)
    if encoding == "utf-7":
        assert [note.where for note in (*found.network, *found.runs)] == ["hidden.py:3", "hidden.py:4"]
    else:
        assert found.unread == ["hidden.py"], "Python does not run it either"


def test_only_an_encoding_in_the_first_two_lines_counts_whatever_ends_a_line(tmp_path: Path) -> None:
    app = write(tmp_path, "app_reviewed", PLAIN)
    code = b"#\r\rACM = 1\rx = 1 +ACM- exec(ACM)\r# coding: utf-7\r"  # +ACM- begins a comment in UTF-7
    (app / "hidden.py").write_bytes(code)
    assert [note.where for note in review_app(app).runs] == ["hidden.py:4"]


@pytest.mark.parametrize(
    ("code", "config", "off"),
    [
        (f"{PLAIN}\ndef dp(net, use_dp=False):\n  if use_dp:\n{ENGINE}", "", "use_dp is False"),
        (f"{PLAIN}\ndef dp(net, use_dp=False):\n  if use_dp:\n{ENGINE}\ndp(1, True)", "", ""),
        (f"{PLAIN}\ndef dp(net, use_dp=True):\n  if use_dp:\n{ENGINE}\ndp(1, use_dp=False)", "", ""),
        (f"{PLAIN}\ndef dp(net, use_dp):\n  if use_dp:\n{ENGINE}\ndp(1, USE_DP)\nUSE_DP = 0", "", "use_dp is 0"),
        (f"{PLAIN}\ndef dp(net, use_dp=False):\n  if use_dp:\n{ENGINE}\ndp(1, **more)", "", ""),
        (f"{OF_A_CONSTANT}\nUSE_DP = False", "", "USE_DP is False"),
        (f"{OF_A_CONSTANT}\nUSE_DP = True", "", ""),
        (f"{OF_A_CONSTANT}\nUSE_DP = False\nUSE_DP = True", "", ""),
        (f'{OF_A_CONSTANT}\nUSE_DP = os.getenv("DP", "0") == "1"', "", "USE_DP is False"),
        (
            f'{PLAIN}\ndef dp(net, context):\n  on = bool(context.run_config["use-dp"])\n  if on:\n{ENGINE}',
            "use-dp = false\n",
            "on is False",
        ),
        (
            f'{PLAIN}\ndef dp(net, context):\n  if context.run_config["noise-multiplier"] > 0:\n{ENGINE}',
            "",
            "",
        ),
        (f"{PLAIN}\ndef dp(net, use_dp=False):\n  if not use_dp:\n    return net\n{ENGINE[2:]}", "", "use_dp is False"),
        (f"{PLAIN}\ndef dp(net):\n{ENGINE}\ndef f(on=0):\n  if on:\n    dp(1)", "", "on is 0"),
        (
            f"{PLAIN}\nclass C:\n  def __init__(self, dp=False):\n   self.dp = dp\n  def fit(self, net):\n"
            f"   if self.dp:\n{ENGINE}",
            "",
            "self.dp is False",
        ),
        (
            f'{PLAIN}\nparser.add_argument("--use-dp", action="store_true")\n'
            f"def dp(net, args):\n  if args.use_dp:\n{ENGINE}",
            "",
            "args.use_dp is False",
        ),
        (
            f"{PLAIN}\n@dataclass\nclass C:\n  dp: bool = False\ndef f(c, net):\n  if c.dp:\n{ENGINE}",
            "",
            "c.dp is False",
        ),
    ],
)
def test_a_protection_that_is_off_by_default_is_none(tmp_path: Path, code: str, config: str, off: str) -> None:
    found = reviewed(tmp_path, code, config)
    listed = found.off if off else found.protections
    assert [note.what.partition(":")[0] for note in listed] == ["PrivacyEngine"]
    assert not (found.protections if off else found.off)
    said = found.in_words()
    assert (f"Off by default, so no protection:\n  PrivacyEngine: {off} (" in said) == bool(off)
    assert ("Protections: none" in said) == bool(off)


def test_a_condition_that_nothing_says_is_named(tmp_path: Path) -> None:
    found = reviewed(tmp_path, f"{PLAIN}\ndef dp(net, use_dp):\n  if use_dp:\n{ENGINE}")
    assert [note.what for note in found.protections] == [
        "PrivacyEngine: DP-SGD of Opacus, within the training of a client; only if use_dp"
    ]


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ("ClientApp(mods=[fixedclipping_mod] if DP else [])", True),
        ("ClientApp(mods=[own, *([fixedclipping_mod] if DP else ())])", True),
        ("ClientApp(mods=mods)\nmods = []\nif DP:\n    mods.append(fixedclipping_mod)", True),
        ("ClientApp(mods=mods)\nmods = [fixedclipping_mod]", False),
        ("ClientApp()\nif DP:\n    own = LocalDpMod(1.0, 0.5, epsilon=6.0, delta=1e-5)", True),
    ],
)
def test_mods_behind_a_flag(tmp_path: Path, given: str, off: bool) -> None:
    found = reviewed(tmp_path, PLAIN.replace("ClientApp()", given) + "\nDP = False\n")
    assert (len(found.off), len(found.protections)) == (int(off), int(not off)) and not found.claims


def test_a_mod_that_no_app_is_given_is_no_protection(tmp_path: Path) -> None:
    found = reviewed(tmp_path, f"{PLAIN}\nKNOWN = [fixedclipping_mod]\n")
    assert not found.protections and not found.off


CLIENT_FN = """
class Base(NumPyClient):
    def get_parameters(self, config): ...
    def help(self): ...
class Mine(Base):
    def fit(self, parameters, config): ...
    def get_properties(self, config): ...
def client_fn(context): return Mine().to_client()
app = ClientApp(client_fn)
"""


def test_clients_of_older_apps_have_their_answers(tmp_path: Path) -> None:
    found = review_app(write(tmp_path, "app_older", CLIENT_FN))
    assert [note.what for note in found.answers] == ["get_parameters of Base", "fit of Mine", "get_properties of Mine"]
    assert "Clients answer:\n  get_parameters of Base (app_older/client.py:3)" in found.in_words()


def test_projects_without_app_format_are_reviewed(tmp_path: Path) -> None:
    found = review_app(project(tmp_path, server=parts.SERVER, client=parts.CLIENT, network=parts.NETWORK))
    assert (found.server, found.client) == ("server.py", "client.py")
    assert {note.what.partition(" ")[0] for note in found.answers} == {"fit", "evaluate", "get_parameters"}
    assert f"{tmp_path.name}: server.py, client.py; parsed, not run." in found.in_words()


def test_a_review_imports_nothing_slow(tmp_path: Path) -> None:
    client = PLAIN.replace("ClientApp()", "ClientApp(mods=[LocalDpMod(7.0, 1.0, epsilon=6.0, delta=1e-5)])")
    server = "\nstrategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1, 1, 2)\n"
    folder = write(tmp_path, "app_quick", client, f"from flwr import x\n{server}")
    slow = "{'torch', 'flwr', 'ray', 'opacus', 'scipy', 'torchvision', 'datasets', 'pandas'}"
    program = "import sys; from fl_privacy.cli.main import run_command_line\nassert not run_command_line(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(sorted({slow} & set(sys.modules)))", "review", str(folder)],
        env={**os.environ, "FL_PRIVACY_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert "spends epsilon" in done.stdout
