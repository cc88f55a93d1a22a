"""What `submit` writes for Slurm and Kubernetes."""

import subprocess
from pathlib import Path

import pytest
import yaml

from synchromesh.cli import main

RUN = ["--", "train", "digits/cnn", "--elastic", "2:4", "--output", "my runs/first"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_batch_script_starts_the_same_command_on_each_node(tmp_path: Path) -> None:
    """Slurm's commands are stand-ins: two names of nodes, and what srun is asked to run."""
    (tmp_path / "token").touch()
    assert main(["submit", "--slurm", "job.sh", "--name", "mine", *RUN]) == 0
    text = Path("job.sh").read_text()
    assert "#SBATCH --nodes=2-4\n" in text and "#SBATCH --job-name=mine\n" in text
    stand_ins = {
        "scontrol": 'printf "one\\ntwo\\n"',
        "srun": 'case "$*" in *getent*) echo "10.0.0.7 x";; *) printf "%s\\n" "$@";; esac',
    }
    for name, does in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", "job.sh"], env=env, capture_output=True, text=True, check=True)
    own = ["--coordinator", "10.0.0.7:7400", "--token-file", str(tmp_path / "token")]
    assert done.stdout.splitlines()[2:] == ["synchromesh", "train", *own, *RUN[2:]]


def test_kubernetes_gets_a_service_a_policy_and_a_job() -> None:
    script = ["run", "--elastic", "2:4", "mine.py", "--rate", "0.1"]
    assert main(["submit", "--kubernetes", "run.yaml", "--image", "it:1", "--", *script]) == 0
    service, policy, job = yaml.safe_load_all(Path("run.yaml").read_text())
    assert [x["kind"] for x in (service, policy, job)] == ["Service", "NetworkPolicy", "Job"]
    assert {x["metadata"]["name"] for x in (service, policy, job)} == {"synchromesh"}
    assert service["spec"]["clusterIP"] == "None"
    label = service["spec"]["selector"]
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"] == label == policy["spec"]["podSelector"]["matchLabels"]
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (4, "Indexed")
    (container,) = pod["spec"]["containers"]
    assert container["command"] == [
        "synchromesh", "run", "--coordinator", "synchromesh-0.synchromesh:7400",
        "--token-file", "/token/token", *script[1:],
    ]  # fmt: skip
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--slurm", "f", "--", "train", "digits/cnn"], "submit takes an elastic run's own words"),
     (["--slurm", "f", "--", "plan"], "submit takes an elastic run's own words"),
     (RUN, "give --slurm FILE or --kubernetes FILE"),
     (["--kubernetes", "f", *RUN], "--kubernetes needs --image"),
     (["--slurm", "f", *RUN, "--coordinator", "h:1"], "submit says --coordinator itself"),
     (["--slurm", "f", "--", "train", "x", "--elastic", "4:2"], "'4:2' is no range of hosts")],
)  # fmt: skip
def test_bad_input_gets_a_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words]) == 2
    assert told in capsys.readouterr().err
    assert not Path("f").exists()
