"""The privacy test of this app: ``pytest --fl-privacy``."""

from app import BATCH_SIZE, Net, digits, train

from fl_privacy.auditing.regression.plugin import LeakageCheck


def test_updates_leak_no_more_than_before(leakage: LeakageCheck) -> None:
    """Check the leakage of 40 digits, in updates of ``BATCH_SIZE`` each."""
    leakage.training(
        model=Net,
        train=train,
        data=digits(),
        batch_size=BATCH_SIZE,
        images=40,
        attack="auto attack.budget=quick",
    )
