"""Copies, checkpoints, moves and settings of the training losses."""

import copy
import io
import math
import pickle

import pytest
import torch
from conftest import assert_close
from loss_cases import LOSSES, NAMES, batch
from torch._subclasses.fake_tensor import FakeTensorMode

import focalkern as fk


# ---------------------------------------------------------------------------------------------------------------------
# As modules
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_checkpoints(name):
    loss = LOSSES[name](weight=torch.rand(7), label_smoothing=0.1, ignore_index=3)
    input, target = batch(dtype=torch.float32)
    expected = loss(input, target)
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert repr(again) == repr(loss)
        assert torch.equal(again(input, target), expected)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    fresh = LOSSES[name](weight=torch.ones(7), label_smoothing=0.1, ignore_index=3)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(input, target), expected)


@pytest.mark.parametrize("make", [fk.FLSDLoss, lambda: fk.FLSDLoss([0.0, 0.5, 1.0], [1.0, -1.0]), fk.AdaFocalLoss])
def test_the_table_of_a_loss_from_the_meta_device(make):
    """The constructor determines it, so that the loss needs no state."""
    input, target = batch(dtype=torch.float32)
    expected = make()(input, target)
    with torch.device("meta"):
        made = [make() for _ in range(7)]
    made[0].to_empty(device="cpu")
    made[1].load_state_dict(make().state_dict(), assign=True)
    made[2] = copy.deepcopy(made[2])
    for name in made[3]._exact_buffers:  # as from_pretrained of transformers does
        setattr(made[3], name, torch.full_like(made[3].get_buffer(name), math.nan, device="cpu"))
    moved = copy.deepcopy(made[3]).to("cpu")
    assert repr(tuple(moved.buffers())) == repr(tuple(make().buffers()))
    made[4] = torch.compile(copy.deepcopy(made[3]), backend="eager", fullgraph=True)
    made[5].to("cpu")
    with torch.inference_mode():
        made[6](input, target)
    for loss in (*made, make().to("meta").to_empty(device="cpu"), make().to("meta")):
        assert torch.equal(loss(input, target), expected)
        loss(input, target).backward()
        assert repr(getattr(loss, "_orig_mod", loss)) == repr(make())
    assert make().to("meta")(input.to("meta"), target.to("meta")).is_meta


def test_the_table_from_the_meta_device_is_that_of_the_last_update():
    """Uninitialised memory must not enter an update or a state. A loaded table stays, whatever the history."""
    input, target = batch(dtype=torch.float32)
    expected = fk.AdaFocalLoss()
    state, record = copy.deepcopy(expected.state_dict()), expected.update(input, target)
    with torch.device("meta"):
        loss = fk.AdaFocalLoss()
    for name in loss._exact_buffers:
        setattr(loss, name, torch.full_like(loss.get_buffer(name), math.nan, device="cpu"))
    saved, updated = copy.deepcopy(loss), copy.deepcopy(loss)
    assert all(torch.equal(saved.state_dict()[name], state[name]) for name in state)
    updated.update(input, target)
    assert torch.equal(updated.bin_gammas, record.bin_gammas)
    updated.to("meta").to_empty(device="cpu")
    assert torch.equal(updated.bin_gammas, record.bin_gammas)
    loss.load_state_dict(expected.state_dict() | {"bin_gammas": torch.full((15,), 2.5, dtype=torch.float64)})
    loss(input, target)
    assert loss.bin_gammas.unique().tolist() == [2.5]


@pytest.mark.parametrize("make", [fk.FLSDLoss, lambda: fk.LinearFLSDLoss(4, 4), lambda: fk.LinearAdaFocalLoss(4, 4)])
def test_a_model_from_the_meta_device_moves_after_its_state_is_loaded(make):
    """The usual way to load a large model. The table of FLSD is in no state."""
    state = model_with(make()).state_dict()
    with torch.device("meta"):
        model, empty = model_with(make()), model_with(make())
    model.load_state_dict(state, assign=True)
    model.to("cpu")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert repr(model) == repr(model_with(make()))
    with pytest.raises(NotImplementedError, match="meta"):  # of the other layers
        empty.to("cpu")


@pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous:UserWarning")
def test_an_ensemble_on_the_meta_device_has_the_table_of_each_member():
    input, target = batch(dtype=torch.float32)
    members = [fk.AdaFocalLoss(gamma_init=gamma) for gamma in (0.5, 2.0)]
    base = copy.deepcopy(members[0]).to("meta")
    stacked = torch.func.stack_module_state(members)
    found = torch.func.vmap(lambda *state: torch.func.functional_call(base, state, (input, target)))(*stacked)
    assert_close(found, torch.stack([member(input, target) for member in members]))


def test_settings_are_shown():
    shown = [
        (fk.FocalLoss(1.5), "FocalLoss(gamma=1.5)"),
        (
            fk.FocalLoss(torch.nn.Parameter(torch.tensor([0.5, 2.0])), reduction="sum"),
            "FocalLoss(gamma=[0.5, 2], reduction=sum)",
        ),
        (fk.InverseFocalLoss(2), "InverseFocalLoss(gamma=2.0)"),
        (fk.FLSDLoss(ignore_index=255), "FLSDLoss(edges=[0, 0.2, 1], gammas=[5, 3], ignore_index=255)"),
        (
            fk.AdaFocalLoss(lam=0.5, detach_modulation=True),
            "AdaFocalLoss(n_bins=15, lam=0.5, gamma_init=1.0, gamma_max=20.0, gamma_min=-2.0, switch=0.2, "
            "detach_modulation=True)",
        ),
        (fk.DualFocalLoss(weight=torch.ones(3)), "DualFocalLoss(gamma=5.0, weight=[3])"),
        (fk.BrierLoss(label_smoothing=0.1), "BrierLoss(label_smoothing=0.1)"),
        (fk.MMCELoss(weighted=True), "MMCELoss(coefficient=2.0, weighted=True, bandwidth=0.4)"),
        (fk.LogitNormPenalty(), "LogitNormPenalty(coefficient=0.01)"),
        (fk.SigmoidFocalLoss(), "SigmoidFocalLoss(gamma=2.0, alpha=0.25, reduction=mean)"),
    ]
    for loss, text in shown:
        assert repr(loss) == text


def test_gammas_move_with_the_module_and_keep_their_precision(device):
    """Half precision would move the edges of bins and lose small updates."""
    model = torch.nn.ModuleList([fk.FLSDLoss([0, 0.3, 1], [5.1, 3.1]), fk.AdaFocalLoss(), fk.FocalLoss(fk.FLSD_53)])
    model.append(fk.FocalLoss(torch.tensor(1.5)))
    model.to(device=device, dtype=torch.bfloat16)
    assert {buffer.device.type for buffer in model.buffers()} == {device.type}
    assert model[0].edges.dtype == model[0].gammas.dtype == torch.float64
    assert model[1].bin_edges.dtype == model[1].bin_gammas.dtype == torch.float64
    assert model[0].edges.tolist() == [0, 0.3, 1]
    assert fk.FLSD_53.edges.device.type == "cpu"
    for loss in model:
        assert loss(*batch(device=device)).isfinite()


@pytest.mark.parametrize("make", [fk.FLSDLoss, fk.AdaFocalLoss])
def test_a_schedule_goes_to_the_device_of_the_logits(make, monkeypatch):
    """Like nn.CrossEntropyLoss(), these losses have no argument that the user would have to move."""
    given = []
    monkeypatch.setattr(make, "_loss", lambda self, input, target, gamma: given.append(gamma))
    loss = make(weight=torch.ones(3))
    # CUDA tensors without CUDA, in an evaluation before the training
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        loss(torch.zeros(4, 3, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda"))
    assert given[0].edges.device.type == given[0].gammas.device.type == "cuda"
    kept = {name: buffer for name, buffer in loss.named_buffers() if name != "weight"}
    assert {(buffer.device.type, buffer.dtype) for buffer in kept.values()} == {("cuda", torch.float64)}
    assert not any(buffer.is_inference() for buffer in kept.values())  # training can save them for backward
    assert loss.weight.device.type == "cpu"  # the user's own tensor is not moved, as in cross-entropy


@pytest.mark.parametrize("make", [fk.FLSDLoss, fk.AdaFocalLoss])
def test_a_schedule_that_was_not_moved_works_on_cuda(make, cuda):
    loss, moved = make(), make().to(cuda)
    input, target = batch(device=cuda)
    for _ in range(2):
        assert torch.equal(loss(input, target), moved(input, target))
        if isinstance(loss, fk.AdaFocalLoss):
            for module in (loss, moved):
                module.update(input, target)
    assert {buffer.device.type for buffer in loss.buffers()} == {"cuda"}


def test_a_table_given_to_the_module_is_copied():
    table = fk.GammaTable(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0, 2.0]))
    loss = fk.FocalLoss(table)
    loss.gammas[0] = 9.0
    assert table.gammas[0] == 1.0
    assert loss.gamma is None


def test_a_learned_gamma_is_a_parameter():
    gamma = torch.nn.Parameter(torch.tensor(2.0))
    loss = fk.FocalLoss(gamma)
    assert list(loss.parameters()) == [gamma]
    input, target = batch(dtype=torch.float32)
    loss(input, target).backward()
    assert gamma.grad < 0
    assert list(fk.FocalLoss(gamma.detach()).parameters()) == []


def table_loss(edges=(0, 0.2, 0.5, 1), gammas=(5, 3, 2)):
    return fk.FocalLoss(fk.GammaTable(edges, gammas))


def snapshot(loss):
    return {name: value.tolist() for name, value in loss.state_dict().items()}


@pytest.mark.parametrize(
    ("loss", "other", "message"),
    [
        (fk.FLSDLoss(), fk.AdaFocalLoss(), r"FLSDLoss: the checkpoint has another loss, AdaFocalLoss; strict=False"),
        (fk.FLSDLoss(), fk.FocalLoss(), r"FLSDLoss: the checkpoint has another loss, FocalLoss"),
        (fk.FocalLoss(), fk.DualFocalLoss(), r"FocalLoss: the checkpoint has another loss, DualFocalLoss"),
        (fk.InverseFocalLoss(torch.tensor(1.0)), fk.FocalLoss(torch.tensor(2.0)), r"has another loss, FocalLoss"),
        (fk.FocalLoss(fk.FLSD_53), fk.FocalLoss(), r"Missing key.*\"edges\", \"gammas\""),
        (fk.FocalLoss(), fk.FocalLoss(fk.FLSD_53), r"Unexpected key.*\"edges\""),
        (table_loss(), table_loss([0, 0.5, 1], [5, 3]), r"FocalLoss: edges must have shape \[4\], got \[3\]"),
        (fk.BrierLoss(torch.ones(3)), fk.BrierLoss(torch.ones(4)), r"weight must have shape \[3\], got \[4\]"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_module_as_it_was(loss, other, message):
    before = snapshot(loss)
    with pytest.raises(RuntimeError, match=message):
        loss.load_state_dict(other.state_dict())
    assert snapshot(loss) == before


def test_a_schedule_from_a_checkpoint_is_checked():
    loss = fk.FocalLoss(fk.FLSD_53)
    before = snapshot(loss)
    state = loss.state_dict()
    state["gammas"] = torch.tensor([7.0, 8.0])
    state["edges"] = torch.tensor([0.0, 1.2, 1.0])
    with pytest.raises(RuntimeError, match=r"edges must be ascending"):
        loss.load_state_dict(state)
    assert snapshot(loss) == before


def test_a_loss_inside_a_model_loads_with_it():
    def model():
        return torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "criterion": table_loss()})

    one, two = model(), model()
    one["criterion"].gammas[0] = 4.0
    two.load_state_dict(one.state_dict())
    assert two["criterion"].gammas[0] == 4.0
    # A checkpoint saved before the model had a loss.
    result = two.load_state_dict({"net.weight": torch.ones(2, 2), "net.bias": torch.ones(2)}, strict=False)
    assert result.missing_keys == ["criterion.edges", "criterion.gammas"]
    assert two["criterion"].gammas[0] == 4.0


def model_with(loss):
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "criterion": loss})


def test_a_checkpoint_of_another_loss_is_loaded_without_it_on_demand():
    one, two = model_with(fk.FocalLoss(torch.tensor(2.0))), model_with(fk.InverseFocalLoss(torch.tensor(1.0)))
    with torch.no_grad():
        one["net"].weight.fill_(3.0)
    with pytest.raises(RuntimeError, match=r"criterion\.InverseFocalLoss: the checkpoint has another loss, FocalLoss"):
        two.load_state_dict(through_a_file(one.state_dict()))
    result = two.load_state_dict(through_a_file(one.state_dict()), strict=False)
    assert result.missing_keys == result.unexpected_keys[:-1] == ["criterion.gamma"]
    assert result.unexpected_keys[-1].startswith("criterion.InverseFocalLoss: the checkpoint has another loss")
    assert (two["criterion"].gamma, two["net"].weight[0, 0]) == (1, 3)
    # A subclass of the user counts as the loss that it derives from.
    derived = model_with(type("Own", (fk.FocalLoss,), {})(torch.tensor(5.0)))
    derived.load_state_dict(one.state_dict())
    assert derived["criterion"].gamma == 2


def test_the_layer_of_a_loss_with_a_head_loads_by_itself():
    """It was reported as missing where it was loaded, and without its bias the schedule was not loaded."""
    hidden, target = torch.randn(60, 4), torch.randint(5, (60,))
    old, new = fk.LinearAdaFocalLoss(4, 5), fk.LinearAdaFocalLoss(4, 5, bias=True)
    old.update(hidden, target)
    found = new.load_state_dict(old.state_dict(), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["linear.bias"], [])
    assert torch.equal(new.bin_gammas, old.bin_gammas)
    assert len(new.history) == 1
    flsd = fk.LinearFLSDLoss(4, 5)
    found = flsd.load_state_dict(old.state_dict(), strict=False)
    assert torch.equal(flsd.linear.weight, old.linear.weight)
    assert not any("linear" in key for key in (*found.missing_keys, *found.unexpected_keys))
    before = copy.deepcopy(new)
    with pytest.raises(RuntimeError, match=r"linear.weight must have shape \[5, 4\], got \[6, 4\]"):
        new.load_state_dict(fk.LinearAdaFocalLoss(4, 6).state_dict(), strict=False)
    assert torch.equal(new.bin_gammas, before.bin_gammas)
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "linear.weight", "FocalLoss: the checkpoint has another'):
        fk.FocalLoss().load_state_dict(old.state_dict())


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_table_of_flsd_is_no_part_of_a_state():
    """Checkpoints of cross-entropy must load strictly. Those of version 0.1, which had the table, still load."""
    model = model_with(fk.FLSDLoss())
    model.load_state_dict(model_with(torch.nn.CrossEntropyLoss()).state_dict())
    assert model["criterion"].state_dict() == {}
    old = model.state_dict() | {
        "criterion.edges": torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64),
        "criterion.gammas": torch.tensor([5.0, 3.0], dtype=torch.float64),
    }
    model.load_state_dict(old)
    model.load_state_dict({name: value.half() for name, value in old.items()})
    before = model["criterion"].gammas.clone()
    for found, message in [
        (torch.tensor([5.0, 2.0]), r"has the gammas \[5, 2\], and this loss was made with \[5, 3\]"),
        (torch.tensor([5.0, 3.0, 2.0]), r"has the gammas \[5, 3, 2\]"),
        ([5.0, 3.0], r"gammas must be a tensor, got list"),
    ]:
        with pytest.raises(RuntimeError, match=f"FLSDLoss: (the checkpoint )?{message}"):
            model.load_state_dict(old | {"criterion.gammas": found})
    assert torch.equal(model["criterion"].gammas, before)


def test_an_inverse_focal_loss_takes_no_negative_gamma_from_a_state():
    loss = fk.InverseFocalLoss(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="InverseFocalLoss: gamma must be at least 0, got -2"):
        loss.load_state_dict({"gamma": torch.tensor(-2.0)})
    assert loss.gamma == 1


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_saves_and_loads_a_model_with_the_loss(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    loss = LOSSES[name](weight=torch.rand(7))
    input, target = batch(dtype=torch.float32)
    if isinstance(loss, fk.AdaFocalLoss):
        loss.update(input, target)
        loss.accumulate(input, target)
    safetensors.save_model(model_with(loss), str(tmp_path / "model.safetensors"))
    again = model_with(LOSSES[name](weight=torch.ones(7)))
    safetensors.load_model(again, str(tmp_path / "model.safetensors"))
    assert torch.equal(again["criterion"](input, target), loss(input, target))
    if isinstance(loss, fk.AdaFocalLoss):
        assert again["criterion"].n_accumulated == loss.n_accumulated > 0
        assert len(again["criterion"].history) == 1
