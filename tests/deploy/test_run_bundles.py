"""Runs that bring their app to real nodes with TLS and keys, which have nothing of it; `make test-deploy`."""

import hashlib
import json
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fl_privacy.cli.main import run_command_line
from fl_privacy.site.deploy.loopback import LoopbackFederation, Secured, loopback_federation
from fl_privacy.site.deploy.writing import Deployment, write_deployment
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.policy import SitePolicy, read_policy
from tests.deploy import policy_app
from tests.deploy.policy_app import EXAMPLES, LOSS
from tests.deploy.test_site_policy import APP, POLICY, RUN_SECONDS

pytestmark = pytest.mark.deploy

BROUGHT = APP.replace("tests.deploy.policy_app", "brought.both").replace("behind-a-policy", "NAME")
RULES = POLICY.partition("app:")[0].replace(
    "evaluate: refuse", "evaluate: {metrics: {allow: [num-examples, accuracy]}}"
)


def app_in(folder: Path, name: str) -> str:
    """Write an app of its own package, and return the SHA-256 of its bundle."""
    (folder / "brought").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(BROUGHT.replace("NAME", name))
    (folder / "brought" / "__init__.py").touch()
    (folder / "brought" / "both.py").write_text(Path(policy_app.__file__).read_text())
    return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()


def entries_of(policy: SitePolicy) -> list[tuple[str, str, str, str]]:
    assert policy.budget is not None
    found = Ledger(policy.budget.ledger, policy.budget.anchor).entries()
    return [(entry.kind, entry.outcome, entry.fab, entry.approved_by) for entry in found]


def test_sites_answer_the_runs_that_they_approve_and_no_others(tmp_path: Path) -> None:
    deployment = Deployment.read(write_deployment(tmp_path / "keys", nodes=2, host="localhost", port=8000).parent)
    known, other = app_in(tmp_path / "known", "known"), app_in(tmp_path / "other", "other")
    server, sites = deployment.superlink, list[Path]()
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    with loopback_federation(LoopbackFederation(tmp_path / "run", secured, {"OMP_NUM_THREADS": "1"})) as federation:
        federation.start_superlink()
        for number, runs in enumerate((f"{{allow: [{{fab: {known}}}]}}", "{approve: each run}")):
            place = tmp_path / f"site-{number}" / "site.yaml"
            place.parent.mkdir(mode=0o700)
            place.write_text(f"{RULES}runs: {runs}\n")
            place.chmod(0o600)
            sites.append(place)
            node = deployment.node(number)
            federation.register(node / "node.pub")
            extra = ("--policy", str(place))
            federation.start_node(f"node-{number}", {"partition-id": number}, key=node / "node.key", extra=extra)
        for number in range(2):
            federation.wait_for_node(f"node-{number}")
        first, second = (read_policy(place) for place in sites)
        assert second.runs is not None
        folder, numbers = second.runs.folder, dict[str, str]()
        for name in ("known", "other"):  # both wait at the second site, at the same time
            federation.run(name, tmp_path / name, {"out": str(tmp_path / f"{name}.json")})
            federation.wait_for(name, lambda: len(list(folder.glob("*.json"))) > len(numbers), "wait", RUN_SECONDS)
            numbers[name] = next(each.stem for each in folder.glob("*.json") if each.stem not in numbers.values())
        assert run_command_line(["policy", "approve", str(sites[1]), numbers["known"], "--yes"]) == 0
        assert federation.wait("known", RUN_SECONDS) == 0, federation.said("known")[-2000:]
        assert run_command_line(["policy", "approve", str(sites[1]), numbers["other"], "--refuse"]) == 0
        federation.wait("other", RUN_SECONDS)
        said = federation.said("other")

    heard = json.loads((tmp_path / "known.json").read_text())
    told = {"num-examples": 32 * round(EXAMPLES / 32), "train_loss": round(LOSS, 2)}
    assert [each["metrics"] for each in heard["heard"] if each["kind"] == "train"] == [told] * 2
    assert heard["last"] == [1.0] * 16
    assert "this site has not approved the run" in said and other in said
    by_hash = [("train", "sent", known, "allow: fab"), ("evaluate", "sent", known, "allow: fab")]
    assert sorted(entries_of(first)) == sorted([*by_hash, ("run", "refused", other, "")])
    approved = [each[:3] for each in entries_of(second)]
    assert sorted(approved) == sorted([*(each[:3] for each in by_hash), ("run", "refused", other)])
    assert all(each[3] not in {"", "allow: fab"} for each in entries_of(second) if each[1] == "sent")
