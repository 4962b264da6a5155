"""Devices and turns: durations against a loop, draws, and a million of them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from raypfl.common.errors import ConfigError
from raypfl.devices import Devices, Exchange, Training, Turn
from raypfl.devices.hardware import DeviceClass, HardwareClasses, LogNormalHardware
from raypfl.learning.sample_order import epoch_order


def test_a_turn_lasts_as_long_as_download_samples_and_upload():
    devices = LogNormalHardware(watts=2.5).devices(50, seed=3)
    clients = np.array([4, 49, 4])
    samples = np.array([60, 10, 1])
    seconds = devices.turn_seconds(clients, samples, down_bytes=1e6, up_bytes=25e4)
    for i, client in enumerate(clients):
        download = 8 * 1e6 / (1000 * devices.down_kbps[client])
        compute = samples[i] * devices.ms_per_sample[client] / 1000
        upload = 8 * 25e4 / (1000 * devices.up_kbps[client])
        assert seconds[i] == pytest.approx(download + compute + upload, rel=1e-12)
    assert (devices.watts == 2.5).all()


@pytest.mark.parametrize("steps", [None, 1, 7, 40])
@pytest.mark.parametrize("smallest", [1, 4])
def test_a_training_visits_the_samples_that_are_put_into_batches(steps, smallest):
    sizes = np.array([1, 2, 3, 8, 9, 19, 20, 50])
    order = epoch_order(np.arange(len(sizes), dtype=np.uint64), sizes, 8, 3, steps, smallest)
    training = Training(8, epochs=3, steps=steps, smallest=smallest, models=2)
    assert (training.samples(sizes) == 2 * order.counts.sum(axis=1)).all()
    assert (Turn((Exchange((training, training)),)).samples(sizes) == 4 * order.counts.sum(axis=1)).all()


def test_a_client_keeps_its_device_when_the_federation_grows_and_another_seed_gives_others():
    hardware = LogNormalHardware()
    few, many, other = hardware.devices(10, 0), hardware.devices(1000, 0), hardware.devices(1000, 1)
    assert (few.ms_per_sample == many.ms_per_sample[:10]).all() and (few.up_kbps == many.up_kbps[:10]).all()
    assert (many.ms_per_sample != other.ms_per_sample).all()
    assert (LogNormalHardware(speed_spread=0.0).devices(9, 0).ms_per_sample == 10.0).all()


def test_log_normal_devices_have_their_medians_and_spreads_and_classes_their_shares():
    phone = DeviceClass(share=3, ms_per_sample=40.0, speed_spread=0.5, bandwidth_spread=0.8, watts=3.0)
    silo = DeviceClass(share=1, ms_per_sample=0.5, speed_spread=0.0, watts=300.0)
    devices = HardwareClasses(classes=(phone, silo)).devices(100_000, seed=0)
    phones = devices.watts == 3.0
    deviation = (phones.mean() - 0.75) / np.sqrt(0.75 * 0.25 / len(devices))
    assert abs(deviation) < 4

    logarithms = np.log(devices.ms_per_sample[phones])
    assert abs(logarithms.mean() - np.log(40)) < 4 * 0.5 / np.sqrt(phones.sum())
    assert logarithms.std() == pytest.approx(0.5, rel=0.02)
    assert np.log(devices.down_kbps[phones]).std() == pytest.approx(0.8, rel=0.02)
    assert (devices.ms_per_sample[~phones] == 0.5).all()
    assert np.corrcoef(logarithms, np.log(devices.down_kbps[phones]))[0, 1] == pytest.approx(0, abs=0.02)


def test_a_million_devices_and_their_turns_take_less_than_200_mb():
    tracemalloc.start()
    devices = LogNormalHardware().devices(1_000_000, seed=0)
    devices.turn_seconds(np.arange(len(devices)), 100, 1e6, 1e6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6


@pytest.mark.parametrize(
    ("column", "value"), [("ms_per_sample", 0.0), ("down_kbps", np.inf), ("up_kbps", -1.0), ("watts", np.nan)]
)
def test_a_device_that_could_take_no_time_or_forever_is_refused(column, value):
    columns = {name: np.ones(3) for name in ("ms_per_sample", "down_kbps", "up_kbps", "watts")}
    columns[column][1] = value
    with pytest.raises(ConfigError, match=f"The device of client 1 has a {column} of {value}"):
        Devices(**columns)


def test_a_class_of_devices_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"classes\[0\]\.share is 0; it must be above 0"):
        HardwareClasses(classes=(DeviceClass(share=0),))
