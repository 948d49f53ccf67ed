"""``pytest --fl-privacy``: tests with the fixture ``leakage`` fail if an app leaks more than its baseline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fl_privacy.errors import UserError

if TYPE_CHECKING:
    from fl_privacy.auditing.regression.measurement import Measurement
    from fl_privacy.dp_check.verdict import ClaimVerdict

BASELINE = "leakage_baseline.json"  # name of the file in pytest's root folder, to be committed
_SAID = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options."""
    group = parser.getgroup("fl-privacy", "leakage of federated updates (fl_privacy)")
    for name, said in (
        ("", "Run the tests that measure leakage, and compare with the baseline."),
        ("-update", "Measure and write the baseline anew; review and commit it."),
    ):
        group.addoption(f"--fl-privacy{name}", action="store_true", help=said)
    said = f"The baseline; by default {BASELINE} in the root folder."
    group.addoption("--fl-privacy-baseline", metavar="FILE", help=said)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that can't work together."""
    config.stash[_SAID] = []
    if config.getoption("--fl-privacy-update") and hasattr(config, "workerinput"):
        raise pytest.UsageError("--fl-privacy-update is expected without pytest-xdist's -n, but got -n; leave it out.")


@pytest.fixture
def leakage(request: pytest.FixtureRequest) -> LeakageCheck:
    """Return the check with which a test measures leakage; the test is skipped without ``--fl-privacy``."""
    config = request.config
    update = bool(config.getoption("--fl-privacy-update"))
    if not update and not config.getoption("--fl-privacy"):
        pytest.skip("measures leakage: run pytest --fl-privacy")
    named = config.getoption("--fl-privacy-baseline")
    path = Path(named) if named else config.rootpath / BASELINE
    return LeakageCheck(test=request.node.nodeid, path=path, update=update, said=config.stash[_SAID])


class LeakageCheck:
    """Fixture that compares the leakage measured by a test with its baseline or, if ``update``, stores a new one."""

    def __init__(self, *, test: str, path: Path, update: bool, said: list[str]) -> None:
        self.test, self.path, self.update, self.said = test, path, update, said
        self._measured = 0

    def training(self, **settings: Any) -> None:
        """Check uploads of the app's own training function; for the arguments see ``measure_training``."""
        from fl_privacy.auditing.regression import measure_training  # noqa: PLC0415

        self._check(lambda: measure_training(**settings))

    def run(self, folder: str | Path, *, metric: str = "psnr") -> None:
        """Fail if the attack in ``folder``, of a run or an audit, leaks more by ``metric`` than the stored baseline."""
        from fl_privacy.auditing.regression import measure_run  # noqa: PLC0415

        self._check(lambda: measure_run(Path(folder), metric=metric))

    def epsilon(
        self, mechanism: Any, claimed: float, *, delta: float = 1e-5, contradicts: bool = False, **asked: Any
    ) -> None:
        """Draw from ``mechanism`` and fail if the draws statistically contradict a ``claimed`` epsilon at ``delta``.

        Nothing is compared with a stored baseline. If ``contradicts``, the test fails unless the draws contradict the
        claim. ``asked``: see :func:`verdict_on`.
        """
        try:
            found = verdict_on(mechanism, claimed=claimed, delta=delta, **asked)
        except UserError as error:
            pytest.fail(str(error), pytrace=False)
        self.said.append(f"{self.test}: {found.sentence}")
        if (found.status == "contradicted") != contradicts:
            pytest.fail(found.sentence, pytrace=False)

    def _check(self, measure: Callable[[], Measurement]) -> None:
        from fl_privacy.auditing.regression import compare, read_baseline, write_baseline  # noqa: PLC0415
        from fl_privacy.auditing.regression.measurement import expect_enough  # noqa: PLC0415

        self._measured += 1
        name = self.test if self._measured == 1 else f"{self.test} #{self._measured}"
        try:
            now, kept = measure(), read_baseline(self.path)
            if self.update:
                expect_enough(now.uploads)
                write_baseline(self.path, {**kept, name: now})
            found = compare(kept[name], now) if name in kept and not self.update else None
        except UserError as error:
            pytest.fail(str(error), pytrace=False)
        if self.update:
            self.said.append(f"{name}: written to {self.path.name}.")
            return
        if found is None:
            pytest.fail(
                f"{self.path} is expected to hold a baseline of {name}, but has none; run pytest --fl-privacy-update"
                " and commit it.",
                pytrace=False,
            )
        self.said.append(f"{name}: {found.sentence}")
        if found.worse:
            pytest.fail(f"{found.sentence} If that is meant, run pytest --fl-privacy-update.", pytrace=False)


def verdict_on(mechanism: Any, *, claimed: float, delta: float, **asked: Any) -> ClaimVerdict:
    """Test statistically whether ``mechanism`` contradicts a ``claimed`` epsilon at ``delta``.

    ``mechanism``: a defense, a function from an update to the upload, or a Flower mod or strategy; ``UserError`` for
    others. ``asked``: further fields of ``dp_check.check.DpCheckRequest``, such as rounds, clip_norm, draws.
    """
    from fl_privacy.defenses import Defense  # noqa: PLC0415
    from fl_privacy.dp_check.check import DpCheckRequest, tested  # noqa: PLC0415
    from fl_privacy.dp_check.of_defense import on_defense  # noqa: PLC0415
    from fl_privacy.flower.dp_mechanisms import verdicts_on  # noqa: PLC0415

    fields = sorted(set(DpCheckRequest.__dataclass_fields__) - {"epsilon", "delta"})
    if unknown := sorted(set(asked) - set(fields)):
        raise UserError(f"leakage.epsilon is expected to get {', '.join(fields)}, but got {unknown[0]}; drop it.")
    question = DpCheckRequest(epsilon=claimed, delta=delta, **asked)
    if isinstance(mechanism, Defense):
        return on_defense(mechanism, question)[0]
    given = inspect.signature(mechanism).parameters.values() if callable(mechanism) else ()
    if sum(parameter.default is parameter.empty for parameter in given) == 1:
        return tested(getattr(mechanism, "__name__", "mechanism"), mechanism, None, question)
    return verdicts_on(mechanism, question)[0]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a sentence on each measurement."""
    if said := config.stash[_SAID]:
        terminalreporter.section("leakage")
        for sentence in said:
            terminalreporter.write_line(sentence)
