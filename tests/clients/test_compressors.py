"""What compressors send, and how the server reads it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raypfl.clients.compression.bits import packed, unpacked
from raypfl.clients.compression.compressors import QSGD, Drive, Half, RandomK, Sign, TopK, Uniform
from raypfl.common import rng

SIZE = 1000

UNBIASED = [
    QSGD(bits=3, bucket=40),
    QSGD(bits=2, bucket=64, norm="l2"),
    Uniform(bits=2),
    RandomK(fraction=0.25),
]

LENGTHS = [
    (Half(), 2 * SIZE),
    (Uniform(bits=5), 8 + 5 * SIZE // 8),
    (QSGD(), 4 * 2 + SIZE // 2),
    (QSGD(bits=3, bucket=300), 4 * 4 + 3 * SIZE // 8),
    (Sign(), 4 + SIZE // 8),
    (Drive(), 8 + 4 + 1024 // 8),
    (TopK(fraction=0.01), 4 * 10 + math.ceil(10 * 10 / 8)),
    (TopK(fraction=0.3), 4 * 300 + SIZE // 8),
    (RandomK(fraction=0.1), 8 + 4 * 100),
]


def update(size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def sent(compressor, numbers, key=7) -> np.ndarray:
    """Return numbers as the server reads them."""
    return compressor.decode(compressor.encode(numbers, rng.generator_of(key)), len(numbers))


@pytest.mark.parametrize("width", [1, 3, 8, 14])
def test_numbers_of_a_few_bits_are_packed_and_unpacked(width):
    codes = np.random.default_rng(width).integers(2**width, size=101)
    message = packed(codes, width)
    assert len(message) == math.ceil(101 * width / 8)
    assert np.array_equal(unpacked(message, width, 101), codes)


@pytest.mark.parametrize(("compressor", "length"), LENGTHS)
def test_messages_have_the_length_that_their_numbers_and_scales_need(compressor, length):
    assert len(compressor.encode(update(), rng.generator_of(0))) == length


@pytest.mark.parametrize("compressor", [compressor for compressor, _ in LENGTHS])
@pytest.mark.parametrize("size", [1, 2, 7, 513])
def test_updates_of_any_size_and_zeros_are_read_as_such(compressor, size):
    read = sent(compressor, update(size))
    assert read.shape == (size,) and read.dtype == np.float32 and np.isfinite(read).all()
    assert np.array_equal(sent(compressor, np.zeros(size, np.float32)), np.zeros(size))


@pytest.mark.parametrize("compressor", UNBIASED)
def test_the_mean_of_many_messages_is_the_update(compressor):
    numbers = update(60) * np.linspace(0.1, 3, 60, dtype=np.float32)
    draws = np.stack([sent(compressor, numbers, key) for key in range(4000)]).astype(np.float64)
    deviation = draws.std(0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - numbers) <= 5 * deviation + 1e-3).all()
    assert draws.std(0).max() > 0


def test_the_mean_of_many_messages_of_drive_is_the_update():
    # Unbiased for a uniformly random rotation; a Hadamard transform comes close in many dimensions.
    numbers = update(256)
    draws = np.stack([sent(Drive(), numbers, key) for key in range(2000)]).astype(np.float64)
    assert np.linalg.norm(draws.mean(0) - numbers) < 0.05 * np.linalg.norm(numbers)
    error = np.square(draws - numbers).sum(1).mean() / np.square(numbers).sum()
    assert error == pytest.approx(math.pi / 2 - 1, rel=0.05)  # the paper's Theorem 4


@pytest.mark.parametrize("bits", [2, 4])
def test_the_variance_of_qsgd_is_below_the_papers_bound(bits):
    levels = 2 ** (bits - 1) - 1
    numbers = update(200)
    compressor = QSGD(bits=bits, bucket=200, norm="l2")
    errors = [np.square(sent(compressor, numbers, key) - numbers).sum() for key in range(500)]
    bound = min(200 / levels**2, math.sqrt(200) / levels) * np.square(numbers).sum()
    assert 0.3 * bound < np.mean(errors) < bound


def test_top_k_loses_no_more_than_the_share_that_it_leaves_out():
    numbers = update()
    read = sent(TopK(fraction=0.1), numbers)
    largest = np.argsort(-np.abs(numbers))[:100]
    expected = np.zeros(SIZE, np.float32)
    expected[largest] = numbers[largest]
    assert np.array_equal(read, expected)
    assert np.square(read - numbers).sum() <= 0.9 * np.square(numbers).sum()


def test_signs_lose_what_the_definition_says():
    numbers = update().astype(np.float64)
    read = sent(Sign(), update())
    scale = np.abs(numbers).mean()
    assert read == pytest.approx(scale * np.sign(numbers), rel=1e-6)
    lost = np.square(read - numbers).sum() / np.square(numbers).sum()
    assert lost == pytest.approx(1 - np.abs(numbers).sum() ** 2 / (SIZE * np.square(numbers).sum()), rel=1e-5)


def test_random_places_are_scaled_only_where_the_rest_is_lost():
    numbers = update()
    scaled = sent(RandomK(fraction=0.1), numbers)
    plain = sent(RandomK(fraction=0.1, error_feedback=True), numbers)
    places = np.flatnonzero(plain)
    assert len(places) == 100 and np.array_equal(plain[places], numbers[places])
    assert scaled == pytest.approx(10 * plain, rel=1e-6)


def test_half_precision_has_a_largest_number():
    assert sent(Half(), np.array([1e6, -1e6, 0.1], np.float32)) == pytest.approx([65504, -65504, 0.1], rel=1e-3)
