"""Texts of any length: their words as tokens, networks for which padding has no effect, and models for new texts."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raypfl as library
from raypfl.common.errors import ConfigError, DataError
from raypfl.data import ByColumn
from raypfl.data.datasets import DataConfig, RawData
from raypfl.data.datasets.hub_tokens import tokenizer_files
from raypfl.data.datasets.words import split_text
from raypfl.models import MODELS
from raypfl.trained.new_clients import checked_inputs
from raypfl.trained.samples import samples_in
from tests.support.command import raypfl
from tests.support.runs import experiment

REVIEWS = """author,review,stars
Ada,"Good, GOOD film!",5
Ada,bad,1
Bob,"It's a bad film, isn't it",1
Bob,,5
"""
TABLE = {"target": "stars", "group": "author", "text": "review", "missing": "fill"}
NETWORKS = ("fasttext", "text_cnn", "text_transformer")


def written(folder: Path, text: str = REVIEWS, name: str = "reviews.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_the_frequent_words_of_training_rows_have_tokens_and_short_texts_are_filled(tmp_path, opened):
    written(tmp_path / "data")
    written(tmp_path / "data", "author,review,stars\nAda,unheard film,5\n", "test.csv")
    data = opened("text_table", ByColumn(), test_fraction=0, length=4, vocabulary=6, **TABLE)
    # Bad, film and good come twice; of those that come once, the first by alphabet has the last place.
    assert data.vocabulary == ["(padding)", "(unknown)", "bad", "film", "good", "a"]
    assert data.inputs.tolist() == [[4, 4, 3, 0], [2, 0, 0, 0], [1, 5, 2, 3], [0, 0, 0, 0], [1, 3, 0, 0]]
    assert data.class_names == ["1", "5"] and data.kind == "classes" and list(data.client_names) == ["Ada", "Bob"]


def test_characters_can_be_tokens(tmp_path, opened):
    written(tmp_path / "data")
    data = opened("text_table", ByColumn(), test_fraction=0, length=3, tokens="characters", **TABLE)
    assert [data.vocabulary[token] for token in data.inputs[0]] == ["G", "o", "o"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("'Dogs'' I don’t, DON'T!", ["dogs", "i", "don’t", "don't"]),
        ("हिन्दी फ़िल्म। தமிழ்", ["हिन्दी", "फ़िल्म", "தமிழ்"]),
        ("cafe\u0301 café", ["café", "café"]),
        ("❤️ (مى\u200cخواهم)", ["مى\u200cخواهم"]),
    ],
)
def test_words_of_any_script_are_whole(text, words):
    assert split_text(text, "words") == [unicodedata.normalize("NFC", word) for word in words]


def test_a_pool_of_texts_has_the_clients_tokens(tmp_path, opened):
    written(tmp_path / "data")
    # The clients know a word that only the pool's test rows have.
    written(tmp_path / "pool", "review,stars\nbad,5\n", "train.csv")
    written(tmp_path / "pool", "review,stars\nGood new,5\n", "test.csv")
    pool = {"name": "text_table", "root": str(tmp_path / "pool"), "text": "review", "target": "stars"}
    options = TABLE | {"test_fraction": 0, "length": 4, "vocabulary": 5}
    data = opened("text_table", ByColumn(), **options, pools={"ood/new": pool})
    assert data.vocabulary[2:] == ["bad", "film", "good"]
    assert data.inputs[data.pool("ood/new")].tolist() == [[4, 1, 0, 0]]

    with pytest.raises(ConfigError, match=r"data\.pools\.ood/new\.tokens is 'characters', but a pool has that of"):
        opened("text_table", ByColumn(), **options, pools={"ood/new": pool | {"tokens": "characters"}})


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"text": None}, ConfigError, "data.text is missing"),
        ({"text": "stars"}, ConfigError, "is in data.target and in data.text"),
        ({"text": "film"}, ConfigError, "has no column 'film', which data.text names"),
        ({"length": 0}, ConfigError, "data.length is 0, but must be at least 1"),
        ({"missing": "refuse"}, DataError, "has no 'review'"),
        ({"text": "author", "group": None, "target": "review"}, DataError, "has no 'review'"),
        ({"text": "stars", "target": "author", "group": None}, DataError, "'stars' of reviews.csv is int64, not text"),
    ],
)
def test_what_is_no_table_of_texts_is_refused(tmp_path, opened, options, error, sentence):
    written(tmp_path / "data")
    with pytest.raises(error, match=sentence):
        opened("text_table", ByColumn(), **TABLE | options)


def test_texts_without_words_are_refused_and_those_of_scripts_without_spaces_come_with_a_warning(tmp_path, opened):
    options = {"target": "y", "text": "t", "test_fraction": 0}
    written(tmp_path / "data", "t,y\n!!!,a\n🙂,b\n")
    with pytest.raises(
        DataError, match=r"No text in the column 't' of reviews\.csv has words: .*data\.tokens=characters"
    ):
        opened("text_table", **options)
    written(tmp_path / "data", "t,y\n我喜欢这部电影 ok,a\n我不喜欢,b\n")
    with pytest.warns(UserWarning, match=r"in a script without spaces, .*data\.tokens=characters"):
        opened("text_table", **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_padding_has_no_effect_on_outputs_and_gradients(name):
    long = MODELS.get(name)((7,), 3, 9).double()
    short = MODELS.get(name)((4,), 3, 9).double()
    state = long.state_dict()
    if "positions" in state:
        state["positions"] = state["positions"][:4]
    short.load_state_dict(state)

    texts = torch.tensor([[3, 5, 2, 7], [4, 6, 0, 0], [0, 0, 0, 0]])
    results = []
    for network, tokens in ((short, texts), (long, F.pad(texts, (0, 3)))):
        outputs = network(tokens)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), network.embedding.weight)
        assert outputs.isfinite().all() and gradient[2].any() and not gradient[0].any()
        results.append((outputs, gradient))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_the_networks_are_those_of_the_papers():
    fasttext = MODELS.get("fasttext")((4,), 2, 9, width=3)
    text = torch.tensor([[5, 7, 7, 0]])
    vectors = fasttext.embedding.weight
    expected = fasttext.head((vectors[5] + 2 * vectors[7]) / 3)
    torch.testing.assert_close(fasttext(text)[0], expected)

    text_cnn = MODELS.get("text_cnn")((4,), 2, 9, width=3, kernels=(2,), filters=5)
    (convolution,) = text_cnn.convolutions
    words = torch.stack([*text_cnn.embedding.weight[text[0, :3]], torch.zeros(3)])
    windows = torch.stack([torch.cat([words[start], words[start + 1]]) for start in range(3)])
    weight = convolution.weight.transpose(1, 2).flatten(1)
    features = (windows @ weight.T + convolution.bias).relu().max(0).values
    torch.testing.assert_close(text_cnn(text)[0], text_cnn.head(features))


def reviews(count: int = 90) -> list[str]:
    """A header and rows: an author's word for a good film is another's for a bad one, but for two words."""
    draws = np.random.default_rng(0)
    lines = ["author,review,opinion"]
    for row in range(count):
        is_good = bool(draws.integers(2))
        filler = " ".join(draws.choice(["the", "film", "plot", "was"], int(draws.integers(0, 6))))
        lines.append(f"{'ABC'[row % 3]},{filler} {'superb' if is_good else 'awful'},{'good' if is_good else 'bad'}")
    return lines


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> library.Result:
    folder = tmp_path_factory.mktemp("reviews")
    root = written(folder, "\n".join(reviews()), "reviews.csv")
    data = {"name": "text_table", "root": str(root), "target": "opinion", "text": "review"}
    return library.run(
        experiment(
            folder,
            method="ditto",
            data=json.dumps(data | {"length": 6, "group": "author", "pools": {"ood/again": data}}),
            partition="by_column",
            model="{name: fasttext, width: 8}",
            training="{lr: 1.0, epochs: 3}",
            rounds=4,
            cohort__size=3,
            evaluation__protocols="[local, ood/again]",
        )
    )


def own_texts(config: DataConfig) -> RawData:
    """A reader of one's own: the words in a file, which is one text."""
    words = (config.folder("the words") / "words.txt").read_text().split()
    vocabulary = ["(padding)", "(unknown)", *sorted(set(words))]
    tokens = np.array([[vocabulary.index(word) for word in words]] * 40)
    return RawData(tokens, np.arange(40) % 2, ["odd", "even"], vocabulary=vocabulary)


def test_new_samples_of_ones_own_reader_have_the_runs_words(tmp_path):
    written(tmp_path / "data", "good film", "words.txt")
    written(tmp_path / "new", "a film", "words.txt")
    data = {"name": f"{__name__}:own_texts", "root": str(tmp_path / "data")}
    result = library.run(
        experiment(tmp_path, data=json.dumps(data), model="fasttext", rounds=1, cohort__size=2, partition__clients=2)
    )
    inputs, _ = samples_in(tmp_path / "new", library.trained_models(result.run_dir))
    assert inputs[0].tolist() == [1, 2]


def test_texts_are_learned_and_new_ones_predicted_with_the_runs_words(result, tmp_path):
    assert {row["accuracy"] for row in result.summary()} == {1.0}

    new = pa.table(
        {"author": ["A", "B"], "review": ["An awful, awful TEXT with words that the run never saw", "superb"]}
    )
    assert library.predict(result.run_dir, new).table["predicted"].to_pylist() == ["bad", "good"]
    file = written(tmp_path, "review\nSuperb\n", "new.csv")
    shown = raypfl("predict", str(result.run_dir), str(file), "--global", "--out", str(tmp_path / "out.csv"))
    assert shown.exit_code == 0 and "good" in (tmp_path / "out.csv").read_text()

    # Read by itself, the column of such a file would be numbers.
    numbers = library.predict(result.run_dir, written(tmp_path, "author,review\nA,10\n", "numbers.csv"))
    assert numbers.table["predicted"].to_pylist()[0] in ("good", "bad")
    with pytest.raises(DataError, match="has no 'review', and the run was trained on complete rows only"):
        library.predict(result.run_dir, pa.table({"author": ["A"], "review": [None]}))

    models = library.trained_models(result.run_dir)
    model = models.global_model()
    assert model.vocabulary[:2] == ["(padding)", "(unknown)"]
    inputs, labels = samples_in(
        written(tmp_path, "review,opinion\nawful superb,good\n"), library.trained_models(result.run_dir)
    )
    assert [model.vocabulary[token] for token in inputs[0]][:2] == ["awful", "superb"] and labels.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fasttext", {"width": 0}, "model.width is 0; it must be at least 1"),
        ("text_cnn", {"kernels": []}, r"model.kernels is \[\]; it must have numbers of at least 1"),
        ("text_cnn", {"kernels": (3, 0)}, r"model.kernels is \[3, 0\]; it must have"),
        ("text_transformer", {"heads": 0}, "model.heads is 0; it must be at least 1"),
        ("gru", {"layers": 0}, "model.layers is 0; it must be at least 1"),
    ],
)
def test_networks_without_units_are_refused(name, options, sentence):
    words = {} if name == "gru" else {"num_tokens": 9}
    with pytest.raises(ConfigError, match=sentence):
        MODELS.get(name)((4,), 2, **words, **options)


def test_a_new_revision_of_a_tokenizer_in_the_hubs_cache_is_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--author--bert"
    assert tokenizer_files("transformers:author/bert") == []
    for revision in ("first", "second"):
        written(cached / "snapshots" / revision, "{}", "config.json")
        file = written(cached / "snapshots" / revision, "a\nb", "vocab.txt")
        written(cached / "refs", revision, "main")
        assert file in tokenizer_files("transformers:author/bert")


class TwoWords(nn.Module):
    """A network of one's own that has not asked for the number of words."""

    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(3, num_classes)

    def forward(self, x):
        return self.embedding(x).mean(1)


def test_a_network_that_lacks_words_is_refused_before_it_trains(result, tmp_path):
    with pytest.raises(ConfigError, match=r"which fails for samples of 'text_table'.* index out of range"):
        library.run(result.experiment.override([f"model={__name__}:TwoWords", f"output={tmp_path}"]))


def test_a_network_for_texts_refuses_other_samples_and_texts_other_networks(result, tmp_path):
    with pytest.raises(ConfigError, match="fasttext model takes texts, such as those of data=text_table"):
        library.run(experiment(tmp_path, model="fasttext"))
    with pytest.raises(ConfigError, match="networks for them are fasttext, text_cnn, text_transformer and"):
        library.run(result.experiment.override(["model=mlp", f"output={tmp_path}"]))


@pytest.mark.parametrize("token", [-1, 3])
def test_a_token_that_the_vocabulary_lacks_is_refused_in_training_and_of_new_clients(token):
    tokens = np.array([[0, 1], [2, token]])
    words = ["(padding)", "(unknown)", "film"]
    sentence = rf"Sample 1 of .* has the token {token}, but the vocabulary has 3 tokens, counted from 0\."
    with pytest.raises(DataError, match=sentence):
        RawData(tokens, [0, 1], ["bad", "good"], vocabulary=words)

    outline = SimpleNamespace(input_shape=(2,), discrete=True, vocabulary=words)
    with pytest.raises(DataError, match=sentence):
        checked_inputs(tokens, outline, "inputs")
