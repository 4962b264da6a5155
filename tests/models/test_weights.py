"""Networks start from the weights that the settings name and record their origin, or an error says why not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError
from raypfl.engine.events import RunStarted
from raypfl.models import MODELS, FlatModel
from raypfl.models.weights import Pretrained, origin
from tests.support.federation import NormalisedConv
from tests.support.runs import experiment

resnet = partial(MODELS.get("resnet18"), input_shape=(3, 32, 32))


def stored(tmp_path: Path, network: nn.Module, name: str = "weights.pt") -> str:
    path = tmp_path / name
    save = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
    save(network.state_dict(), path)
    return str(path)


def loaded(source: str, factory=NormalisedConv, name: str = "mine") -> nn.Module:
    return Pretrained(factory, name, source)()


def same(a: nn.Module, b: nn.Module, but_for: str = "nothing") -> bool:
    x = a.state_dict()
    y = b.state_dict()
    return list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x if not n.startswith(but_for))


@pytest.fixture
def trained() -> NormalisedConv:
    network = NormalisedConv()
    with torch.no_grad():
        for tensor in [*network.parameters(), network.norm.running_mean, network.norm.running_var]:
            tensor.uniform_(0.5, 1.5)
    return network


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The folder where torchvision keeps what it has downloaded."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    return tmp_path / "hub/checkpoints"


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
def test_a_file_gives_all_parameters_and_statistics(trained, tmp_path, name):
    network = loaded(stored(tmp_path, trained, name))
    assert same(network, trained)
    assert origin(network) == f"weights from {tmp_path / name}, all 8 tensors"


def test_a_state_dict_inside_a_checkpoint_is_found(trained, tmp_path):
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "a.ckpt")
    assert same(loaded(str(tmp_path / "a.ckpt")), trained)


def test_a_flat_models_vectors_start_from_the_files_weights_for_any_seed(trained, tmp_path):
    model = FlatModel(Pretrained(NormalisedConv, "mine", stored(tmp_path, trained)))
    expected = model.flatten({**trained.state_dict()})
    assert torch.equal(model.init(1), expected) and torch.equal(model.init(2), expected)


def test_a_flat_models_vector_can_be_stored_and_loaded(trained, tmp_path):
    model = FlatModel(NormalisedConv)
    theta = model.init(5)
    path = tmp_path / "result.safetensors"
    safetensors.torch.save_file({n: t.contiguous() for n, t in model.unflatten(theta).items()}, path)
    assert torch.equal(FlatModel(Pretrained(NormalisedConv, "mine", str(path))).init(9), theta)


def test_the_head_is_initialised_anew_for_another_number_of_classes_and_the_origin_says_so(tmp_path):
    source = stored(tmp_path, resnet(num_classes=1000))
    network = loaded(source, partial(resnet, num_classes=10))
    assert origin(network).endswith("100 of 102 tensors; fc drawn at random (1000 classes there, 10 here)")
    assert network.fc.weight.shape == (10, 512) and network.fc.weight.std() > 0

    model = FlatModel(Pretrained(partial(resnet, num_classes=10), "resnet18", source))
    a = model.init(1)
    b = model.init(2)
    head = model.mask("fc")

    assert torch.equal(a[~head], b[~head]) and not torch.equal(a[head], b[head])


def test_a_head_without_bias_accepts_weights_with_a_biased_head_of_another_size(tmp_path):
    network = loaded(stored(tmp_path, resnet(num_classes=7)), partial(resnet, num_classes=10, head_bias=False))
    assert "fc drawn at random (7 classes there, 10 here)" in origin(network)


def test_a_file_without_a_head_gives_the_body(trained, tmp_path):
    state = {n: t for n, t in trained.state_dict().items() if not n.startswith("head")}
    torch.save(state, tmp_path / "body.pt")
    network = loaded(str(tmp_path / "body.pt"))
    assert same(network, trained, but_for="head") and not torch.equal(network.head.weight, trained.head.weight)
    assert origin(network).endswith("6 of 8 tensors; head drawn at random")


def test_adapters_are_initialised_around_a_body_without_them(tmp_path):
    body = resnet(num_classes=10)
    network = loaded(stored(tmp_path, body), partial(resnet, num_classes=10, adapters="bias"))
    assert torch.equal(network.layer4[1].conv2.weight, body.layer4[1].conv2.weight)
    assert origin(network).endswith("; adapters drawn at random")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "cifar"}, r"conv1.weight has shape \(64, 3, 7, 7\) there and \(64, 3, 3, 3\) here\."),
        ({"norm": "group"}, r"the network has no bn1.running_mean; .*; and 36 more\."),
    ],
)
def test_tensors_that_do_not_fit_are_named(options, message, tmp_path):
    source = stored(tmp_path, resnet(num_classes=10))
    with pytest.raises(ConfigError, match=message):
        loaded(source, partial(resnet, num_classes=10, **options))


def test_a_head_without_axes_is_named_as_any_other_shape(trained, tmp_path):
    torch.save(trained.state_dict() | {"head.bias": torch.tensor(1.0)}, tmp_path / "scalar.pt")
    with pytest.raises(ConfigError, match=r"head.bias has shape \(\) there and \(3,\) here"):
        loaded(str(tmp_path / "scalar.pt"))


def test_tensors_that_are_missing_are_named(trained, tmp_path):
    state = trained.state_dict()
    state["cnov.weight"] = state.pop("conv.weight")
    torch.save(state, tmp_path / "typo.pt")
    with pytest.raises(ConfigError, match=r"conv.weight is not in them; the network has no cnov.weight\."):
        loaded(str(tmp_path / "typo.pt"))


class Treacherous:
    """An object that touches a file when it is unpickled, on purpose."""

    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_a_file_that_would_run_code_is_refused_and_does_not_run_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Treacherous()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="contains more than tensors"):
        loaded(str(tmp_path / "evil.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_files_that_are_missing_or_damaged_are_refused_by_name(trained, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/{name}', but there is no such file"):
        loaded(f"{tmp_path}/{name}")
    path = Path(stored(tmp_path, trained, name))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"weights file {path} (cannot be read|holds more)"):
        loaded(str(path))


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="is not a state dict: it must contain only tensors"):
        loaded(str(tmp_path / "a.pt"))


def test_torchvisions_weights_are_found_by_name(hub):
    from torchvision.models import ResNet18_Weights

    source = resnet(num_classes=1000)
    torch.save(source.state_dict(), hub / Path(ResNet18_Weights.IMAGENET1K_V1.url).name)
    network = loaded("IMAGENET1K_V1", partial(resnet, num_classes=10), "resnet18")
    assert same(network, source, but_for="fc")
    assert origin(network).startswith(
        "weights from IMAGENET1K_V1, 100 of 102 tensors; fc drawn at random (1000 classes"
    )


def test_if_torchvisions_weights_cannot_be_downloaded_the_error_says_where_to_put_them(hub, monkeypatch):
    def offline(*args: object, **kwargs: object) -> Tensor:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ConfigError, match=rf"\(no route to host\)\. Download https://\S+/resnet18-\S+\.pth to {hub}"):
        loaded("IMAGENET1K_V1", partial(resnet, num_classes=10), "resnet18")


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("resnet18", "IMAGENET1K_V3", "did you mean 'IMAGENET1K_V1'"),
        ("mlp", "IMAGENET1K_V1", "torchvision has no weights for mlp"),
    ],
)
def test_weights_that_torchvision_does_not_have_are_refused(name, source, message):
    with pytest.raises(ConfigError, match=message):
        loaded(source, name=name)


def test_a_run_starts_from_the_files_weights_and_records_their_origin(tmp_path):
    factory = partial(MODELS.get("mlp"), input_shape=(1, 8, 8), num_classes=10, hidden=[16])
    network = factory()
    events: list = []
    base = experiment(tmp_path, rounds=1, training__lr=1e-9, method="fedavg")
    path = stored(tmp_path, network)
    result = raypfl.run(base.override([f"model.weights={path}"]), listeners=[events.append])

    torch.testing.assert_close(result.global_model(), FlatModel(factory).flatten(network.state_dict()))
    raypfl.run(base, listeners=[events.append])
    first, second = (e.metadata["weights"] for e in events if isinstance(e, RunStarted))
    assert first == f"weights from {path}, all 4 tensors" and second == "random weights"


@pytest.mark.parametrize("method", ["ifca", "fedem"])
def test_methods_that_begin_with_different_models_refuse_weights_that_make_them_equal(tmp_path, method):
    network = MODELS.get("mlp")(input_shape=(1, 8, 8), num_classes=10, hidden=[16])
    path = stored(tmp_path, network)
    with pytest.raises(ConfigError, match="so all would stay the same"):
        raypfl.run(experiment(tmp_path, method=method, model__weights=path, rounds=1))


@pytest.mark.parametrize("method", ["pfedhn", "pefll"])
def test_hypernetworks_refuse_weights_that_they_replace_but_not_those_of_a_frozen_part(tmp_path, method):
    network = MODELS.get("mlp")(input_shape=(1, 8, 8), num_classes=10, hidden=[16])
    weights = {"model__weights": stored(tmp_path, network), "model__hidden": [16]}
    with pytest.raises(ConfigError, match=r"model.weights and model.pretrain have no effect"):
        raypfl.run(experiment(tmp_path, method=method, rounds=1, **weights))
    raypfl.run(experiment(tmp_path, method=method, rounds=1, model__frozen="'1'", **weights))


def test_a_missing_file_of_weights_is_found_before_the_data_are_prepared(tmp_path):
    events = []
    with pytest.raises(ConfigError, match=r"model.weights is '.*nowhere.pt', but there is no such file"):
        raypfl.run(experiment(tmp_path, model__weights=tmp_path / "nowhere.pt"), listeners=[events.append])
    assert not events


def test_a_run_is_not_resumed_with_a_weights_file_that_has_changed(tmp_path):
    factory = partial(MODELS.get("mlp"), input_shape=(1, 8, 8), num_classes=10, hidden=[16])
    path = Path(stored(tmp_path, factory()))
    before = path.read_bytes()
    run = raypfl.run(experiment(tmp_path, rounds=1).override([f"model.weights={path}"])).run_dir
    stored(tmp_path, factory())

    with pytest.raises(CheckpointError, match=rf"began with other weights than {re.escape(str(path))} holds now"):
        raypfl.resume(run, overrides=["rounds=2"])
    path.write_bytes(before)
    assert raypfl.resume(run, overrides=["rounds=2"]).round == 2


def test_a_relative_path_is_made_absolute_since_actors_may_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described = raypfl.Experiment(model={"name": "mlp", "weights": "my.pt"})
    assert described.model.weights == str(tmp_path / "my.pt")
    assert raypfl.Experiment.from_yaml(described.to_yaml()) == described
    with pytest.raises(ConfigError, match=r"model.weights is 3; it must be text"):
        raypfl.Experiment(model={"name": "mlp", "weights": 3})
