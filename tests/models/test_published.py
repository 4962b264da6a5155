"""Networks and data sets by their names in torchvision, timm and the Hugging Face hub."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError, DataError
from raypfl.models import MODELS, FlatModel
from raypfl.models.weights import Pretrained
from tests.support import datasets
from tests.support.runs import experiment

TIMM = {"name": "timm:vit_tiny_patch16_224", "img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1}


def test_a_network_of_torchvision_computes_what_torchvision_does():
    from torchvision import models

    model = FlatModel(partial(MODELS.get("torchvision:squeezenet1_1"), (3, 32, 32), 7), seed=3)
    reference = models.squeezenet1_1(num_classes=7).eval()
    theta = model.init(5)
    x = torch.randn(2, 3, 32, 32)
    reference.load_state_dict(model.unflatten(theta))
    with model.mode(train=False):
        assert torch.equal(model(theta, x), reference(x))


@pytest.mark.thorough
def test_a_network_of_timm_is_trained(tmp_path: Path):
    described = raypfl.Experiment(model=TIMM, rounds=4, training={"lr": 0.1}, output=str(tmp_path)).override(
        ["engine.backend=inline"]
    )
    result = raypfl.run(described)
    losses = result.rounds["loss"].to_pylist()
    assert losses[-1] < losses[0] and set(result.ledger["numbers"].to_pylist()) == {len(result.global_model())}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("timm:vit_tinny_patch16_224", "timm has no network 'vit_tinny.*did you mean 'vit_tiny_patch16_224'"),
        ("torchvision:resnet81", "torchvision has no network 'resnet81'; did you mean 'resnet18'"),
        ("torchvison:resnet18", "There is no model called 'torchvison:resnet18'; did you mean 'torchvision:resnet18'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(model: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        raypfl.Experiment(model=model)


def test_grey_images_are_refused_by_torchvisions_networks_before_the_run():
    with pytest.raises(ConfigError, match=r"take 3 channels, but images here have 1: use timm:NAME"):
        raypfl.run(raypfl.Experiment(model="torchvision:resnet18", engine={"backend": "inline"}))


def test_without_timm_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"'timm:resnet18', but timm is not installed: pip install 'raypfl\[timm\]'"):
        raypfl.Experiment(model="timm:resnet18")


def test_timms_weights_are_found_by_the_name_of_their_training(monkeypatch: pytest.MonkeyPatch):
    import timm

    create_model = timm.create_model
    requests = []

    def without_network(name: str, pretrained: bool = False, **options):
        requests.extend([name] * pretrained)
        return create_model(name.partition(".")[0], **options)

    monkeypatch.setattr(timm, "create_model", without_network)
    factory = partial(MODELS.get("timm:test_vit"), (3, 160, 160), 10)
    network = Pretrained(factory, "timm:test_vit", "r160_in1k")()
    assert requests == ["test_vit.r160_in1k"] and "head drawn at random (1000 classes there, 10 here)" in network.origin
    with pytest.raises(ConfigError, match=r"timm has no weights 'r160' for test_vit; did you mean 'r160_in1k'"):
        Pretrained(factory, "timm:test_vit", "r160")()

    monkeypatch.setattr(timm, "create_model", lambda *args, **options: create_model("nothing of the kind"))
    with pytest.raises(ConfigError, match=r"timm's weights r160_in1k for test_vit could not be downloaded"):
        Pretrained(lambda: network, "timm:test_vit", "r160_in1k")()


def hub(cache: Path, *subsets: str) -> None:
    """Write what the hub's client leaves in its cache of the data set ada/digits."""
    repository = cache / "datasets--ada--digits"
    (repository / "refs/refs/convert").mkdir(parents=True)
    (repository / "refs/refs/convert/parquet").write_text("0123abc")
    for subset in subsets:
        for split, labels in (("train", [0, 1, 0, 1]), ("test", [1, 0])):
            images = [{"bytes": datasets.encoded(datasets.pixels(4, 4, seed=seed))} for seed in range(len(labels))]
            file = repository / "snapshots/0123abc" / subset / split / "0000.parquet"
            file.parent.mkdir(parents=True)
            pq.write_table(pa.table({"img": images, "label": labels}), file)


def test_a_data_set_of_the_hub_is_read_from_its_cache_without_a_network(tmp_path: Path, opened):
    hub(tmp_path / "data", "default")
    data = opened("hf:ada/digits", image="img")
    assert data.labels.tolist() == [1, 0, 0, 1, 0, 1] and data.input_shape == (1, 4, 4)
    assert np.array_equal(data.inputs[2, 0], datasets.pixels(4, 4))
    assert sum(len(data.indices(client, "test")) for client in range(2)) == 2


def test_a_data_set_with_several_subsets_needs_a_named_subset(tmp_path: Path, opened):
    hub(tmp_path / "data", "balanced", "by_writer")
    with pytest.raises(
        ConfigError, match=r"data\.subset is None, but ada/digits has 2 subsets; choose one of: balanced, by"
    ):
        opened("hf:ada/digits", image="img")
    assert len(opened("hf:ada/digits", image="img", subset="by_writer").labels) == 6


def test_a_hub_data_set_outside_the_cache_is_downloaded_only_on_request(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match=r"ada/digits is not in the cache .* Set data\.download to true once"):
        opened("hf:ada/digits")

    def offline(*args, local_files_only: bool, **options) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(DataError, match=r"ada/digits could not be downloaded .*no route to host\). Is there a network"):
        opened("hf:ada/digits", download=True)

    described = experiment(tmp_path, data__name="hf:ada/digits", data__download=True)
    with pytest.raises(DataError, match="could not be downloaded"):
        raypfl.run(described)
    assert not list((tmp_path / "runs").iterdir())


def test_names_that_the_hub_cannot_have_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="it must be 'hf:' and a name on the hub"):
        raypfl.Experiment(data="hf:ada/digits/mine")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"huggingface_hub is not installed: pip install 'raypfl\[hf\]'"):
        raypfl.Experiment(data="hf:ada/digits").data.reader.paths()
