"""cluster/slurm.sh, submitted to a real Slurm on two machines."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import raypfl
from tests.support.machines import ROOT, Node, eventually, machines, shell_output
from tests.support.nodes import NETWORK, can_isolate

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
ABSENT = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(ABSENT), reason=f"takes {', '.join(ABSENT)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces"),
]

CONFIGURATION = f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}({NETWORK}.1)
SlurmUser=root
AuthInfo=socket=/tmp/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
MpiDefault=none
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeAddr={NETWORK}.1 CPUs=2 RealMemory=4000
NodeName=n2 NodeAddr={NETWORK}.2 CPUs=2 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2
"""

SETTINGS = "method=ditto tracking.mlflow=false ray.actors=2 engine.group_size=5"
"""Two client actors of one CPU each, so that a job with one CPU a node needs both nodes."""


@dataclass
class Slurm:
    """A Slurm of two nodes. folder : where jobs are submitted, which both see."""

    nodes: list[Node]
    folder: Path
    environment: dict[str, str]

    def __call__(self, line: str) -> str:
        """What a line of shell prints on the first node."""
        return shell_output(self.nodes[0], line, self.environment, self.folder)

    def submit(self, words: str, options: str = "") -> str:
        """The number of a job that runs a raypfl command."""
        small = "--parsable --cpus-per-task=1 --mem=2000"
        return self(f"sbatch {small} {options} {ROOT}/cluster/slurm.sh {words}").strip()

    def wait(self, line: str) -> str:
        return eventually(self.nodes[0], line, self.environment, self.folder, seconds=400)

    def ended(self, job: str) -> str:
        """The state and exit code that a job ended with."""
        self.wait(f"! squeue --noheader --jobs={job} --states=PD,R,CG | grep -q .")
        return self(f"scontrol --oneliner show job {job} | grep -oE '(JobState|ExitCode)=[^ ]+' | sort | xargs").strip()

    def log(self, job: str) -> str:
        return (self.folder / f"raypfl-{job}.log").read_text()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # of which nothing is used
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = os.environ | {
        "PATH": PATH,
        "PYTHONPATH": str(ROOT),
        "RAYPFL_CACHE": "/tmp/cache",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        environment.pop(name, None)
    files = "--socket=/tmp/munge.socket --pid-file=/tmp/munge.pid --seed-file=/tmp/munge.seed --log-file=/tmp/munge.log"
    with machines(2, [folder]) as nodes:
        started = Slurm(nodes, folder, environment)
        for node in nodes:
            shell_output(
                node, f"mkdir /tmp/slurmd && munged --force --key-file={folder}/munge.key {files}", environment
            )
        started("mkdir /tmp/slurmctld && slurmctld")
        for i, node in enumerate(nodes, 1):
            shell_output(node, f"slurmd -N n{i}", environment)
        started.wait("test $(sinfo --noheader --partition=low --states=idle --format=%D) = 2")
        yield started


def test_a_job_runs_on_its_nodes_and_leaves_nothing_there(slurm: Slurm):
    job = slurm.submit(f"run {SETTINGS} rounds=2")
    assert slurm.ended(job) == "ExitCode=0:0 JobState=COMPLETED", slurm.log(job)
    assert raypfl.Result.load(slurm.folder / f"runs/job-{job}").metadata["actors"] == 2
    for node in slurm.nodes:
        assert "raypfl-" not in shell_output(node, "ls /tmp")
        assert not [command for _, command in node.processes() if "ray" in command.replace(str(ROOT), "")]


def test_a_jobs_exit_code_is_that_of_raypfl(slurm: Slurm):
    job = slurm.submit("run method=dito")
    assert slurm.ended(job) == "ExitCode=2:0 JobState=FAILED"
    assert "ditto" in slurm.log(job)


def test_a_cancelled_job_is_saved(slurm: Slurm):
    job = slurm.submit(f"run {SETTINGS} rounds=5000 checkpoint.every=5000")
    slurm.wait(f"grep -q 'in runs/job-{job}' raypfl-{job}.log")
    slurm.wait(f"test -e runs/job-{job}/checkpoints && sleep 5")
    slurm(f"scancel {job}")
    assert slurm.ended(job).endswith("JobState=CANCELLED")
    assert "Stopped. To continue" in slurm.log(job)
    assert 0 < raypfl.Result.load(slurm.folder / f"runs/job-{job}").round < 5000


@pytest.mark.parametrize("cause", ["preempted", "at its time limit"])
def test_a_job_that_is_requeued_goes_on_to_the_same_bits(slurm: Slurm, cause: str, tmp_path: Path):
    settings = f"{SETTINGS} rounds=60 evaluation.every=60"
    job = slurm.submit(f"run {settings} checkpoint.every=200")
    slurm.wait(f"grep -q 'in runs/job-{job}' raypfl-{job}.log")
    if cause == "preempted":
        slurm("sbatch --partition=high --nodes=2 --exclusive --wrap true")
    else:
        slurm(f"scancel --batch --signal=USR1 {job}")  # as Slurm does, by --signal
    slurm.wait(f"grep -q 'Stopped. To continue' raypfl-{job}.log")
    slurm.wait(f"squeue --noheader --jobs={job} --states=PD | grep -q .")
    # Slurm would wait for two minutes. In the second in which a job was requeued its new credential counts as revoked.
    slurm(f"sleep 2 && scontrol update JobId={job} StartTime=now")
    assert slurm.ended(job) == "ExitCode=0:0 JobState=COMPLETED", slurm.log(job)
    undisturbed = raypfl.Experiment().override([*settings.split(), "engine.backend=inline", f"output={tmp_path}"])
    resumed = raypfl.Result.load(slurm.folder / f"runs/job-{job}")
    assert resumed.weights_hash == raypfl.run(undisturbed).weights_hash
