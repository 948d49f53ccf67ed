"""The Hugging Face hub where it does not answer."""

import socket
import time

import pytest

from fl_privacy.data import sources
from fl_privacy.data.sources import HubData, require
from fl_privacy.errors import UserError


def test_a_hub_that_does_not_answer_is_told_in_a_line_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    require("datasets")
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.5)
    with socket.socket() as silent:  # takes connections, but only as many as wait
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(UserError, match=r"does not answer within 0\.5 s") as error:
            HubData("nobody/has-this-data-set").tables()
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 5
    assert not require("huggingface_hub.constants").HF_HUB_OFFLINE and not require("datasets.config").HF_HUB_OFFLINE


@pytest.mark.parametrize("proxies", [{}, {"http": "http://proxy"}, {"all": "http://proxy"}])
def test_a_hub_that_answers_or_is_behind_a_proxy_is_asked(
    proxies: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "getproxies", lambda: proxies)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1] if not proxies else 1}")
        assert sources._Reached(5.0)
