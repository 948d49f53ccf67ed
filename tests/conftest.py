"""What tests of several folders share."""

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import selection, timing

gc.disable()  # while modules are imported: none of what they hold is garbage


class FileByFile(LoadFileScheduling):  # type: ignore[misc]
    """Tests of a file share its fixtures in one process, those on Ray a cluster, those on sources what is parsed."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _shared_by(self.config.rootpath / file) or file


@cache
def _shared_by(file: Path) -> str:
    text = file.read_text()
    return "ray" if "pytest.mark.ray" in text else "sources" if "from tests.sources import" in text else ""


def _needs_ray(file: Path) -> bool:
    return _shared_by(file) == "ray"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile | None:
    """For ``--dist loadfile``; what marks of ``--dist loadgroup`` say is lost between xdist 3.8 and pytest 9.2."""
    return FileByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(timing)
    config.pluginmanager.register(selection)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files on Ray begin, then those that take longest or have no record, lest one process is left alone with them."""
    chosen = {item.nodeid for item in items}
    seconds = timing.recorded()["files"].copy()
    for name, spent in timing.recorded()["tests"].items():
        if name not in chosen:
            seconds[name.partition("::")[0]] -= spent

    def order(item: pytest.Item) -> tuple[bool, float]:
        file = item.path.relative_to(config.rootpath).as_posix()
        return not _needs_ray(item.path), -seconds.get(file, timing.UNKNOWN)

    items.sort(key=order)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Ray's cluster with the last file that uses it: idle, it takes a minute of CPU from the other tests."""
    if _needs_ray(item.path) and not (nextitem is not None and _needs_ray(nextitem.path)):
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            ray.shutdown()


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage is looked for among what tests make, not among a million objects of modules each time."""
    if "torch" in sys.modules:  # whose warning is an error
        session.config.addinivalue_line("filterwarnings", "error::torch.jit.TracerWarning")
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries call what is left at the end of the process leaked
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where more tests were skipped than ``FL_PRIVACY_MOST_SKIPPED`` allows: nobody sees what is not run."""
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    if (most := os.environ.get("FL_PRIVACY_MOST_SKIPPED")) is None or report is None:
        return
    if (skipped := len(report.stats.get("skipped", ()))) > int(most):
        report.write_line(f"{skipped} tests were skipped, where at most {most} are expected", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def without_waiting_for_the_disk() -> Iterator[None]:
    """Skip waiting for the disk: tests kill processes, not machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_core_each() -> Iterator[None]:
    """Attacks of a test start no processes, since other tests run beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_PRIVACY_CORES", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def workers_are_kept_from_test_to_test() -> Iterator[None]:
    """Leave out the variables that differ between tests: a new worker process takes seconds to load PyTorch."""
    if "torch" not in sys.modules:
        yield
        return
    import loky  # noqa: PLC0415

    def kept(*, env: dict[str, str], get: Any = loky.get_reusable_executor, **settings: Any) -> Any:
        same = {name: value for name, value in env.items() if name not in ("PYTEST_CURRENT_TEST", "FL_PRIVACY_SHARED")}
        return get(env=same, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loky, "get_reusable_executor", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_seeds_for_devices_that_are_not_there() -> Iterator[None]:
    """Without it each ``torch.manual_seed`` notes its whole stack, in half a millisecond, lest a GPU begins to work."""
    torch = sys.modules.get("torch")
    with pytest.MonkeyPatch.context() as patch:
        if torch is not None and not torch.cuda.is_available() and not torch.xpu.is_available():
            for device in ("cuda.random", "xpu.random", "mtia"):
                patch.setattr(f"torch.{device}._lazy_call", lambda call, **settings: None)
        yield


COMPUTED_ONCE = {
    "opacus.accountants.analysis.rdp": "_compute_rdp",  # orders of its accountant, by pure functions of numbers
    "typer.main": "get_command",  # the command line, for hundreds of tests that run a command in this process
    "importlib.metadata": "version",  # of installed packages, which each page and record names
}


@pytest.fixture(scope="session", autouse=True)
def what_tests_ask_for_again_is_computed_once() -> Iterator[None]:
    """Keep the answers of functions that always give the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name in COMPUTED_ONCE.items():
            if (module := sys.modules.get(place)) is not None:
                patch.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture(autouse=True)
def same_draws_in_any_order() -> None:
    """Seed what a test draws without a generator of its own, whatever tests ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:  # Flower draws noise by it
        numpy.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_state_folder_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes in tests keep nothing in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_PRIVACY_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def evaluator_of_digits() -> None:
    """Train what a first use on a machine trains and keeps, lest it counts as a test's own seconds."""
    if "torch" in sys.modules:
        files = importlib.import_module("fl_privacy.models.pretrained.evaluator_files")
        files.find_evaluator(None, (1, 28, 28))


@pytest.fixture(scope="module")
def few_seeds() -> Iterator[None]:
    """Where nothing seeds its noise: of 16,384 seeds, whose first draws take seconds, 256 are tried."""
    mechanism = importlib.import_module("fl_privacy.dp_check.mechanism")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "SEEDS", 256)
        mechanism._streams.cache_clear()
        yield
    mechanism._streams.cache_clear()


@pytest.fixture(scope="module")
def undrawn_charts() -> Iterator[None]:
    """For tests of what is on a page beside its charts; ``tests/report`` looks at drawn ones."""
    from tests.experiment.runs import undrawn  # noqa: PLC0415

    with undrawn():
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster for all tests, whatever else runs on the machine; a run that finds Ray running joins it."""
    ray = pytest.importorskip("ray")
    from fl_privacy.federation.parallel import SWITCHED_OFF  # noqa: PLC0415

    os.environ.update(dict.fromkeys(SWITCHED_OFF, "0"))
    os.environ.update({"RAY_worker_niceness": "0"})  # at 15 they hardly get on beside the other tests
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}},
    )
    yield
    ray.shutdown()
