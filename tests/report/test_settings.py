from fl_privacy.report.settings import DIFFERENCES_SHOWN, differences, names, overview
from fl_privacy.runs.folder import RunFolder, read_run
from tests.results.runs import config, defended


def run(out, label, **changes):
    with RunFolder.open_or_create(out, label=label, config=config(**changes), config_text="") as folder:
        return read_run(folder.path)


def test_only_what_tells_runs_apart_is_named(tmp_path):
    runs = [
        run(tmp_path, "a", device="cpu"),
        run(tmp_path, "b", device="cuda", **defended(scale=0.1)),
        run(tmp_path, "c", **defended(scale=0.2)),
    ]
    assert differences(runs) == [[], ["defense.scale=0.1"], ["defense.scale=0.2"]]
    own, shared = names(runs)
    assert own == ["defense=none", "defense=dp_noise", "defense=dp_noise"]
    assert shared == "cifar10 · lenet · inverting_gradients"


def test_long_lists_of_differences_are_cut_after_the_telling_ones(tmp_path):
    many = {f"option_{k}": k for k in range(DIFFERENCES_SHOWN)}
    runs = [run(tmp_path, "a", seed=1), run(tmp_path, "b", seed=2, **defended(**many))]
    shown = differences(runs)[1]
    assert shown[0] == "seed=2" and shown[-1] == "and 1 more" and len(shown) == DIFFERENCES_SHOWN + 1


def test_equal_runs_go_by_their_label(tmp_path):
    assert names([run(tmp_path, "a"), run(tmp_path, "b")])[0] == ["a", "b"]


def test_the_overview_names_each_group(tmp_path):
    rows = dict(overview(run(tmp_path, "a")))
    assert rows["Model"] == "lenet: activation relu" and rows["Federation"] == "clients 4, rounds 12, lr 0.1"
    assert rows["Seed"] == "0"
