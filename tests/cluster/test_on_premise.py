"""cluster/README.md's ways for machines of one's own, followed to the letter on three simulated machines."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import raypfl
from tests.support.machines import ROOT, eventually, machines, run_shell, shell_output
from tests.support.nodes import NETWORK, Node, can_isolate

VENV = Path(sys.prefix)
PATH = os.pathsep.join([str(VENV / "bin"), os.environ["PATH"], "/usr/sbin"])
ABSENT = [tool for tool in ("sshd", "ssh", "rsync") if shutil.which(tool, path=PATH) is None]
SETTINGS = "method=ditto rounds=2 tracking.mlflow=false"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces"),
]


def commands(section: str) -> list[str]:
    """The lines that a section of the page tells its reader to type, without comments."""
    page = (ROOT / "cluster/README.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for line in "".join(blocks).splitlines()]


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[tuple[list[Node], dict[str, str]]]:
    """A laptop, a head and a worker with homes of their own, and the environment of a shell there."""
    home = "/tmp/home"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "PYTHON"))}
    environment = clean | {"HOME": home, "PATH": PATH}
    with machines(3, [tmp_path]) as three:
        for machine in three:
            shell_output(
                machine,
                # root's home is elsewhere: here, its own may hold the interpreter
                f"mkdir {home} && mount -t tmpfs tmpfs /run && sed 's#:/root:#:{home}:#' /etc/passwd > /run/passwd && "
                f"mount --bind /run/passwd /etc/passwd && echo 'export PYTHONPATH={home}/raypfl' > {home}/.bashrc",
            )
        yield three, environment


def test_by_hand(trio: tuple[list[Node], dict[str, str]]):
    (_, head, worker), environment = trio
    (token,) = commands("The token")
    mode, first, others, run = (line.replace("HEAD", f"{NETWORK}.2") for line in commands("By hand"))
    shell_output(head, token, environment)
    assert shell_output(head, "stat --format=%a ~/.ray/auth_token", environment).strip() == "600"
    copied = shell_output(head, "cat ~/.ray/auth_token", environment)
    shell_output(worker, f"(umask 077; mkdir ~/.ray && echo -n {copied.strip()} > ~/.ray/auth_token)", environment)
    with_code = environment | {"PYTHONPATH": str(ROOT)}
    shell_output(head, f"{mode} && {first} --num-cpus=1", with_code)
    shell_output(worker, f"{mode} && {others} --num-cpus=1", with_code)
    enough = f"{run} {SETTINGS} ray.actors=2 engine.group_size=5"  # one CPU a machine: it takes both
    shell_output(head, f"mkdir /tmp/at && cd /tmp/at && {enough}", with_code)
    refused = run_shell(head, enough.replace("first", "second"), with_code | {"RAY_AUTH_TOKEN": "0" * 64})
    assert refused.returncode == 2 and "token" in refused.stderr


@pytest.mark.skipif(bool(ABSENT), reason=f"takes {', '.join(ABSENT)}: apt-get install openssh-server rsync")
def test_from_one_place(trio: tuple[list[Node], dict[str, str]], tmp_path: Path):
    (laptop, head, worker), environment = trio
    for machine in (laptop, head, worker):
        shell_output(
            machine,
            "mkdir -m 700 ~/.ssh /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /run/host && "
            f"(test -e {tmp_path}/id || ssh-keygen -q -t ed25519 -N '' -f {tmp_path}/id) && "
            f"cp {tmp_path}/id ~/.ssh/id_ed25519 && cp {tmp_path}/id.pub ~/.ssh/authorized_keys && "
            "$(which sshd) -f /dev/null -o HostKey=/run/host -o PermitRootLogin=yes",
            environment,
        )
    config = yaml.safe_load((ROOT / "cluster/on-premise.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
    config["auth"]["ssh_user"] = "root"
    (install,) = [command for command in config["setup_commands"] if "bootstrap.py" in command]
    link = f"ln -sfn {VENV} ~/raypfl/.venv"  # the packages are here already; raypfl is the copied one
    config["setup_commands"] = [link if command == install else command for command in config["setup_commands"]]
    (tmp_path / "on-premise.yaml").write_text(yaml.safe_dump(config))
    (token,) = commands("The token")
    up, status, run, fetch, down = (
        line.replace("cluster/on-premise.yaml", f"{tmp_path}/on-premise.yaml") for line in commands("From one place")
    )
    shell_output(laptop, token, environment)
    shell_output(laptop, up, environment)
    eventually(laptop, f"{status} | tee /dev/stderr | grep -q ' 2 local.cluster.node'", environment)
    shell_output(laptop, run.replace("raypfl run", f"raypfl run {SETTINGS}"), environment)
    assert run_shell(laptop, run.replace("raypfl run", "raypfl run nonsense"), environment).returncode != 0
    shell_output(laptop, fetch.replace(" runs", f" {tmp_path}/runs"), environment)
    inline = raypfl.Experiment().override([*SETTINGS.split(), "engine.backend=inline", f"output={tmp_path}/inline"])
    assert raypfl.Result.load(tmp_path / "runs/first").weights_hash == raypfl.run(inline).weights_hash
    shell_output(laptop, down, environment)
    until = time.monotonic() + 200
    while any("raylet/raylet" in command for machine in (head, worker) for _, command in machine.processes()):
        assert time.monotonic() < until
        time.sleep(1)
