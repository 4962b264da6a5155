"""The memory of large populations and long runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import Peak

CLIENTS = 10_000
COHORT = 500
ROUNDS = 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_ten_thousand_stateful_clients_with_a_cohort_of_500_stay_within_4_gib(tmp_path):
    script = (
        "import sys, raypfl\n"
        "experiment = raypfl.Experiment(\n"
        "    method='ditto', data='tests.support.federated_data:noise',\n"
        "    partition={'name': 'iid', 'clients': int(sys.argv[1])},\n"
        "    cohort={'size': int(sys.argv[2])}, rounds=int(sys.argv[3]),\n"
        "    evaluation={'every': 2, 'protocols': ['local']},\n"  # 'global' is every model on everybody's test data
        "    ray={'actors': 2}, checkpoint={'every': 2}, tracking={'mlflow': False}, output=sys.argv[4])\n"
        "result = raypfl.run(experiment)\n"
        "print('ROUNDS', result.round, result.rounds['seconds'].to_pylist())\n"
    )
    arguments = [str(CLIENTS), str(COHORT), str(ROUNDS), str(tmp_path)]
    environment = os.environ | {"RAYPFL_TEST_SAMPLES": str(20 * CLIENTS), "RAYPFL_CACHE": str(tmp_path / "cache")}
    running = subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, stdout=subprocess.PIPE)
    with Peak(running.pid) as peak:
        out = running.communicate()[0].decode()
    data = 20 * CLIENTS * 64
    most = 1e6 * sum(peak.megabytes.values())
    print(out, f"peak {most / 2**30:.2f} GiB")
    assert running.returncode == 0 and f"ROUNDS {ROUNDS}" in out
    assert 0 < most < data + 4 * 2**30


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_nothing_grows_over_two_thousand_rounds(tmp_path):
    script = (
        "import json, sys\n"
        "from benchmarks.head import experiment\n"
        "from benchmarks.memory import memory\n"
        "import raypfl\n"
        "from raypfl.engine.events import RoundFinished\n"
        "def look(event):\n"
        "    if isinstance(event, RoundFinished) and event.round in (100, 2000):\n"
        "        print('HELD', json.dumps(memory()), flush=True)\n"
        "parts = {'rounds': 2020, 'method': 'ditto', 'cohort': {'size': 10}, 'ray': {'actors': 2}}\n"
        "raypfl.run(experiment(sys.argv[1], 40, **parts), listeners=[look])\n"
    )
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    early, late = (json.loads(line[5:]) for line in process.stdout.splitlines() if line.startswith("HELD "))
    grown = {part: (early[part], late[part]) for part in early if late[part] > 1.03 * early[part] + 1}  # MB

    assert not grown
