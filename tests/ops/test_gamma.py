import copy

import pytest
import torch

import focalkern as fk


def test_numbers_become_float64_tensors_and_tensors_are_kept():
    table = fk.GammaTable([0, 0.2, 1], (5, 3.0))
    assert table.edges.dtype == table.gammas.dtype == torch.float64
    assert table.edges.tolist() == [0.0, 0.2, 1.0]
    assert table.gammas.tolist() == [5.0, 3.0]
    assert len(table) == 2
    edges, gammas = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0, 2.0], requires_grad=True)
    table = fk.GammaTable(edges, gammas)
    assert table.edges.data_ptr() == edges.data_ptr()
    edges[1] = 0.25
    assert table.edges[1] == 0.25
    # Gamma of a table is a constant.
    assert not table.gammas.requires_grad


def test_flsd_53_is_the_published_schedule():
    assert fk.FLSD_53.edges[1] == 0.2
    assert fk.FLSD_53.gammas.tolist() == [5.0, 3.0]


def test_equal_edges_and_one_bin_are_legal():
    assert len(fk.GammaTable([0.0, 0.5, 0.5, 1.0], [1.0, 2.0, 3.0])) == 3
    assert len(fk.GammaTable([0.0, 1.0], [-2.0])) == 1


def test_infinite_outer_edges_are_legal():
    assert len(fk.GammaTable([-float("inf"), 0.5, float("inf")], [1.0, 2.0])) == 2


def test_repr_shows_the_numbers_and_a_copy_is_equal():
    table = fk.GammaTable([0.0, 0.5, 1.0], [1.0, -2.0])
    assert repr(table) == "GammaTable(edges=[0.0, 0.5, 1.0], gammas=[1.0, -2.0])"
    again = copy.deepcopy(table)
    assert torch.equal(again.edges, table.edges)
    assert again.gammas.data_ptr() != table.gammas.data_ptr()


def test_to_moves_both_tensors(device):
    table = fk.FLSD_53.to(device)
    assert table.edges.device.type == table.gammas.device.type == device.type
    assert table.to("cpu").gammas.tolist() == [5.0, 3.0]


@pytest.mark.parametrize(
    ("edges", "gammas", "error", "message"),
    [
        ([0.0, 1.0], [], ValueError, r"gammas must have at least one bin, got none"),
        ([0.0, 1.0], [1.0, 2.0], ValueError, r"edges must have len\(gammas\) \+ 1 = 3 entries, got 2"),
        ([0.0, 0.5, 0.4], [1.0, 2.0], ValueError, r"ascending.*edges\[1\] = 0\.5, edges\[2\] = 0\.4"),
        ([0.0, float("nan"), 1.0], [1.0, 2.0], ValueError, r"not NaN.*edges\[0\] = 0\.0, edges\[1\] = nan"),
        ([0.0, 0.5, 1.0], [1.0, float("nan")], ValueError, r"finite, got gammas\[1\] = nan"),
        ([0.0, 1.0], [float("inf")], ValueError, r"finite, got gammas\[0\] = inf"),
        ([[0.0, 1.0]], [1.0], ValueError, r"edges must be one-dimensional, got shape \[1, 2\]"),
        ([0.0, 1.0], 1.0, ValueError, r"gammas must be one-dimensional, got shape \[\]"),
        ("01", [1.0], TypeError, r"edges must be a sequence of numbers, got '01'"),
        ([0.0, 1.0], [None], TypeError, r"gammas must be a sequence of numbers, got \[None\]"),
        (torch.tensor([0, 1]), [1.0], TypeError, r"edges must be a floating-point tensor, got torch\.int64"),
        (
            torch.empty(2, device="meta"),
            torch.ones(1),
            ValueError,
            r"gammas must be on the device of edges, meta, got cpu",
        ),
    ],
)
def test_bad_tables_name_argument_and_value(edges, gammas, error, message):
    with pytest.raises(error, match="GammaTable: .*" + message):
        fk.GammaTable(edges, gammas)


def test_tables_of_the_same_numbers_are_equal():
    table = fk.GammaTable([0.0, 0.2, 1.0], [5.0, 3.0])
    assert table == fk.FLSD_53
    assert {fk.FLSD_53: "found"}[table] == "found"
    assert table == fk.GammaTable(table.edges.clone(), table.gammas.float())  # 5 and 3 are the same in every dtype
    for other in ([0.0, 0.2, 1.0], [5.0, 2.0]), ([0.0, 0.3, 1.0], [5.0, 3.0]), ([0.0, 0.2, 0.5, 1.0], [5.0, 3.0, 3.0]):
        assert table != fk.GammaTable(*other)
    assert table != 3
    changed = fk.GammaTable(torch.tensor([0.0, 0.2, 1.0]), torch.tensor([5.0, 3.0]))
    before = hash(changed)
    changed.gammas[0] = 4.0
    assert hash(changed) == before and changed != table
