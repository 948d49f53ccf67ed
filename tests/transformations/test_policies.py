import json
from collections import Counter

import pytest
import torch

from fl_privacy.data.transformations import (
    OPERATIONS,
    Policy,
    apply_policy,
    disjoint,
    random_policies,
    read_policies,
    transform,
)
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator


def images(number=4, channels=3):
    levels = torch.randint(0, 256, (number, channels, 16, 16), generator=derive_generator(0, "images"))
    return levels.float() / 255


def test_a_policy_is_its_operations_in_order():
    policy = Policy.parse("3-43-15")
    assert [(o.name, o.level) for o in policy.operations] == [("translate_x", 9), ("translate_y", 4), ("brightness", 9)]
    levels = (images() * 255).round().byte()
    one_by_one = OPERATIONS[15](OPERATIONS[43](OPERATIONS[3](levels, 1), -1), -1)
    assert torch.equal(apply_policy(levels, policy, (1, -1, -1)), one_by_one)


def test_each_image_gets_one_of_the_outcomes_of_its_policies():
    given = images(64, 1)
    policies = read_policies(["3-15", "9", "43-0"])
    levels = (given * 255).round().byte()
    outcomes = {
        (str(policy), signs): apply_policy(levels, policy, signs)
        for policy, choices in zip(policies, [((1, -1), (1, -1)), ((1,),), ((1, -1), (1,))], strict=True)
        for signs in torch.cartesian_prod(*map(torch.tensor, choices)).reshape(-1, len(choices)).tolist()
        for signs in [tuple(signs)]
    }
    found = (transform(given, policies, derive_generator(1)) * 255).round().byte()
    drawn = Counter()
    for i, image in enumerate(found):
        matching = [name for name, outcome in outcomes.items() if torch.equal(outcome[i], image)]
        assert len(matching) == 1
        drawn[matching[0]] += 1
    assert len(drawn) == len(outcomes)


def test_policies_and_signs_are_drawn_uniformly():
    white = torch.ones(4000, 1, 4, 4)
    policies = read_policies(["0", "3", "8", "28"])
    found = transform(white, policies, derive_generator(2))
    inverted, moved = (found == 0).all((1, 2, 3)), (found != 1).any(1).any((1, 2)) & ~(found == 0).all((1, 2, 3))
    assert abs(inverted.double().mean() - 0.25) < 0.03
    assert abs(moved.double().mean() - 0.25) < 0.03
    to_the_right = (found[moved][:, 0, 0, 0] == 0).double().mean()
    assert abs(to_the_right - 0.5) < 0.06


def test_the_seed_alone_decides_and_draws_do_not_depend_on_the_policies():
    given = images()
    policies = random_policies(7, derive_generator(3))
    first = transform(given, policies, derive_generator(4))
    torch.manual_seed(9)
    assert torch.equal(first, transform(given, policies, derive_generator(4)))
    assert not torch.equal(first, transform(given, policies, derive_generator(5)))
    after = [derive_generator(6), derive_generator(6)]
    transform(given, read_policies("3-43-15"), after[0])
    transform(given, read_policies("0-9-12"), after[1])
    assert torch.equal(torch.rand(3, generator=after[0]), torch.rand(3, generator=after[1]))


def test_probabilities_are_off_unless_asked_for():
    given = torch.zeros(3000, 1, 4, 4)
    policy = read_policies("0")  # invert, probability 0.1
    assert (transform(given, policy, derive_generator(0)) == 1).all()
    share = transform(given, policy, derive_generator(0), by_probability=True).mean()
    assert abs(share - 0.1) < 0.02


def test_values_stay_on_256_levels():
    found = transform(images(50), random_policies(50, derive_generator(0)), derive_generator(1))
    assert found.min() >= 0 <= found.max() <= 1
    assert torch.equal(found, (found * 255).round() / 255)


def test_random_policies_are_different_and_uniform_over_all():
    policies = random_policies(3000, derive_generator(0))
    assert len(set(policies)) == 3000
    lengths = Counter(len(p.indices) for p in policies)
    assert 0.005 < lengths[2] / 3000 < 0.04
    assert lengths[3] / 3000 > 0.96
    share = Counter(i for p in policies for i in p.indices)
    assert min(share.values()) > 120
    assert len(random_policies(127_550, derive_generator(0), longest=3)) == 127_550


def test_hybrid_sets_have_no_operation_in_common():
    chosen = disjoint(read_policies(["3-15-3", "15-2", "9", "3-4", "44-43"]), 3)
    assert [str(p) for p in chosen] == ["3-15-3", "9", "44-43"]


def test_operations_alike_are_the_same_whatever_their_indices():
    chosen = disjoint(read_policies(["40-0", "45", "29", "37", "28"]), 9)  # solarize 1 twice, invert twice
    assert [str(p) for p in chosen] == ["40-0", "37", "28"]


def test_reads_names_lists_files_and_folders(tmp_path):
    (tmp_path / "policies.json").write_text(json.dumps({"table": "paper", "policies": ["3-43-15", "7"]}))
    for source in (["3-43-15", 7], str(tmp_path), str(tmp_path / "policies.json")):
        assert [str(p) for p in read_policies(source)] == ["3-43-15", "7"]
    assert read_policies(3) == read_policies("3") == (Policy((3,)),)


def test_the_table_of_the_code_is_asked_for_or_read_in_the_file(tmp_path):
    (named,) = read_policies("16", "code")
    assert (named.operations[0].name, str(named)) == ("equalize", "16")
    assert read_policies("16")[0].operations[0].name == "translate_x"
    given = images(1)
    assert not torch.equal(
        transform(given, [named], derive_generator(0)), transform(given, read_policies("16"), derive_generator(0))
    )
    (tmp_path / "policies.json").write_text(json.dumps({"table": "code", "policies": ["16"]}))
    assert read_policies(str(tmp_path)) == read_policies(str(tmp_path), "code") == (named,)
    assert {policy.table for policy in random_policies(9, derive_generator(0), table="code")} == {"code"}
    with pytest.raises(UserError, match=r"the table 'paper' are expected, but .* has some of 'code'"):
        read_policies(str(tmp_path), "paper")
    with pytest.raises(UserError, match="table is expected to be one of paper, code"):
        read_policies("16", "other")


@pytest.mark.parametrize("wrong", ["3-50", ["3--4"], "nowhere.json", [], -1, "3-x"])
def test_wrong_policies_are_one_line(wrong):
    with pytest.raises(UserError) as error:
        read_policies(wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[1]",
        '{"table": "paper", "policies": []}',
        '{"policies": ["3"]}',
        '{"table": "paper", "policies": ["3-99"]}',
    ],
)
def test_wrong_files_are_one_line(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UserError):
        read_policies(str(path))
