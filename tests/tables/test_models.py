"""Networks on rows, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_privacy.errors import UserError
from fl_privacy.models import (
    FlTabular,
    LeNet,
    TableLogistic,
    TableMLP,
    TableResNet,
    build_fitting,
    check_table_model,
)
from fl_privacy.types.schema import schema_of
from tests.tables.tables import dataset

MODELS = [TableMLP, TableLogistic, FlTabular, TableResNet]


@pytest.mark.parametrize("network", MODELS)
def test_a_network_gives_logits(network: type[nn.Module]) -> None:
    train = dataset().train
    model = build_fitting(network, train.architecture, seed=0)
    assert model(train.inputs[:5]).shape == (5, 2)
    assert schema_of(check_table_model(model, train.schema, 2)) == train.schema


def test_the_example_of_flower_has_the_gradient_of_its_own_loss() -> None:
    train = dataset().train
    model = build_fitting(FlTabular, train.architecture, seed=0)
    batch = train.batch(torch.arange(8))
    ours = torch.autograd.grad(functional.cross_entropy(model(batch.inputs), batch.labels), list(model.parameters()))
    logit = model.output(model.relu(model.layer2(model.relu(model.layer1(batch.inputs)))))
    loss = nn.BCELoss()(logit.sigmoid(), batch.labels[:, None].float())
    for own, other in zip(ours, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-4)


def test_a_model_of_images_is_refused_in_a_line() -> None:
    with pytest.raises(UserError, match="data are a table; take model=table_mlp"):
        build_fitting(LeNet, dataset().train.architecture, seed=0)
    with pytest.raises(UserError, match="is of tables, but the data are images"):
        build_fitting(TableMLP, {"in_channels": 1, "image_size": 8, "num_classes": 2}, seed=0)


def test_a_model_of_ones_own_learns_the_schema() -> None:
    train = dataset().train
    own = nn.Sequential(nn.Linear(train.input_shape[0], 2))
    assert schema_of(check_table_model(own, train.schema, 2)) == train.schema
    with pytest.raises(UserError, match="does not fit rows"):
        check_table_model(nn.Linear(3, 2), train.schema, 2)
