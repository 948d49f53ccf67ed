"""Cores that a process may use: those it is bound to, those its control group pays for, those it was left."""

from pathlib import Path

import pytest

from fl_privacy.federation import cores
from fl_privacy.federation.cores import quotas, shared_among, usable_cores


def limited(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_quotas_of_both_versions_and_of_the_groups_around_are_found(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:cpu,cpuacct:/job/inner\n3:memory:/job\n0::/pod/box\n")
    limited(tmp_path / "cpu" / "job", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    limited(tmp_path / "cpu" / "job" / "inner", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    limited(tmp_path / "pod", cpu__max="300000 100000\n")
    limited(tmp_path / "pod" / "box", cpu__max="max 100000\n")
    assert sorted(quotas(groups, tmp_path)) == [1.5, 3.0]
    assert list(quotas(tmp_path / "none", tmp_path)) == []


@pytest.mark.parametrize(
    ("bound", "quota", "left", "expected"),
    [(8, "max", None, 8), (8, "250000", None, 3), (2, "900000", None, 2), (8, "max", "2", 2), (8, "50000", "5", 1),
     (4, "max", "0", 1), (4, "max", "many", 4)],
)  # fmt: skip
def test_the_least_of_all_limits_counts(  # noqa: PLR0917
    bound: int, quota: str, left: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    limited(tmp_path, cpu__max=f"{quota} 100000\n")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_MOUNTED", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(bound)), raising=False)
    monkeypatch.delenv(cores.LEFT, raising=False)
    if left is not None:
        monkeypatch.setenv(cores.LEFT, left)
    assert usable_cores() == expected


def test_no_more_processes_than_memory_is_free_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.federation.cores.usable_cores", lambda: 8)
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 16000000 kB\nMemAvailable:    5000 kB\n")
    assert [cores.processes_that_fit(size, told) for size in (1000, 10**6, 2 * 10**6, 10**9)] == [8, 5, 2, 1]
    assert cores.processes_that_fit(10**9, tmp_path / "nothing") == 8


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.federation.cores.usable_cores", lambda: 8)
    assert [shared_among(n)[cores.LEFT] for n in (1, 2, 3, 16)] == ["8", "4", "2", "1"]
