"""The policy that ``experiments/run_bundles.py`` writes names what a run's messages held, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.site.gate.filtering import Records, admit, raw_array, release
from fl_privacy.site.gate.policy import SitePolicy, parse_policy
from fl_privacy.site.gate.rules import RefusedError

ROOT = Path(__file__).parents[2]
FAB = "0" * 64


def message(way: str, kind: str, *, arrays: Any = (), config: Any = ()) -> dict[str, Any]:
    shaped = {
        name: {key: ["float32", list(shape), ""] for key, shape in held.items()} for name, held in dict(arrays).items()
    }
    return {"way": way, "kind": kind, "arrays": shaped, "metrics": {}, "config": dict(config)}


@pytest.fixture
def vertical(monkeypatch: pytest.MonkeyPatch) -> SitePolicy:
    """Rows leave in reply to a query; a training message has no reply that anybody waits for."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from run_bundles import policy_of  # noqa: PLC0415

    heard = [
        message("heard", "query.embed", arrays={"arrays": {"e": (rows, 4)}}, config={"config": {"pos": 1}})
        for rows in (5, 7, 6)
    ]
    sent = [message("sent", "query.embed"), message("sent", "train.step", arrays={"gradients": {"g": (7, 4)}})]
    return parse_policy(policy_of([*sent, *heard], FAB, Path("/data")).encode(), "site.yaml", Path("/site"))


def test_rows_of_the_app_s_choice_pass_up_to_the_largest_number(vertical: SitePolicy) -> None:
    for shape, passes in (((7, 4), True), ((1, 4), True), ((8, 4), False), ((7, 5), False)):
        reply = Records(arrays={"arrays": {"e": raw_array(np.ones(shape, np.float32))}}, config={"config": {"pos": 2}})
        if passes:
            assert release(vertical, "query.embed", Records(), reply) == reply
        else:
            with pytest.raises(RefusedError):
                release(vertical, "query.embed", Records(), reply)


def test_a_number_that_is_no_list_is_written_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from run_bundles import policy_of  # noqa: PLC0415

    heard = [message("heard", "query", arrays={"arrays": {"n": ()}})]
    policy = parse_policy(policy_of(heard, FAB, Path("/data")).encode(), "site.yaml", Path("/site"))
    with pytest.raises(RefusedError, match="n is of shape"):
        release(policy, "query", Records(), Records(arrays={"arrays": {"n": raw_array(np.ones((), np.float32))}}))


def test_a_message_without_a_reply_is_answered_by_nothing(vertical: SitePolicy) -> None:
    gradient = {"gradients": {"g": raw_array(np.ones((7, 4), np.float32))}}
    assert admit(vertical, "train.step", Records(arrays=gradient)).arrays == gradient
    assert release(vertical, "train.step", Records(arrays=gradient), Records()) == Records()
    with pytest.raises(RefusedError):
        release(vertical, "train.step", Records(arrays=gradient), Records(arrays=gradient))
    with pytest.raises(RefusedError):
        admit(vertical, "train.other", Records())


def test_a_text_with_the_day_is_bounded_by_its_length_and_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from run_bundles import policy_of  # noqa: PLC0415

    sent = message("sent", "train", config={"config": {"save_path": "results/2026-11-30_01-02", "mode": "fast"}})
    policy = parse_policy(policy_of([sent], FAB, Path("/data")).encode(), "site.yaml", Path("/site"))
    later = {"save_path": "results/2027-01-01_10-20", "mode": "fast"}
    assert admit(policy, "train", Records(config={"config": later})).config == {"config": later}
    for other in ({"mode": "slow"}, {"save_path": "results/2026-11-30_01-023"}):
        with pytest.raises(RefusedError):
            admit(policy, "train", Records(config={"config": other}))
