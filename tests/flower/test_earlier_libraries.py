"""Names and options of earlier libraries, which apps are lent."""

import argparse
import inspect
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.auditing.app.bundle import App
from fl_privacy.auditing.app.environment import around, arrays_writable
from fl_privacy.auditing.app.lent import EARLIER, lent_in_words, older_names_lent, pickles_loaded
from fl_privacy.auditing.instrument.watch import replaced


def test_options_of_earlier_libraries_are_lent_by_their_present_names_and_values() -> None:
    learn, base = pytest.importorskip("sklearn.preprocessing"), pytest.importorskip("sklearn.base")
    linear = pytest.importorskip("sklearn.linear_model")
    code = (
        "import sklearn\nOneHotEncoder(sparse=False)\nSGDClassifier(loss='log')\nLogisticRegression(multi_class='auto')"
    )
    with older_names_lent(code) as asked:
        encoder = learn.OneHotEncoder(sparse=False)
        assert encoder.fit_transform([[1], [2]]).tolist() == [[1, 0], [0, 1]]
        assert base.clone(encoder).sparse_output is False, "its options are still read from its signature"
        assert linear.SGDClassifier(loss="log").loss == "log_loss" == linear.SGDClassifier("log").loss
        assert linear.LogisticRegression(multi_class="auto", C=2).C == 2
        assert linear.SGDClassifier(loss="hinge").loss == "hinge"
    assert asked == [
        "sklearn.preprocessing.OneHotEncoder(sparse=)",
        "sklearn.linear_model.SGDClassifier(loss=)",
        "sklearn.linear_model.LogisticRegression(multi_class=)",
    ]
    with pytest.raises(TypeError):
        learn.OneHotEncoder(sparse=False)


def test_layers_of_a_saved_model_lose_options_of_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    library, inner = ModuleType("elsewhere"), ModuleType("elsewhere.layers")

    class Layer:
        def __init__(self, size: int, name: str = "", **kwargs: Any) -> None:
            self.made = size, name, kwargs

    inner.Layer, library.layers = Layer, inner  # type: ignore[attr-defined]
    for module in (library, inner):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(EARLIER["arguments"], "elsewhere.layers.Layer", {"time_major": ""})
    with older_names_lent("import elsewhere\nload_model('best.h5')") as asked:
        assert inspect.getfullargspec(Layer.__init__).args == ["self", "size", "name"], "Keras reads it"
        assert Layer(size=3, name="last", time_major=False).made == (3, "last", {})
    assert asked == ["elsewhere.layers.Layer(time_major=)"]
    assert "time_major" in EARLIER["arguments"]["keras.layers.LSTM"]


def test_a_module_that_is_elsewhere_now_is_imported_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"here": "", "here/now": "", "here/now/layers": "class Dense: ...\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EARLIER["modules"], "here.compat.v1", "here.now")
    monkeypatch.setitem(sys.modules, "here.compat", ModuleType("here.compat"))
    code = "from here.compat.v1.layers import Dense\nimport here.compat.v1"
    with older_names_lent(code) as asked:
        exec(code, {})
        assert asked == ["here.compat.v1"]
    assert "here.compat.v1" not in sys.modules


def test_only_names_that_an_app_uses_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    code = (
        "import numpy as np, pandas, torch\nfrom torch._six import container_abcs\nfloat(1); np.warnings; x.append(1)"
    )
    with older_names_lent(code) as asked:
        assert not asked, "a word of the code is no use of the name"
        told: dict[str, Any] = {}
        exec("import numpy as np\nfrom torch._six import container_abcs\nx = np.float(1)", told)
        assert told["x"] == 1 and told["container_abcs"].Mapping
        assert np.warnings.warn  # type: ignore[attr-defined]
        column = pandas.Series([1]).append(pandas.Series([2]), ignore_index=True)
        assert (
            column.tolist() == [1, 2] and pandas.DataFrame({"a": [1]}).append(column, ignore_index=True).shape[0] == 2
        )
        assert asked == [
            "torch._six.container_abcs",
            "numpy.float",
            "numpy.warnings",
            "pandas.Series.append",
            "pandas.DataFrame.append",
        ]
    assert "torch._six" not in sys.modules and not hasattr(torch, "_six")
    assert "numpy.float" in lent_in_words(["numpy.float"])


def test_columns_are_dropped_though_their_axis_is_named_too() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1], "b": [2]})
    with older_names_lent("import pandas as pd") as asked:
        assert [*table.drop(columns=["a"], axis=1)] == ["b"] == [*table.drop("a", axis=1)]
    assert asked == ["pandas.DataFrame.drop(axis=)"]


def test_a_default_that_an_earlier_library_had_is_lent() -> None:
    yaml = pytest.importorskip("yaml")
    with older_names_lent("import yaml\nyaml.load(file)") as asked:
        assert yaml.load("a: 1") == {"a": 1} == yaml.load("a: 1", Loader=yaml.SafeLoader)
    assert asked == ["yaml.load(Loader=)"]
    with pytest.raises(TypeError):
        yaml.load("a: 1")


def test_whatever_stands_for_an_earlier_name_exists() -> None:
    for place, names in EARLIER["older"].items():
        if place in {"numpy", "collections", "torch", "pandas", "scipy", "sklearn", "inspect", "time", "fractions"}:
            for stands in names.values():
                if find_spec(stands.partition(".")[0]) is not None:
                    resolve_name(stands)


def test_an_apps_own_objects_are_loaded_in_a_sandbox_as_before_pytorch_2_6(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(classes=3), tmp_path / "pairs.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    asked: list[str] = []
    with pickles_loaded(asked):
        assert torch.load(tmp_path / "weights.pt")["weight"].sum() == 2 and not asked
        assert torch.load(tmp_path / "pairs.pt").classes == 3
        assert asked == ["torch.load of more than weights"]
        with (tmp_path / "both.pt").open("wb") as file:
            file.write(b"some other bytes")
            torch.save(argparse.Namespace(classes=4), file, _use_new_zipfile_serialization=False)
        with (tmp_path / "both.pt").open("rb") as file:
            assert file.read(16) and torch.load(file).classes == 4, "from where the app is in the file"
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / "pairs.pt", weights_only=True)
        library = ModuleType("library")
        exec(
            compile("import torch\nload = lambda path: torch.load(path)", "/x/site-packages/library.py", "exec"),
            vars(library),
        )
        with pytest.raises(Exception, match="Weights only load failed"):
            library.load(tmp_path / "pairs.pt")
    with pytest.raises(Exception, match="Weights only"):
        torch.load(tmp_path / "pairs.pt")


@pytest.mark.parametrize(("code", "inside"), [("import torch", "0"), ("import tensorflow", None)])
def test_transformers_leaves_tensorflow_alone_in_apps_that_do_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, inside: str | None
) -> None:
    monkeypatch.delenv("USE_TF", raising=False)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "client.py").write_text(code)
    app = App(folder=tmp_path / "app", name="app", server="", client="", config={})
    with around(app, tmp_path / "files", None):
        assert os.environ.get("USE_TF") == inside
    assert "USE_TF" not in os.environ
    monkeypatch.setenv("USE_TF", "1")
    with around(app, tmp_path / "files", None):
        assert os.environ["USE_TF"] == "1", "as its user says"


def test_a_replaced_function_keeps_its_signature() -> None:
    import inspect  # noqa: PLC0415

    before = inspect.signature(torch.nn.Linear.__init__)
    with replaced(torch.nn.Linear, "__init__", lambda original, *args, **kwargs: original(*args, **kwargs)):
        assert inspect.signature(torch.nn.Linear.__init__) == before


def test_arrays_of_tables_can_be_written_as_before_pandas_3() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, np.nan], "b": [2.0, 3.0]})
    with arrays_writable("import pandas"):
        for array in (frame.values, frame["a"].values, frame.to_numpy(), frame["a"].to_numpy(), np.asarray(frame["b"])):
            array[...] = 7
        assert np.nan_to_num(frame["a"], copy=False).tolist() == [1, 0]
    assert frame["b"].tolist() == [2, 3], "they are copies"
