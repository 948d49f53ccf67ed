"""Who hears how far work is."""

from fl_privacy.progress import Stage, counted, listening, share_done


def test_a_listener_hears_of_steps_within_steps() -> None:
    heard: list[tuple[Stage, ...]] = []
    with listening(heard.append):
        for _ in counted("client", range(2)):
            for _ in counted("step", range(2)):
                pass
    assert heard[:3] == [
        (Stage("client", 0, 2),),
        (Stage("client", 0, 2), Stage("step", 0, 2)),
        (Stage("client", 0, 2), Stage("step", 1, 2)),
    ]
    shares = [share_done(stages) for stages in heard if stages]
    assert shares == sorted(shares)
    assert shares[-1] == 0.75
    assert heard[-1] == ()


def test_without_a_listener_items_come_as_they_are() -> None:
    assert list(counted("step", [3, 1, 2])) == [3, 1, 2]
    assert list(counted("step", [])) == []


def test_outside_of_its_context_nobody_listens() -> None:
    heard: list[tuple[Stage, ...]] = []
    with listening(heard.append):
        pass
    list(counted("step", range(3)))
    assert not heard


def test_work_that_ends_early_is_over() -> None:
    heard: list[tuple[Stage, ...]] = []
    with listening(heard.append):
        for _ in counted("client", range(2)):
            try:
                for _ in counted("step", range(5)):
                    raise ValueError
            except ValueError:
                pass
    assert (Stage("client", 1, 2),) in heard
    assert heard[-1] == ()
