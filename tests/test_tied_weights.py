import torch
from torch import nn

from fl_privacy.models.unwrap_model import all_parameter_names, first_names, once_each


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    return net


def test_all_names_of_parameters_are_those_of_the_state_that_are_no_buffers() -> None:
    net = tied()
    buffers = {name for name, _ in net.named_buffers()}
    assert all_parameter_names(net) == net.state_dict().keys() - buffers
    assert "1.weight" not in dict(net.named_parameters())


def test_a_second_name_leads_to_the_first() -> None:
    assert first_names(tied())["1.weight"] == "0.weight"


def test_values_go_under_one_name() -> None:
    net = tied()
    one, other = torch.ones(3, 3), torch.zeros(3, 3)
    assert once_each(net, {"1.weight": other, "0.weight": one, "else": one}) == {"0.weight": one, "else": one}
    assert once_each(net, {"1.weight": other}) == {"0.weight": other}
